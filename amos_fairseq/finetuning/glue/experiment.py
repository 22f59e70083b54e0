"""``amos glue`` from the first run to the table of AMOS: eight tasks, their average, and SQuAD next to them."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.data.glue_tasks import AVERAGED, INTERMEDIATE_FOR, INTERMEDIATE_TASK, SCORED
from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.glue.benchmark import Glue
from amos_fairseq.finetuning.glue.leaderboard import check_test_files, write_submission
from amos_fairseq.finetuning.report import (
    MISSING,
    Table,
    TaskSummary,
    best_checkpoint,
    format_score,
    paper_results,
    paper_squad_cells,
    read_summary,
    summarize,
)
from amos_fairseq.finetuning.runner import Failure, Runner
from amos_fairseq.finetuning.runs import IDENTITY_FILE, Result, Run, claim_output_directory, read_json, read_results
from amos_fairseq.finetuning.session import Outcome, Session, save_results, session_notes


def run_glue(
    session: Session, data: Path, tasks: list[str], intermediate: Path | None, squad: Path | None, with_paper: bool,
    with_test: bool,
) -> Outcome:  # fmt: skip
    """Execute the runs, then write the table, then the leaderboard's archive.

    Args:
        intermediate: OUT of the MNLI runs that RTE, STS-B and MRPC start from; it may be the session's own.
        squad: directory that may hold ``squad.json``; None for OUT itself.

    Raises:
        UserError: an argument cannot be used; raised before anything is started.
        Stopped: SIGINT or SIGTERM arrived.
    """
    squad_summary = read_summary(squad or session.out, "squad", session.setup)
    if squad is not None and squad_summary is None:
        raise UserError(f"{squad} holds no results of amos squad: give that command's --out as --squad")
    benchmark = Glue(data, tasks, session.checkpoint, session.recipe)
    if intermediate is not None:
        check_intermediate(session, intermediate, tasks)
    if with_test:
        check_test_files(data, tasks)
    claim_output_directory(session.out, Glue.name, session.setup)

    runner = session.runner(benchmark)
    failures = execute_runs(session, runner, benchmark, intermediate)
    results = glue_results(session.out)
    if not results:
        return Outcome(None, failures, [])

    summaries = summarize(results)
    notes = [*session_notes(session, results, summaries), *intermediate_notes(results)]
    notes += [f"SQuAD: {note}" for note in squad_summary["notes"]] if squad_summary else []
    table = glue_table(session.row_name, summaries, squad_summary, with_paper, notes)
    name, value = average({task: summary.main.median for task, summary in summaries.items()})
    mean = {"name": name, "value": value}
    files = save_results(session, Glue.name, session.setup, table, results, summaries, average=mean)
    notices: list[str] = []
    if with_test:
        archive, notices = write_submission(
            session.out, data, summaries, session.checkpoint.max_positions, session.devices[0], runner.stop
        )
        files.append(archive)
    return Outcome(table, failures, files, notices)


def glue_results(out: Path) -> list[Result]:
    """Return the results of GLUE tasks; OUT may hold results of another benchmark too."""
    return [result for result in read_results(out) if result.task in SCORED]


def check_intermediate(session: Session, intermediate: Path, tasks: Sequence[str]) -> None:
    """Raise :class:`UserError` unless an MNLI run of this checkpoint exists, or will exist, to start from."""
    if not any(task in INTERMEDIATE_FOR for task in tasks):
        raise UserError(f"--intermediate has no effect: none of {', '.join(INTERMEDIATE_FOR)} is among --tasks")
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
                f"{intermediate} holds {INTERMEDIATE_TASK} runs of another checkpoint: give those of this checkpoint"
            )


def execute_runs(session: Session, runner: Runner, benchmark: Glue, intermediate: Path | None) -> list[Failure]:
    """Execute all runs; with ``intermediate``, runs that start from MNLI's best run on dev come last.

    AMOS Appendix E and thesis 5.2.4 describe one checkpoint fine-tuned on MNLI, not one per seed: every seed of a
    dependent task starts from the same checkpoint, so that its deviation is that of the task. The output layer is newly
    initialized if the number of classes differs; the head's dense layer is kept, like the pooler of a BERT.
    """
    tasks = benchmark.tasks
    if intermediate is None:
        return runner.execute(session.plan(list(tasks.values())))
    independent = session.plan([task for name, task in tasks.items() if name not in INTERMEDIATE_FOR])
    independent.sort(key=lambda run: run.task.name != INTERMEDIATE_TASK)  # MNLI first: other tasks wait for it
    dependent = [task for name, task in tasks.items() if name in INTERMEDIATE_FOR]
    check_not_started_without_intermediate(session.plan(dependent))
    failures = runner.execute(independent) if independent else []
    summary = summarize(glue_results(intermediate)).get(INTERMEDIATE_TASK)
    if summary is None:
        reason = f"it needs a finished run of {INTERMEDIATE_TASK} to start from, and there is none"
        return failures + [Failure(run, reason) for run in session.plan(dependent)]
    start = best_checkpoint(intermediate, summary)
    return failures + runner.execute(session.plan(dependent, intermediate=start))


def check_not_started_without_intermediate(runs: Sequence[Run]) -> None:
    """Raise :class:`UserError` if a dependent run was started without the intermediate task. The identity check of the
    runner would detect it only after MNLI's hours of training."""
    for run in runs:
        found = read_json(run.directory / IDENTITY_FILE)
        if found is not None and "intermediate_sha256" not in found:
            raise UserError(
                f"{run.directory} was started without --intermediate: give another --out, or delete that directory"
            )


def intermediate_notes(results: Sequence[Result]) -> Iterator[str]:
    tasks = dict.fromkeys(result.task for result in results if "intermediate_sha256" in result.identity)
    if tasks:
        yield f"{', '.join(tasks)}: started from the best dev run of {INTERMEDIATE_TASK} (intermediate-task training)"


def average(medians: Mapping[str, float]) -> tuple[str, float | None]:
    """Return name and value of the mean of the tasks' medians, with MNLI's matched set as in AMOS Table 1.

    If some of the eight tasks are missing, the name states the number of tasks. WNLI never counts.
    """
    counted = [medians[task] for task in AVERAGED if task in medians]
    if not counted:
        return "AVG", None
    name = "AVG" if len(counted) == len(AVERAGED) else f"AVG of {len(counted)}"
    return name, statistics.fmean(counted)


def glue_table(
    row_name: str, summaries: Mapping[str, TaskSummary], squad: dict[str, Any] | None, with_paper: bool, notes: Sequence[str]
) -> Table:  # fmt: skip
    """Build the table with the checkpoint's row and, with ``with_paper``, the papers' rows.

    Args:
        squad: content of ``squad.json`` for the same checkpoint.
    """
    tasks = [task for task in SCORED if task in summaries or (with_paper and task in AVERAGED)]
    average_name, value = average({task: summary.main.median for task, summary in summaries.items()})
    average_cell = format_score(value)
    if with_paper and average_name != "AVG":  # the column is the papers' average of all eight tasks
        average_cell = f"{average_cell} ({average_name.removeprefix('AVG ')})"
        average_name = "AVG"
    row = [row_name, *(task_cell(summaries.get(task)) for task in tasks), average_cell]
    columns = ["", *(column_name(task) for task in tasks), average_name]

    # Version 2.0 if it was run (AMOS Table 1), otherwise the first version that was.
    squad_task = min(squad["tasks"], key=lambda name: "2" not in name, default=None) if squad else None
    spreads = squad["tasks"][squad_task]["scores"] if squad and squad_task else {}
    if spreads or with_paper:
        columns += [f"{squad_task or 'SQuAD2.0'} {score}" for score in ("EM", "F1")]
        none = {"median": None, "deviation": None}
        found = [spreads.get(name, none) for name in ("em", "f1")]
        row += [format_score(spread["median"], spread["deviation"]) for spread in found]
    rows = [row, *(paper_row(paper, tasks) for paper in paper_results())] if with_paper else [row]
    return Table("GLUE dev: median ± standard deviation over seeds", columns, rows, notes)


def column_name(task: str) -> str:
    """Return the task's name, with the score if it is not accuracy."""
    names = {"MNLI": "MNLI m/mm", "CoLA": "CoLA (Matthews)", "STS-B": "STS-B (Spearman)"}
    return names.get(task, task)


def task_cell(summary: TaskSummary | None) -> str:
    if summary is None:
        return MISSING
    scores = [summary.main]
    mismatched = f"{summary.best.main_score}_mm"
    if mismatched in summary.scores:
        scores.append(summary.scores[mismatched])
    return " / ".join(format_score(score.median, score.deviation) for score in scores)


def paper_row(paper: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    scores, deviations = paper["scores"], paper.get("deviations", {})
    cells = []
    for task in tasks:
        values, own = scores.get(task), deviations.get(task)
        if not isinstance(values, list):  # MNLI has two values, for the matched and the mismatched set
            values, own = [values], [own]
        pairs = zip(values, own or [None] * len(values), strict=True)
        cells.append(" / ".join(format_score(*pair) for pair in pairs))
    return [paper["name"], *cells, format_score(paper["average"]), *paper_squad_cells(paper, ("em", "f1"))]
