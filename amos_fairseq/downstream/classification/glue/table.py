"""The table of GLUE: a row for the checkpoint, for other results, and for those of the papers."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from amos_fairseq.downstream.classification.command import HEADINGS
from amos_fairseq.downstream.classification.glue.beside import GlueResults
from amos_fairseq.downstream.classification.glue.tasks import AVERAGED, SCORED, TASKS
from amos_fairseq.downstream.results import Summary, TaskSummary, format_spread, paper_results, paper_squad_cells
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
    others: Sequence[GlueResults] = (),
) -> Table:
    """Build the table with the checkpoint's row, those of other results and, with ``with_paper``, the papers' rows.

    Args:
        squad: ``squad.json`` for the same checkpoint.
        names: columns, of tasks that have results.
    """
    tasks = [task for task in names if task in summaries or (with_paper and task in AVERAGED)]
    average_name, value = average({task: summary.main.median for task, summary in summaries.items()})
    average_cell = format_score(value)
    if with_paper and average_name != "AVG":  # the column is the papers' average of all eight tasks
        average_cell = f"{average_cell} ({average_name.removeprefix('AVG ')})"
        average_name = "AVG"
    rows = [[row_name, *(task_cell(summaries.get(task)) for task in tasks), average_cell]]
    columns = ["", *(task_heading(task, summaries.get(task)) for task in tasks), average_name]
    rows += [other_row(other, tasks, average_name) for other in others]

    # Version 2.0 if it was run (AMOS Table 1), otherwise the first version that was.
    spreads = squad.spreads if squad else {}
    squad_task = min(spreads, key=lambda name: "2" not in name, default=None)
    if squad_task or with_paper:
        columns += [f"{squad_task or 'SQuAD2.0'} {score}" for score in ("EM", "F1")]
        rows[0] += [format_spread(spreads.get(squad_task, {}).get(name)) for name in ("em", "f1")]
        rows[1:] = [[*row, MISSING, MISSING] for row in rows[1:]]
    if with_paper:
        rows += [paper_row(paper, tasks) for paper in paper_results()]
    return Table("GLUE dev", columns, rows, notes)


def other_row(other: GlueResults, tasks: Sequence[str], average_name: str) -> list[str]:
    """Return the row of other results; their average names its tasks where those are others."""
    summary, cells = other.summary, []
    for task in tasks:
        main = summary.main_scores.get(task)
        spreads = [summary.spreads[task].get(name) for name in (main, f"{main}_mm")] if main else []
        cells.append(" / ".join(format_spread(spread) for spread in spreads if spread) or MISSING)
    medians = {task: summary.spreads[task][main].median for task, main in summary.main_scores.items()}
    name, value = average(medians)
    own_tasks = set(AVERAGED) & set(medians) == set(AVERAGED) & set(tasks)
    suffix = "" if name == average_name and own_tasks else f" ({name.removeprefix('AVG ')})"
    return [other.row_name, *cells, format_score(value) + suffix]


def task_heading(task: str, summary: TaskSummary | None = None) -> str:
    """Return the task's name, with the score if it is not accuracy."""
    if task == "MNLI":
        return "MNLI m/mm"
    score = TASKS[task].main_score if summary is None else summary.best.main_score
    return task if score == "accuracy" else f"{task} ({HEADINGS[score]})"


def task_cell(summary: TaskSummary | None) -> str:
    if summary is None:
        return MISSING
    mismatched = summary.scores.get(f"{summary.best.main_score}_mm")
    return " / ".join(format_spread(found) for found in (summary.main, mismatched) if found)


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
