"""``amos glue``: fine-tune a checkpoint on the GLUE tasks over several seeds, and print the table of the papers."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand
from amos_fairseq.downstream.texts.glue.tasks import AVERAGED, parse_tasks

DESCRIPTION = """\
Fine-tune a checkpoint of this package, of any objective and size, on GLUE: one fairseq-train process per task and seed, one at
a time on each GPU. The command prints and saves medians and standard deviations over the seeds as in AMOS Table 1 (glue.md
and glue.json in OUT). After a stop the same command continues; it does not repeat finished runs.
Official files are converted with the tokenizer of the checkpoint, once; OUT/data keeps the result.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "glue", "fine-tune a checkpoint on GLUE", DESCRIPTION, run)
    fine_tuning.add_arguments(parser, "GLUE's official files (CoLA/train.tsv, ...), or what amos prepare glue wrote")
    add = parser.add_argument
    text = f"tasks, separated by commas, or ALL that are in --data of {', '.join(AVERAGED)}; WNLI is known too and never part "
    add("--tasks", metavar="LIST", default="ALL", help=text + "of the average")
    text = "predict the test sets with each task's best run on dev and write the archive for the leaderboard"
    add("--write-test", action="store_true", help=text)
    add("--multi-task", action="store_true", help="train one model for all tasks, with a head for each")
    text = "also train on predictions of other models, each seed on those of the same seed: OUT of this command with "
    add("--teachers", metavar="DIR", type=Path, help=text + "--write-train")
    text = "write each run's predictions of the rows that it was trained on, for --teachers"
    add("--write-train", action="store_true", help=text)


def run(arguments: argparse.Namespace) -> None:
    parse_tasks(arguments.tasks)
    fine_tuning.start(arguments)
    from amos_fairseq.downstream.texts.glue.command import main

    main(arguments)
