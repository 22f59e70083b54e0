"""``amos glue`` from the first run to the table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.glue_benchmark import Glue
from amos_fairseq.finetuning.glue_table import average, glue_table
from amos_fairseq.finetuning.glue_tasks import INTERMEDIATE_FOR, INTERMEDIATE_TASK, TASKS
from amos_fairseq.finetuning.leaderboard import best_checkpoint, check_test_files, write_submission
from amos_fairseq.finetuning.plan import IDENTITY_FILE, read_json
from amos_fairseq.finetuning.results import Result, read_results
from amos_fairseq.finetuning.runner import Failure, Runner
from amos_fairseq.finetuning.session import Session, session_notes
from amos_fairseq.finetuning.statistics import TaskSummary, summarize
from amos_fairseq.finetuning.summary import read_summary, write_summary
from amos_fairseq.finetuning.tables import Table


@dataclass(frozen=True)
class GlueOutcome:
    """What a call has led to.

    Attributes:
        table: None where no run has a result.
        failures: runs that failed.
        files: what was written.
        notices: what the user must know of these files.
    """

    table: Table | None
    failures: list[Failure]
    files: list[Path]
    notices: list[str]


def run_glue(
    session: Session, data: Path, tasks: list[str], intermediate: Path | None, squad: Path | None, with_paper: bool,
    with_test: bool,
) -> GlueOutcome:  # fmt: skip
    """Make the runs, then the table, then the leaderboard's archive.

    Args:
        intermediate: OUT of the MNLI runs that RTE, STS-B and MRPC start from; it may be the session's own.
        squad: where ``squad.json`` may lie; None for OUT itself.
        with_test: write the archive.

    Raises:
        UserError: a mistake of the user, before anything is started.
        Stopped: SIGINT or SIGTERM came.
    """
    beside = read_summary(squad or session.out, "squad", session.setup)
    if squad is not None and beside is None:
        raise UserError(f"{squad} holds no results of amos squad: give its --out with --squad")
    benchmark = Glue(data, tasks, session.start)
    for task in tasks:
        session.recipe.of(task)
    if intermediate is not None:
        check_intermediate(session, intermediate, tasks)
    if with_test:
        check_test_files(data, tasks)
    session.claim(benchmark)
    runner = session.runner(benchmark)
    failures = execute(session, runner, benchmark, intermediate)
    results = glue_results(session.out)
    if not results:
        return GlueOutcome(None, failures, [], [])
    summaries = summarize(results)
    notes = [*session_notes(session, results, summaries), *intermediate_notes(results)]
    notes += [f"SQuAD: {note}" for note in beside["notes"]] if beside else []
    table = glue_table(session.row_name, summaries, beside, with_paper, notes)
    files = save(session, table, results, summaries)
    notices: list[str] = []
    if with_test:
        archive, notices = write_submission(
            session.out, data, summaries, session.start.max_positions, session.devices[0], runner.stop
        )
        files.append(archive)
    return GlueOutcome(table, failures, files, notices)


def glue_results(out: Path) -> list[Result]:
    """OUT may hold results of another benchmark too."""
    return [result for result in read_results(out) if result.task in TASKS]


def check_intermediate(session: Session, intermediate: Path, tasks: Sequence[str]) -> None:
    """Raise :class:`UserError` unless there is, or will be, an MNLI run of this checkpoint to start from."""
    dependent = [task for task in tasks if task in INTERMEDIATE_FOR]
    if not dependent:
        raise UserError(f"--intermediate changes nothing: none of {', '.join(INTERMEDIATE_FOR)} is among --tasks")
    if intermediate == session.out and INTERMEDIATE_TASK in tasks:
        return
    if not any(result.task == INTERMEDIATE_TASK for result in glue_results(intermediate)):
        raise UserError(
            f"{intermediate} holds no finished run of {INTERMEDIATE_TASK}: add it to --tasks, or give the --out of one "
            "as --intermediate OUT"
        )
    setup = read_json(intermediate / f"{Glue.name}.setup.json") or {}
    for name in ("checkpoint_sha256", "from_scratch"):
        if setup.get(name) != session.setup[name]:
            raise UserError(
                f"{intermediate} holds {INTERMEDIATE_TASK} runs of another checkpoint: give those of this one"
            )


def check_not_started_otherwise(session: Session, benchmark: Glue) -> None:
    """Raise :class:`UserError` where a dependent task was run without the intermediate one: it would be found out only
    after MNLI's hours."""
    for run in session.plan([benchmark.tasks[task] for task in INTERMEDIATE_FOR if task in benchmark.tasks]):
        found = read_json(run.directory / IDENTITY_FILE)
        if found is not None and "intermediate_sha256" not in found:
            raise UserError(
                f"{run.directory} started without --intermediate: give another --out, or delete that directory"
            )


def execute(session: Session, runner: Runner, benchmark: Glue, intermediate: Path | None) -> list[Failure]:
    """All runs; those that start from MNLI's best run on dev after all others.

    AMOS Appendix E and thesis 5.2.4 speak of a checkpoint fine-tuned on MNLI, not of one per seed: every seed of a
    dependent task starts from the same one, so that its deviation is that of the task. The output layer is new where the
    number of classes differs; the head's dense layer goes on, as a pooler of BERT's would.
    """
    dependent = INTERMEDIATE_FOR if intermediate is not None else ()
    first = session.plan([task for name, task in benchmark.tasks.items() if name not in dependent])
    # MNLI first: others wait for it.
    first.sort(key=lambda run: bool(dependent) and run.task.name != INTERMEDIATE_TASK)
    if intermediate is not None:
        check_not_started_otherwise(session, benchmark)
    failures = runner.execute(first) if first else []
    waiting = [task for name, task in benchmark.tasks.items() if name in dependent]
    if intermediate is None or not waiting:
        return failures
    summary = summarize(glue_results(intermediate)).get(INTERMEDIATE_TASK)
    if summary is None:
        reason = f"no run of {INTERMEDIATE_TASK} has finished, from which it would start"
        return failures + [Failure(run, reason) for run in session.plan(waiting)]
    start = best_checkpoint(intermediate, summary)
    return failures + runner.execute(session.plan(waiting, intermediate=start))


def intermediate_notes(results: Sequence[Result]) -> Iterator[str]:
    tasks = dict.fromkeys(result.task for result in results if "intermediate_sha256" in result.identity)
    if tasks:
        yield f"{', '.join(tasks)}: started from the best dev run of {INTERMEDIATE_TASK} (intermediate-task training)"


def save(
    session: Session, table: Table, results: Sequence[Result], summaries: dict[str, TaskSummary]
) -> list[Path]:  # fmt: skip
    """``glue.md``, ``glue.csv``, ``glue.json`` in OUT."""
    name, value = average({task: summary.main.median for task, summary in summaries.items()})
    checkpoint = {"file": str(session.start.file), "num_updates": session.start.num_updates}
    summary = write_summary(
        session.out, Glue.name, session.setup, results, summaries, table.notes, checkpoint=checkpoint,
        average={"name": name, "value": value},
    )  # fmt: skip
    return [*table.save(session.out / Glue.name), summary]
