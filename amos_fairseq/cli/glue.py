"""``amos glue``: a checkpoint fine-tuned on the GLUE tasks over several seeds, and the table of AMOS made of it."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning_flags

DESCRIPTION = """\
Fine-tune a checkpoint of this package, whatever its objective and size, on GLUE: one fairseq-train per task and seed, on
each GPU one at a time. Prints and saves medians and standard deviations over the seeds as in AMOS Table 1 (glue.md,
glue.csv, glue.json in OUT). Stopped or interrupted, the same command continues; what is finished is not made again.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "glue",
        help="fine-tune a checkpoint on GLUE and print the papers' table",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    fine_tuning_flags.add_run_flags(parser, "what preprocess/glue/prepare.sh wrote")
    parser.add_argument(
        "--tasks", metavar="LIST", default="MNLI,QQP,QNLI,SST-2,CoLA,RTE,MRPC,STS-B",
        help="with commas between, or ALL for these; WNLI is known too and never counts in the average",
    )  # fmt: skip
    fine_tuning_flags.add_recipe_flags(parser)
    parser.add_argument(
        "--intermediate", metavar="OUT", nargs="?", const="", default=argparse.SUPPRESS,
        help="start RTE, STS-B and MRPC from the best MNLI run on dev, of this command or in OUT (default: from CKPT)",
    )  # fmt: skip
    fine_tuning_flags.add_device_flags(parser)
    parser.add_argument("--paper", action="store_true", help="show the paper's AMOS, ELECTRA and BERT in rows beside")
    parser.add_argument(
        "--squad", metavar="DIR", default=argparse.SUPPRESS,
        help="results of amos squad to show beside (default: those in --out, if there are)",
    )  # fmt: skip
    parser.add_argument(
        "--write-test", action="store_true",
        help="predict the test sets with each task's best dev run and write the leaderboard's archive",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from amos_fairseq.finetuning.glue.tasks import parse_tasks

    tasks = parse_tasks(arguments.tasks)
    # Imported here: torch and fairseq take seconds that `amos --help` need not wait.
    from amos_fairseq.finetuning.benchmark import Stopped
    from amos_fairseq.finetuning.glue.experiment import run_glue

    session = fine_tuning_flags.session_of(arguments)
    intermediate = getattr(arguments, "intermediate", None)
    squad = getattr(arguments, "squad", None)
    try:
        outcome = run_glue(
            session, Path(arguments.data), tasks,
            intermediate=None if intermediate is None else Path(intermediate or arguments.out).resolve(),
            squad=None if squad is None else Path(squad), with_paper=arguments.paper, with_test=arguments.write_test,
        )  # fmt: skip
    except (Stopped, KeyboardInterrupt):
        fine_tuning_flags.say_stopped(arguments.out)
    if outcome.table is not None:
        outcome.table.print()
    for notice in outcome.notices:
        print(notice)
    fine_tuning_flags.say_files(outcome.files)
    fine_tuning_flags.report_failures(outcome.failures)
