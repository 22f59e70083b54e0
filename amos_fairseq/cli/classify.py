"""``amos classify``: fine-tune a checkpoint on a table of texts and labels, and label other tables."""

import argparse
import functools
import threading
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import say

OF_PREDICTION = ("subcommand", "run", "checkpoint", "predict", "out", "text", "csv_quotes", "cpu")
DESCRIPTION = """\
Fine-tune a checkpoint of this package on any table of texts, or pairs of texts, with a class, several labels or a number: TSV,
CSV, JSON lines, Parquet, or a folder that datasets saved. The command prints and saves medians and standard deviations over the
seeds (classification.md, .csv and .json in OUT) beside a model that always predicts the most frequent class; each run also has
its predictions. After a stop the same command continues. With --predict the run that is best on dev labels another table.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "classify", "fine-tune a checkpoint on your own labeled texts", DESCRIPTION)
    add = parser.add_argument
    add(
        "--train",
        metavar="FILE",
        type=Path,
        help="table with a header: .tsv, .csv, .jsonl, .parquet, or a folder of datasets",
    )
    add(
        "--dev",
        metavar="FILE",
        type=Path,
        help="table to score on (default: a tenth of the rows of --train, at random)",
    )
    text = "OUT of this command as --checkpoint: label the rows of FILE with its best run, and write them to the file --out"
    add("--predict", metavar="FILE", type=Path, help=text)
    text = (
        "column of the texts, or two columns for pairs (default: one with a usual name, such as text, or the only one)"
    )
    add("--text", metavar="COLUMN", nargs="+", help=text)
    text = "column of the labels (default: one with a usual name, such as label, or the only one besides the texts)"
    add("--label", metavar="COLUMN", help=text)
    text = "classes: one of several; labels: any number a row; number (default: inferred from the labels, and printed)"
    add("--kind", choices=("classes", "labels", "number"), help=text)
    text = "between the labels of a row, with --kind labels; lists in JSON lines and Parquet need none"
    add("--label-separator", metavar="TEXT", default=",", help=text)
    add("--no-header", action="store_true", help="the first line is a row; the columns are called 1, 2, ...")
    add("--csv-quotes", action="store_true", help="quotes in .tsv are those of CSV (default: ordinary characters)")
    add("--baseline", action="store_true", help="also run every seed from random weights, for a row of the table")
    fine_tuning.add_arguments(parser, None, has_paper=False)
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        fine_tuning.check_prediction(parser, arguments, OF_PREDICTION)
        label(arguments)
        return
    if arguments.train is None:
        raise UserError("give the table to train on as --train, or one to label as --predict")
    if arguments.from_scratch and arguments.baseline:
        raise UserError("--baseline adds the runs that --from-scratch makes: leave one of them out")
    import_fairseq(arguments.checkpoint, arguments.subcommand)
    from amos_fairseq.downstream.classification.command import Classification

    session = fine_tuning.session_from(arguments, Classification.name)
    from amos_fairseq.downstream.classification.prepare import open_source, prepare_inside

    source = open_source(
        arguments.train,
        arguments.dev,
        arguments.text,
        arguments.label,
        arguments.kind,
        arguments.label_separator,
        not arguments.no_header,
        arguments.csv_quotes,
    )
    with fine_tuning.preparing(session, Classification.name) as tokenizer:
        data = prepare_inside(session.out, source, tokenizer)
    fine_tuning.run_and_print(arguments.out, Classification(session, data, arguments.baseline))


def label(arguments: argparse.Namespace) -> None:
    say(f"reading {arguments.checkpoint} and {arguments.predict}", "classify")  # the imports take seconds
    from amos_fairseq.downstream.labeling import check_output, label_table

    check_output(Path(arguments.out))
    import_fairseq()
    from amos_fairseq.downstream.benchmark import Stopped
    from amos_fairseq.downstream.runner import stop_on_signals
    from amos_fairseq.downstream.session import find_devices

    stop = threading.Event()
    (device, *_) = find_devices(arguments.cpu, 1)
    with stop_on_signals(stop):
        try:
            number = label_table(
                Path(arguments.checkpoint),
                arguments.predict,
                Path(arguments.out),
                arguments.text,
                arguments.csv_quotes,
                device,
                stop,
            )
        except Stopped:
            raise KeyboardInterrupt from None
    print(f"{arguments.out}: {number:,} rows")
