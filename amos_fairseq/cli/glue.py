"""``amos glue``: fine-tune a checkpoint on the GLUE tasks over several seeds, and print the table of the papers."""

import argparse
import sys
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand
from amos_fairseq.data.glue_tasks import AVERAGED, parse_tasks

DESCRIPTION = """\
Fine-tune a checkpoint of this package, of any objective and size, on GLUE: one fairseq-train process per task and seed, one at
a time on each GPU. The command prints and saves medians and standard deviations over the seeds as in AMOS Table 1 (glue.md,
glue.csv and glue.json in OUT). After a stop the same command continues; it does not repeat finished runs.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "glue", "fine-tune a checkpoint on GLUE", DESCRIPTION)
    fine_tuning.add_arguments(parser, "directory that amos prepare glue wrote", has_similar_lengths=False)
    add = parser.add_argument
    text = f"tasks, separated by commas, or ALL that are prepared of {', '.join(AVERAGED)}; WNLI is known too and never part "
    add("--tasks", metavar="LIST", default="ALL", help=text + "of the average")
    text = "start RTE, STS-B and MRPC from the MNLI run that is best on dev, of this command or in OUT (default: from CKPT)"
    add("--intermediate", metavar="OUT", nargs="?", const="", help=text)
    text = "results of amos squad to add to the table (default: those in --out, if there are any)"
    add("--squad", metavar="DIR", type=Path, help=text)
    text = "predict the test sets with each task's best run on dev and write the archive for the leaderboard"
    add("--write-test", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    data, intermediate = Path(arguments.data), None
    tasks = tasks_to_run(arguments.tasks, data)
    session = fine_tuning.session_from(arguments)
    from amos_fairseq.finetuning.glue.benchmark import Glue

    if arguments.intermediate is not None:
        intermediate = Path(arguments.intermediate or arguments.out).resolve()
    settings = {"squad": arguments.squad, "with_paper": arguments.paper, "with_test": arguments.write_test}
    benchmark = Glue(session, data, tasks, intermediate, **settings)
    fine_tuning.run_and_print(arguments.out, benchmark)


def tasks_to_run(names: str, data: Path) -> list[str]:
    """Parse --tasks; ``ALL`` omits, with a line, the tasks that are not in ``data``."""
    tasks = parse_tasks(names)
    missing = [task for task in tasks if not (data / task).is_dir()] if names.strip().lower() == "all" else []
    if not missing or len(missing) == len(tasks):  # without any, the first one is reported as not prepared
        return tasks
    print(f"not in {data}, so not fine-tuned: {', '.join(missing)}", file=sys.stderr)
    return [task for task in tasks if task not in missing]
