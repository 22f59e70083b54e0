"""The table of GLUE: a row for the checkpoint, for other results, and for those of the papers."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from amos_fairseq.downstream.classification.command import HEADINGS
from amos_fairseq.downstream.classification.glue.tasks import AVERAGED, SCORED, TASKS
from amos_fairseq.downstream.results import (
    Spread,
    Summary,
    TaskSummary,
    format_spread,
    paper_results,
    paper_squad_cells,
)
from amos_fairseq.output.tables import MISSING, Table, format_score


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
    row_name: str,
    summaries: Mapping[str, TaskSummary],
    squad: Summary | None,
    with_paper: bool,
    notes: Sequence[str],
    names: Sequence[str] = SCORED,
    others: Sequence[Summary] = (),
) -> Table:
    """Build the table with the checkpoint's row, those of other results and, with ``with_paper``, the papers' rows.

    Args:
        squad: ``squad.json`` for the same checkpoint.
        names: columns, of tasks that have results.
    """
    tasks = [task for task in names if task in summaries or (with_paper and task in AVERAGED)]
    main_scores = {task: summary.best.main_score for task, summary in summaries.items()}
    spreads = {task: summary.scores for task, summary in summaries.items()}
    rows = [results_row(row_name, main_scores, spreads, tasks)]
    for other in others:
        weights = "random weights" if other.from_scratch else f"{other.num_updates:,} updates"
        name = f"{other.folder_name}: {other.setup.get('arch', 'checkpoint')} ({weights})"
        rows.append(results_row(name, other.main_scores, other.spreads, tasks))
    average_name, _ = average(dict.fromkeys(tasks, 0.0))
    columns = ["", *(task_heading(task, main_scores.get(task)) for task in tasks), average_name]

    # Version 2.0 if it was run (AMOS Table 1), otherwise the first version that was.
    squad_spreads = squad.spreads if squad else {}
    squad_task = min(squad_spreads, key=lambda name: "2" not in name, default=None)
    if squad_task or with_paper:
        columns += [f"{squad_task or 'SQuAD2.0'} {score}" for score in ("EM", "F1")]
        rows[0] += [format_spread(squad_spreads.get(squad_task, {}).get(name)) for name in ("em", "f1")]
        rows[1:] = [[*row, MISSING, MISSING] for row in rows[1:]]
    if with_paper:
        rows += [paper_row(paper, tasks) for paper in paper_results()]
    return Table("GLUE dev", columns, rows, notes)


def results_row(
    name: str, main_scores: Mapping[str, str], spreads: Mapping[str, Mapping[str, Spread]], tasks: Sequence[str]
) -> list[str]:
    """Return a row with the columns ``tasks``. Its average is of all that it has, and says so where the columns are others."""
    cells = []
    for task in tasks:
        score = main_scores.get(task)
        of_task = [spreads[task].get(each) for each in (score, f"{score}_mm")] if score else []
        cells.append(" / ".join(format_spread(spread) for spread in of_task if spread) or MISSING)
    medians = {task: spreads[task][score].median for task, score in main_scores.items()}
    label, value = average(medians)
    has_all = medians.keys() & set(AVERAGED) == set(tasks) & set(AVERAGED)
    suffix = "" if has_all or value is None else f" ({label.removeprefix('AVG ')})"
    return [name, *cells, format_score(value) + suffix]


def task_heading(task: str, score: str | None) -> str:
    """Return the task's name, with the score if it is not accuracy."""
    score = score or TASKS[task].main_score
    if task == "MNLI":
        return "MNLI m/mm"
    return task if score == "accuracy" else f"{task} ({HEADINGS[score]})"


def paper_row(paper: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    scores, deviations = paper["scores"], paper.get("deviations", {})
    cells = []
    for task in tasks:
        values, spread = scores.get(task), deviations.get(task)
        if not isinstance(values, list):  # MNLI has two values, for the matched and the mismatched set
            values, spread = [values], [spread]
        pairs = zip(values, spread or [None] * len(values), strict=True)
        cells.append(" / ".join(format_score(*pair) for pair in pairs))
    return [paper["name"], *cells, format_score(paper["average"]), *paper_squad_cells(paper, ("em", "f1"))]
