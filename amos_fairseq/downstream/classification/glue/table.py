"""The table of GLUE: a row for the checkpoint, for other results and for those of the papers; and the table of the differences
between the checkpoint and other results (``--beside``)."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap, mannwhitneyu, rankdata

from amos_fairseq.downstream.classification.benchmark import TextData
from amos_fairseq.downstream.classification.command import HEADINGS
from amos_fairseq.downstream.classification.glue.tasks import AVERAGED, SCORED, TASKS
from amos_fairseq.downstream.results import (
    Spread,
    Summary,
    TaskSummary,
    checked_file,
    format_spread,
    paper_results,
    paper_squad_cells,
    read_summary,
)
from amos_fairseq.errors import UserError
from amos_fairseq.output.tables import MISSING, Table, format_score
from amos_fairseq.text.input_files import TableFile

NUM_RESAMPLES = 4999
NOTES = (
    "difference: of the means over seeds, in points; above 0 the first row of the table is better",
    f"interval and p of the bootstrap: the dev rows are drawn {NUM_RESAMPLES:,} times, the same ones for both (paired); they "
    "say how much depends on the choice of the dev set",
    "p of Mann-Whitney: its U test over the seeds of both; it says how much depends on the seeds of fine-tuning, and cannot "
    "be below 0.1 with three seeds each",
    "both p are two-sided, those of single tasks corrected by Holm for their number (thesis, section 3.4); seeds of "
    "pretraining are in neither",
    "AVG: the mean over the tasks of both that GLUE averages, for each seed; its rows of the dev sets are drawn task by task",
)


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
        name = f"{other.folder_name}: {other.setup.get('arch', 'checkpoint')} ({other.weights})"
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
    """Return a row with the columns ``tasks``. Its average is over the tasks of its own results; their number follows where the
    columns have others."""
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


def task_heading(task: str, score: str | None = None) -> str:
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


def read_glue_summary(out: Path) -> Summary:
    if (summary := read_summary(out / "glue.json", "repeat amos glue", optional=True)) is None:
        raise UserError(f"{out} holds no results of amos glue: give that command's --out as --beside")
    return summary


def predictions_of_seeds(summary: Summary, data: TextData) -> np.ndarray:
    """Return the predictions of each seed for the dev rows of a task, as they are spelled in the files: [seeds, N]. Those of
    other rows are refused."""
    expected, predictions = list(zip(data.ids("valid"), data.spell(data.labels("valid")), strict=True)), []
    for run in summary.shown_runs(data.name):
        of_all_tasks = f"predictions.{data.name}.valid.tsv"
        name = of_all_tasks if of_all_tasks in run.files else "predictions.valid.tsv"
        file = checked_file(summary.file.parent / run.directory, run, name)
        table = TableFile(file, csv_quotes=True)
        if tuple(table.columns) != ("index", "prediction", "label"):
            raise UserError(f"{file} has no predictions of amos glue: give another folder as --beside")
        rows = [row for _, row in table.rows()]
        if [(row["index"], row["label"]) for row in rows] != expected:
            raise UserError(f"{file} has predictions for other dev rows of {data.name}: they cannot be compared")
        predictions.append([row["prediction"] for row in rows])
    return np.array(predictions)


def averages_of_seeds(summary: Summary, tasks: Sequence[str]) -> list[float]:
    """Return the mean score over the tasks for each seed that has them all."""
    by_seed = [{run.seed: run.main for run in summary.shown_runs(task)} for task in tasks]
    seeds = set.intersection(*map(set, by_seed))
    return [statistics.fmean(scores[seed] for scores in by_seed) for seed in sorted(seeds)]


def two_sided_p(drawn: np.ndarray) -> float:
    """Return twice the share of resamples on the smaller side of 0. The data count as one more resample, so that it is never
    0."""
    smaller = min(np.count_nonzero(drawn <= 0), np.count_nonzero(drawn >= 0))
    return min(1.0, 2 * (smaller + 1) / (len(drawn) + 1))


def p_of_seeds(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the p of Mann-Whitney's test; nan with one seed."""
    return float(mannwhitneyu(ours, theirs).pvalue) if min(len(ours), len(theirs)) > 1 else math.nan


def difference_table(ours: Summary, others: Sequence[Summary], prepared: Mapping[str, TextData]) -> Table:
    """Return a table with a row for each task that is also in another output, and for their average."""
    rows = []
    for other in others:
        name, drawn, scores = f"from {other.folder_name}", {}, {}
        for task, data in prepared.items():
            scores_of_task = [[run.main for run in side.shown_runs(task)] for side in (ours, other)]
            if all(scores_of_task):
                predictions = [predictions_of_seeds(side, data) for side in (ours, other)]
                labels = np.array(data.spell(data.labels("valid")))
                drawn[task] = paired_bootstrap(data.main_score, *predictions, labels)
                scores[task] = scores_of_task
        p_bootstrap = holm(list(map(two_sided_p, drawn.values())))
        p_seeds = holm([p_of_seeds(*of_task) for of_task in scores.values()])
        for task, *p_values in zip(drawn, p_bootstrap, p_seeds, strict=True):
            rows.append([f"{task}, {name}", *cells(*scores[task], drawn[task], p_values)])
        averaged = [task for task in drawn if task in AVERAGED]
        if len(averaged) > 1:
            of_average = np.mean([drawn[task] for task in averaged], axis=0)
            means = averages_of_seeds(ours, averaged), averages_of_seeds(other, averaged)
            p_values = two_sided_p(of_average), p_of_seeds(*means)
            rows.append([f"AVG of {len(averaged)}, {name}", *cells(*means, of_average, p_values)])
    columns = ["", "difference", "95% interval", "p, bootstrap", "p, Mann-Whitney"]
    return Table("GLUE dev: differences from the other rows", columns, rows, NOTES)


def cells(ours: Sequence[float], theirs: Sequence[float], drawn: np.ndarray, p_values: Sequence[float]) -> list[str]:
    """Return the cells of a row: the difference of the scores over seeds, the interval of the resamples, and each p."""
    low, high = np.percentile(drawn, [2.5, 97.5])
    spelled = [MISSING if math.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001" for p in p_values]
    return [f"{statistics.fmean(ours) - statistics.fmean(theirs):+.1f}", f"{low:+.1f} to {high:+.1f}", *spelled]


def paired_bootstrap(score: str, ours: np.ndarray, theirs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Resample the rows, the same ones on both sides, and return the differences of the mean scores over seeds, in points:
    [NUM_RESAMPLES]. Predictions are strings [seeds, N], and labels [N]."""
    our_score, their_score = (mean_score(score, predictions, labels) for predictions in (ours, theirs))

    def difference(rows: np.ndarray) -> float:
        rows = rows.astype(np.int64)
        return our_score(rows) - their_score(rows)

    rows, options = (np.arange(len(labels)),), {"vectorized": False, "method": "percentile", "random_state": 1}
    return bootstrap(rows, difference, n_resamples=NUM_RESAMPLES, batch=50, **options).bootstrap_distribution


def mean_score(score: str, predictions: np.ndarray, labels: np.ndarray) -> Callable[[np.ndarray], float]:
    """Return a function of the numbers of rows, which may repeat, to the mean over seeds of their score in percent."""
    if score == "accuracy":
        correct = 100 * (predictions == labels).mean(0)
        return lambda rows: float(correct[rows].mean())
    if score == "micro_f1":  # of lists of labels in JSON
        gold = [set(json.loads(cell)) for cell in labels]
        predicted = [[set(json.loads(cell)) for cell in row] for row in predictions]
        right = np.array([[len(one & other) for one, other in zip(row, gold, strict=True)] for row in predicted])
        either = np.array([[len(one) + len(other) for one, other in zip(row, gold, strict=True)] for row in predicted])
        return lambda rows: 200 * float((right[:, rows].sum(1) / np.maximum(1, either[:, rows].sum(1))).mean())
    if score == "matthews":  # of two classes: the correlation of 0 and 1
        positive = max(labels.tolist())
        predictions, labels = predictions == positive, labels == positive
    predictions, labels = predictions.astype(np.float64), labels.astype(np.float64)

    def mean_correlation(rows: np.ndarray) -> float:
        predicted, gold = predictions[:, rows], labels[rows]
        if score == "spearman":
            predicted, gold = rankdata(predicted, axis=1), rankdata(gold)
        predicted, gold = predicted - predicted.mean(1, keepdims=True), gold - gold.mean()
        # 0 if one side is constant, and then the correlation is, too.
        scale = np.sqrt((predicted**2).sum(1) * (gold**2).sum())
        return 100 * float(np.divide(predicted @ gold, scale, out=np.zeros(len(predicted)), where=scale > 0).mean())

    return mean_correlation


def holm(p_values: Sequence[float]) -> np.ndarray:
    """Return p values corrected by Holm (1979): the k-th smallest of m times m - k + 1, not below those before it, at most 1.
    Those that are nan stay so and do not count."""
    corrected = np.array(p_values, dtype=np.float64)
    smallest_first = np.argsort(corrected)[: np.count_nonzero(~np.isnan(corrected))]  # nan comes last
    scaled = corrected[smallest_first] * np.arange(len(smallest_first), 0, -1)
    corrected[smallest_first] = np.minimum(1, np.maximum.accumulate(scaled))
    return corrected
