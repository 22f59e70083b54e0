"""``amos tag``: fine-tune a checkpoint on sequence tagging over several seeds."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_label_columns, add_subcommand, add_unlabeled, refuse_given
from amos_fairseq.experiments import TAGGING_VIEWS

DESCRIPTION = """\
Fine-tune a checkpoint of this package on a column of labeled words (parts of speech, chunks, named entities), one run per
seed. The command prints and saves medians and standard deviations of accuracy or, for labels that mark spans, span F1
(tagging.md and tagging.json in OUT), and, of the run that is best on dev, a row for each type of span or label; each run
also has its predictions. After a stop the same command continues.
Several columns, given as --data A B, are learned together, by one model. With --views the model also learns from sentences
without labels (cross-view training). With --predict the run that is best on dev labels the words of another file, or finds
spans in raw text.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "tag", "fine-tune a checkpoint on sequence tagging (POS, chunks, NER)", DESCRIPTION, run
    )
    fine_tuning.add_arguments(
        parser,
        "directory that amos prepare tagging wrote",
        has_pooling=False,
        dev_default=" (default: a random fifth of --train, but 50 sentences at most, or a tenth if more)",
        raw_help="CoNLL-U, one word a line with its labels behind it, or tables: lists of words and labels, texts with spans",
        several_data=True,
        recipe="own_labels",
    )
    text = "OUT of this command as --checkpoint: write the words of FILE with the labels of its best run to the file --out; "
    text += (
        "the same forms as --train, or one sentence a line with blanks between its words; --column: these labels alone. With "
        "--out SPANS.jsonl: the spans with their characters, labels and probabilities; FILE may then have a raw text a line"
    )
    parser.add_argument("--predict", metavar="FILE", type=Path, help=text)
    text = "sentences, in the same forms as --train, to score the run that is best on dev on, beside dev"
    parser.add_argument("--test", metavar="FILE", type=Path, help=text)
    add_label_columns(parser.add_argument)
    add_unlabeled(parser.add_argument)
    fine_tuning.add_cross_views(parser, TAGGING_VIEWS)


def run(arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        fine_tuning.check_prediction(arguments, "column", "columns")
    if arguments.data is not None:
        reason = "is for raw files; --data was prepared with its own"
        of_test = ["columns"] if arguments.test is None else []
        refuse_given(arguments, ["column", "labeled", "unlabeled", *of_test], reason)
    if arguments.predict is None:
        fine_tuning.check_data(arguments, needs_dev=False)
    fine_tuning.start(arguments)
    from amos_fairseq.downstream.words.command import main

    main(arguments)
