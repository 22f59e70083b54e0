"""``amos glue``: fine-tune a checkpoint on the GLUE tasks over several seeds, and print the table of the papers."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amos_fairseq.cli import fine_tuning
from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.downstream.classification.glue.tasks import (
    AVERAGED,
    DIAGNOSTIC,
    TASK_FILE,
    TASKS,
    has_any_file,
    parse_tasks,
)
from amos_fairseq.errors import UserError

if TYPE_CHECKING:
    from amos_fairseq.downstream.multi_task.teachers import Teachers
    from amos_fairseq.downstream.session import Session

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
    text = "train on N rows of a task, chosen at random, if it has more (default: all)"
    add("--max-rows", type=int, metavar="N", help=text)
    text = "outputs of this command whose results become rows of the table; glue_differences.md tests the differences"
    add("--beside", metavar="OUT", nargs="+", type=Path, default=[], help=text)
    text = "YAML of your own tasks, run beside GLUE's: NAME: {train: FILE, dev: FILE, text: [COLUMN], label: COLUMN, ...}, the "
    text += "options of amos classify"
    add("--own-tasks", metavar="FILE", type=Path, help=text)
    add("--multi-task", action="store_true", help="train one model for all tasks, with a head for each")
    text = (
        "also train on the predictions of other models: OUT of this command with --write-train, or a folder of TASK.tsv"
    )
    add("--teachers", metavar="DIR", type=Path, help=text)
    text = "learn from the mean of the teachers of all seeds (default: each seed from the teacher of the same seed)"
    add("--ensemble", action="store_true", help=text)
    text = "weight of the labels beside the teachers' predictions: a number from 0 to 1, or annealed, from 0 to 1 over the "
    text += "updates (default: annealed)"
    add("--gold-weight", metavar="W", help=text)
    text = "write each run's predictions of the rows that it was trained on, for --teachers"
    add("--write-train", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    data = Path(arguments.data)
    is_raw = holds_official_files(data)
    tasks = tasks_to_run(arguments.tasks, data, is_raw)
    if arguments.max_rows is not None and arguments.max_rows < 1:
        raise UserError(f"--max-rows {arguments.max_rows} must be at least 1")
    for name in ("ensemble", "gold_weight"):
        if getattr(arguments, name) and arguments.teachers is None:
            raise UserError(f"--{name.replace('_', '-')} has no effect without --teachers: leave it out")
    import_fairseq(arguments.checkpoint, arguments.subcommand)
    from amos_fairseq.downstream.classification.glue.benchmark import Glue, GlueOptions
    from amos_fairseq.downstream.multi_task.command import MultiTaskGlue

    session = fine_tuning.session_from(arguments, Glue.name)
    own = prepare_own_tasks(session, arguments.own_tasks) if arguments.own_tasks else {}
    if is_raw:
        from amos_fairseq.downstream.classification.glue.prepare import prepare_glue_inside

        with fine_tuning.preparing(session, Glue.name) as tokenizer:
            wanted = [*tasks, DIAGNOSTIC] if arguments.write_test and has_any_file(data, TASKS[DIAGNOSTIC]) else tasks
            data = prepare_glue_inside(session.out, data, wanted, tokenizer)
    options = GlueOptions(
        own=own,
        max_rows=arguments.max_rows,
        teachers=teachers_from(arguments),
        with_train=arguments.write_train,
        beside=arguments.beside,
        intermediate=None
        if arguments.intermediate is None
        else Path(arguments.intermediate or arguments.out).resolve(),
        squad=arguments.squad,
        with_paper=arguments.paper,
        with_test=arguments.write_test,
    )
    benchmark = (MultiTaskGlue if arguments.multi_task else Glue)(session, data, tasks, options)
    fine_tuning.run_and_print(arguments.out, benchmark)


def teachers_from(arguments: argparse.Namespace) -> "Teachers | None":
    """Return the teachers that the arguments describe; raise :class:`UserError` if they cannot be used."""
    if arguments.teachers is None:
        return None
    from amos_fairseq.downstream.classification.task import ANNEALED, gold_weight_of
    from amos_fairseq.downstream.multi_task.teachers import Teachers

    weight = ANNEALED if arguments.gold_weight in (None, ANNEALED) else str(gold_weight_of(arguments.gold_weight))
    return Teachers(arguments.teachers, weight, arguments.ensemble)


def prepare_own_tasks(session: "Session", file: Path) -> dict[str, Path]:
    """Convert the tables of the user's own tasks; return their directories by name.

    Raises:
        UserError: the file or a table cannot be used.
    """
    from amos_fairseq.downstream.classification.prepare import prepare_inside, read_own_tasks

    sources = read_own_tasks(file)
    with fine_tuning.preparing(session, "glue") as tokenizer:
        return {name: prepare_inside(session.out, source, tokenizer, name) for name, source in sources.items()}


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
