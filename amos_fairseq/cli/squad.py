"""``amos squad``: fine-tune a checkpoint on SQuAD over several seeds."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import SIZE, add_subcommand

DESCRIPTION = """\
Fine-tune a checkpoint of this package on SQuAD 1.1 or 2.0, whichever the dev file is of, one run per seed. The command prints
and saves medians and standard deviations of EM and F1 (squad.md and squad.json in OUT); each run also has its
predictions in the official format and its null odds. After a stop the same command continues. With --predict the run that is
best on dev answers other questions.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "squad", "fine-tune a checkpoint on SQuAD", DESCRIPTION, run)
    fine_tuning.add_arguments(
        parser,
        "directory that amos prepare squad wrote",
        has_pooling=False,
        raw_help="a JSON file of SQuAD 1.1 or 2.0, or flat rows of datasets (JSON, JSON lines, Parquet, a folder)",
    )
    add = parser.add_argument
    text = "OUT of this command as --checkpoint: write the answers of its best run to the questions of FILE to the file --out: "
    text += "predictions in SQuAD's form (.json), or a row for each question (.jsonl); FILE is as --train, without answers too"
    add("--predict", metavar="FILE", type=Path, help=text)
    text = "independent start and end, or XLNet's joint head (default: joint for electra and electric)"
    add("--span-head", choices=("independent", "joint"), help=text)
    text = "tokens of question and context together (default: 512, or the maximum of the encoder)"
    add("--tokens-per-window", type=SIZE, metavar="N", help=text)
    text = "tokens from one window to the next (default: 128, or a quarter of a shorter window)"
    add("--doc-stride", type=SIZE, metavar="N", help=text)
    text = "maximum number of tokens of a question (default: 64, or half of a shorter window)"
    add("--max-question-length", type=SIZE, metavar="N", help=text)
    add("--max-answer-length", type=SIZE, metavar="N", default=30, help="maximum number of tokens of an answer")


def run(arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        fine_tuning.check_prediction(arguments, suffixes=(".json", ".jsonl"))
    else:
        fine_tuning.check_data(arguments)
    fine_tuning.start(arguments)
    from amos_fairseq.downstream.spans.command import main

    main(arguments)
