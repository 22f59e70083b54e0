"""``amos glue``: fine-tune a checkpoint on the GLUE tasks over several seeds, and print the table of the papers."""

import argparse
import sys
from pathlib import Path
from typing import Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.data.glue_tasks import AVERAGED, DIAGNOSTIC, TASK_FILE, TASKS, parse_tasks
from amos_fairseq.prepare.glue_tables import has_any_file

DESCRIPTION = """\
Fine-tune a checkpoint of this package, of any objective and size, on GLUE: one fairseq-train process per task and seed, one at
a time on each GPU. The command prints and saves medians and standard deviations over the seeds as in AMOS Table 1 (glue.md,
glue.csv and glue.json in OUT). After a stop the same command continues; it does not repeat finished runs.
Official files are converted with the tokenizer of the checkpoint, once; OUT/data keeps the result.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "glue", "fine-tune a checkpoint on GLUE", DESCRIPTION)
    fine_tuning.add_arguments(parser, "GLUE's official files (CoLA/train.tsv, ...), or what amos prepare glue wrote")
    add = parser.add_argument
    text = f"tasks, separated by commas, or ALL that are in --data of {', '.join(AVERAGED)}; WNLI is known too and never part "
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
    is_raw = holds_official_files(data)
    tasks = tasks_to_run(arguments.tasks, data, is_raw)
    import_fairseq(arguments.checkpoint, arguments.subcommand)
    from amos_fairseq.finetuning.glue.benchmark import Glue

    session = fine_tuning.session_from(arguments, Glue.name)

    if is_raw:
        from amos_fairseq.prepare.glue import prepare_glue_inside

        with fine_tuning.preparing(session, Glue.name) as tokenizer:
            wanted = [*tasks, DIAGNOSTIC] if arguments.write_test and has_any_file(data, TASKS[DIAGNOSTIC]) else tasks
            data = prepare_glue_inside(session.out, data, wanted, tokenizer)
    if arguments.intermediate is not None:
        intermediate = Path(arguments.intermediate or arguments.out).resolve()
    settings = {"squad": arguments.squad, "with_paper": arguments.paper, "with_test": arguments.write_test}
    benchmark = Glue(session, data, tasks, intermediate, **settings)
    fine_tuning.run_and_print(arguments.out, benchmark)


def holds_official_files(data: Path) -> bool:
    """Return whether ``data`` is the official download; what ``amos prepare glue`` wrote has a ``task.json`` in each task."""
    if any((data / task / TASK_FILE).exists() for task in TASKS):
        return False
    return any(has_any_file(data, task) for task in TASKS.values())


def tasks_to_run(names: str, data: Path, is_raw: bool) -> list[str]:
    """Parse --tasks; ``ALL`` omits, with a line, the tasks that are not in ``data``."""
    tasks = parse_tasks(names)
    if names.strip().lower() != "all":
        return tasks
    present = [task for task in tasks if (has_any_file(data, TASKS[task]) if is_raw else (data / task).is_dir())]
    missing = [task for task in tasks if task not in present]
    if not missing or not present:  # without any, the first one is reported as not prepared
        return tasks
    print(f"not in {data}, so not fine-tuned: {', '.join(missing)}", file=sys.stderr)
    return present
