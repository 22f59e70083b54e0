"""The table of AMOS: eight tasks, their average, SQuAD beside them."""

import statistics as python_statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from amos_fairseq.finetuning.glue_tasks import AVERAGED, TASKS
from amos_fairseq.finetuning.statistics import TaskSummary
from amos_fairseq.finetuning.tables import MISSING, Table, number

PAPER_RESULTS = Path(__file__).with_name("paper_results.yaml")


def average(medians: Mapping[str, float]) -> tuple[str, float | None]:
    """Name and value: the mean of the tasks' medians, MNLI's matched set as in AMOS Table 1.

    Where some of the eight are missing the name says of how many it is the mean; WNLI never counts.
    """
    counted = [medians[task] for task in AVERAGED if task in medians]
    if not counted:
        return "AVG", None
    name = "AVG" if len(counted) == len(AVERAGED) else f"AVG of {len(counted)}"
    return name, python_statistics.fmean(counted)


def glue_table(
    row_name: str, summaries: Mapping[str, TaskSummary], squad: dict[str, Any] | None, with_paper: bool, notes: Sequence[str]
) -> Table:  # fmt: skip
    """Our row, and with ``with_paper`` the paper's in rows of their own.

    Args:
        squad: content of ``squad.json`` for the same checkpoint.
    """
    tasks = [task for task in TASKS if task in summaries or (with_paper and task in AVERAGED)]
    average_name, average_value = average({task: summary.main.median for task, summary in summaries.items()})
    spans = squad_spans(squad)
    rows = [
        [row_name, *(task_cell(summaries.get(task)) for task in tasks), number(average_value)]
        + [number(spans[score]["median"], spans[score]["deviation"]) for score in ("em", "f1") if spans]
    ]
    with_squad = bool(spans) or with_paper
    if with_squad and not spans:
        rows[0] += [MISSING, MISSING]
    if with_paper:
        rows += [paper_row(paper, tasks) for paper in paper_results()]
    columns = ["", *(column_name(task) for task in tasks), average_name if not with_paper else "AVG"]
    if with_paper and average_name != "AVG":
        rows[0][len(tasks) + 1] = f"{number(average_value)} ({average_name.removeprefix('AVG ')})"
    squad_name = squad_task(squad) or "SQuAD2.0"
    columns += [f"{squad_name} EM", f"{squad_name} F1"] if with_squad else []
    return Table("GLUE dev: median ± standard deviation over seeds", columns, rows, notes)


def column_name(task: str) -> str:
    """With the score where it is not accuracy."""
    names = {"MNLI": "MNLI m/mm", "CoLA": "CoLA (Matthews)", "STS-B": "STS-B (Spearman)"}
    return names.get(task, task)


def task_cell(summary: TaskSummary | None) -> str:
    if summary is None:
        return MISSING
    scores = [summary.main]
    mismatched = f"{summary.best.main_score}_mm"
    if mismatched in summary.scores:
        scores.append(summary.scores[mismatched])
    return " / ".join(number(score.median, score.deviation) for score in scores)


def squad_task(squad: dict[str, Any] | None) -> str | None:
    """Version 2.0 where it was run (AMOS Table 1), else the first that was."""
    names = sorted(squad["tasks"], key=lambda name: "2" not in name) if squad else []
    return names[0] if names else None


def squad_spans(squad: dict[str, Any] | None) -> dict[str, Any]:
    """The spreads of ``em`` and ``f1``; empty without results."""
    task = squad_task(squad)
    return squad["tasks"][task]["scores"] if squad and task else {}


def paper_results() -> list[dict[str, Any]]:
    return yaml.safe_load(PAPER_RESULTS.read_text(encoding="utf-8"))


def paper_row(paper: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    scores, deviations = paper["scores"], paper.get("deviations", {})
    cells = [_paper_cell(scores.get(task), deviations.get(task)) for task in tasks]
    return [paper["name"], *cells, number(paper["average"]), *paper_squad_cells(paper, ("em", "f1"))]


def paper_squad_cells(paper: dict[str, Any], scores: Sequence[str]) -> list[str]:
    """Of SQuAD 2.0; a dash for a score that the paper does not give."""
    squad, deviations = paper["squad"], paper.get("deviations", {})
    return [number(squad.get(name), deviations.get(name)) for name in scores]


def _paper_cell(value: Any, deviation: Any) -> str:
    if isinstance(value, list):
        deviation = deviation or [None] * len(value)
        return " / ".join(number(*pair) for pair in zip(value, deviation, strict=True))
    return number(value, deviation)
