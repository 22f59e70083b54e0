"""``amos classify``: fine-tune a checkpoint on a table of texts and labels, and label other tables."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand
from amos_fairseq.inputs import LABEL_COLUMN, TEXT_COLUMN

DESCRIPTION = """\
Fine-tune a checkpoint of this package on any table of texts, or pairs of texts, with a class, several labels or a number: TSV,
CSV, JSON lines, Parquet, or a folder that datasets saved. The command prints and saves medians and standard deviations over the
seeds (classification.md and .json in OUT) beside a model that always predicts the most frequent class, and, of the selected
run, a row for each class; each run also has its predictions. Selected is the best run on dev; a linear model, which a small
table gets too, only if it is better by two standard errors. Probabilities are calibrated on dev. After a stop the same command
continues. With --predict the selected run labels another table.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "classify", "fine-tune a checkpoint on your own labeled texts", DESCRIPTION, run
    )
    add = parser.add_argument
    text = "table with a header: .tsv, .csv, JSON lines, Parquet, or a folder of datasets"
    add("--train", metavar="FILE", type=Path, help=text)
    text = "table to score on (default: a random fifth of --train, 50 rows at most, or a tenth if more; stratified by class)"
    add("--dev", metavar="FILE", type=Path, help=text)
    text = "table to score the selected run on, beside dev"
    add("--test", metavar="FILE", type=Path, help=text)
    text = "OUT of this command as --checkpoint: label all rows of FILE with its selected run, and write them to the file --out"
    add("--predict", metavar="FILE", type=Path, help=text)
    text = "with --predict, of classes and labels: a column with the probability of each"
    add("--probabilities", action="store_true", help=text)
    text = f"column of the texts, or two for pairs; of nested objects such as meta.body (default: {TEXT_COLUMN})"
    add("--text", metavar="COLUMN", nargs="+", help=text)
    text = f"column of the labels, or several of 0 and 1, one for each label (default: {LABEL_COLUMN})"
    add("--label", metavar="COLUMN", nargs="+", help=text)
    text = "classes: one of several; labels: any number a row; number (default: labels for lists, number if all labels are "
    text += "numbers and some have a fraction, else classes; printed)"
    add("--kind", choices=("classes", "labels", "number"), help=text)
    text = "between the labels of a row, with --kind labels; lists in JSON lines and Parquet need none"
    add("--label-separator", metavar="TEXT", default=",", help=text)
    add("--no-header", action="store_true", help="the first line is a row; the columns are called 1, 2, ...")
    fine_tuning.add_arguments(parser, None, recipe="own_labels")


def run(arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        suffixes = (".tsv", ".csv", ".jsonl")
        fine_tuning.check_prediction(arguments, "text", "no_header", "probabilities", suffixes=suffixes)
    elif arguments.train is None:
        arguments.parser.error("give the table to train on as --train, or one to label as --predict")
    else:
        from amos_fairseq.downstream.texts.prepare import tables_of

        arguments.tables = tables_of(arguments)
    fine_tuning.start(arguments)
    from amos_fairseq.downstream.texts.command import main

    main(arguments)
