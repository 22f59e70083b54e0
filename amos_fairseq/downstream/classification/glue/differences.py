"""Other results of ``amos glue`` beside a table, and tests of the differences from them."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import bootstrap, mannwhitneyu, rankdata

from amos_fairseq.downstream.classification.glue.data import GlueData
from amos_fairseq.downstream.classification.glue.predictions import spell
from amos_fairseq.downstream.classification.glue.tasks import AVERAGED
from amos_fairseq.downstream.results import RunResult, Summary, parse_result, parse_summary, read_optional_json
from amos_fairseq.errors import UserError
from amos_fairseq.output.tables import MISSING, Table
from amos_fairseq.text.table_files import TableFile

NUM_RESAMPLES = 4999
RESAMPLES_AT_ONCE = 50  # in memory
CONFIDENCE = 0.95
TITLE = "GLUE dev: differences from the other rows"
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


@dataclass(frozen=True)
class GlueResults:
    """The results in an output of ``amos glue``.

    Attributes:
        runs: those that the table shows, by task.
    """

    out: Path
    summary: Summary
    runs: dict[str, list[RunResult]]

    @property
    def row_name(self) -> str:
        weights = "random weights" if self.summary.from_scratch else f"{self.summary.num_updates:,} updates"
        return f"{self.summary.folder_name}: {self.summary.setup.get('arch', 'checkpoint')} ({weights})"

    def predictions(self, data: GlueData) -> np.ndarray:
        """Return the predictions of each seed for the dev rows of a task, as they are spelled in the files: [seeds, N].

        Raises:
            UserError: a file is missing or damaged, or its rows are not those of ``data``.
        """
        expected, predictions = list(zip(data.ids("valid"), spell(data, data.labels("valid")), strict=True)), []
        for run in self.runs[data.name]:
            of_all_tasks = self.out / run.directory / f"predictions.{data.name}.valid.tsv"
            file = of_all_tasks if of_all_tasks.is_file() else self.out / run.directory / "predictions.valid.tsv"
            table = TableFile(file)
            if table.columns != ("index", "prediction", "label"):
                raise UserError(f"{file} has no predictions of amos glue: give another folder as --beside")
            rows = [row for _, row in table.rows()]
            if [(row["index"], row["label"]) for row in rows] != expected:
                raise UserError(f"{file} has predictions for other dev rows of {data.name}: they cannot be compared")
            predictions.append([row["prediction"] for row in rows])
        return np.array(predictions)

    def averages(self, tasks: Sequence[str]) -> list[float]:
        """Return the mean score over the tasks for each seed that has them all."""
        by_seed = [{run.seed: run.main for run in self.runs[task]} for task in tasks]
        seeds = set.intersection(*map(set, by_seed))
        return [statistics.fmean(own[seed] for own in by_seed) for seed in sorted(seeds)]


def read_results_of_glue(out: Path) -> GlueResults:
    """Read ``OUT/glue.json``; raise :class:`UserError` if it is missing, or no such file."""
    file = out / "glue.json"
    content, complaint = read_optional_json(file), "is not a summary of amos glue: repeat that command"
    if content is None:
        raise UserError(f"{out} holds no results of amos glue: give that command's --out as --beside")
    summary = parse_summary(file, content, complaint)
    try:
        shown = {task: values["settings"] for task, values in content["tasks"].items()}
        runs: dict[str, list[RunResult]] = {task: [] for task in shown}
        for run in map(parse_result, content["runs"]):
            if run.trial == shown[run.task]:
                runs[run.task].append(run)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{file} {complaint}") from error
    return GlueResults(out, summary, runs)


class Difference(NamedTuple):
    """How much better one side is, in points.

    Attributes:
        seeds: p of Mann-Whitney; None with one seed.
        drawn: the difference of each resample of the dev rows, [NUM_RESAMPLES].
    """

    value: float
    seeds: float | None
    drawn: np.ndarray

    @property
    def bootstrap(self) -> float:
        """The two-sided p: twice the share of resamples on the smaller side of 0. The data count as one more resample, so that
        it is never 0."""
        smaller = min(np.count_nonzero(self.drawn <= 0), np.count_nonzero(self.drawn >= 0))
        return min(1.0, 2 * (smaller + 1) / (len(self.drawn) + 1))

    def cells(self, p_bootstrap: float, p_seeds: float | None) -> list[str]:
        """Return the cells of a row, with these p values."""
        tail = 100 * (1 - CONFIDENCE) / 2
        low, high = np.percentile(self.drawn, [tail, 100 - tail])
        return [f"{self.value:+.1f}", f"{low:+.1f} to {high:+.1f}", _spell_p(p_bootstrap), _spell_p(p_seeds)]


def difference_table(own: GlueResults, others: Sequence[GlueResults], prepared: Mapping[str, GlueData]) -> Table:
    """Return a table with a row for each task that is also in another output, and for their average.

    Raises:
        UserError: predictions are missing, or they are of other dev rows.
    """
    rows = []
    for other in others:
        tasks = [task for task in prepared if own.runs.get(task) and other.runs.get(task)]
        if not tasks:
            continue
        found = {task: _compare(own, other, prepared[task]) for task in tasks}
        p_bootstrap = holm([one.bootstrap for one in found.values()])
        p_seeds = holm([one.seeds for one in found.values()])
        name = other.summary.folder_name
        for (task, one), *p_values in zip(found.items(), p_bootstrap, p_seeds, strict=True):
            rows.append([f"{task}, from {name}", *one.cells(*p_values)])
        if averaged := [task for task in tasks if task in AVERAGED]:
            drawn = np.mean([found[task].drawn for task in averaged], axis=0)
            average = _difference(own.averages(averaged), other.averages(averaged), drawn)
            rows.append([f"AVG of {len(averaged)}, from {name}", *average.cells(average.bootstrap, average.seeds)])
    columns = ["", "difference", f"{CONFIDENCE:.0%} interval", "p, bootstrap", "p, Mann-Whitney"]
    return Table(TITLE, columns, rows, NOTES)


def _spell_p(p_value: float | None) -> str:
    if p_value is None:
        return MISSING
    return f"{p_value:.3f}" if p_value >= 0.001 else "< 0.001"


def _difference(own: Sequence[float], other: Sequence[float], drawn: np.ndarray) -> Difference:
    several = min(len(own), len(other)) > 1
    p_seeds = float(mannwhitneyu(own, other, alternative="two-sided").pvalue) if several else None
    return Difference(statistics.fmean(own) - statistics.fmean(other), p_seeds, drawn)


def _compare(own: GlueResults, other: GlueResults, data: GlueData) -> Difference:
    drawn = paired_bootstrap(
        data.main_score, own.predictions(data), other.predictions(data), np.array(spell(data, data.labels("valid")))
    )
    scores = [[run.main for run in side.runs[data.name]] for side in (own, other)]
    return _difference(*scores, drawn)


def paired_bootstrap(score: str, ours: np.ndarray, theirs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Resample the rows, the same ones on both sides, and take the differences of the mean scores over seeds.

    Args:
        score: the main score of the task.
        ours, theirs: predictions of each seed, strings [seeds, N].
        labels: strings [N].

    Returns:
        The difference of each resample, in points: [NUM_RESAMPLES].
    """
    mean_scores = [MEAN_SCORES[score](side, labels) for side in (ours, theirs)]

    def difference(rows: np.ndarray) -> float:
        rows = rows.astype(np.int64)
        return mean_scores[0](rows) - mean_scores[1](rows)

    found = bootstrap(
        (np.arange(len(labels)),),
        difference,
        n_resamples=NUM_RESAMPLES,
        batch=RESAMPLES_AT_ONCE,
        vectorized=False,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=1,
    )
    return found.bootstrap_distribution


# A function of the numbers of rows, which may repeat, to the mean score of these rows over seeds.
MeanScore = Callable[[np.ndarray], float]


def _accuracy(predictions: np.ndarray, labels: np.ndarray) -> MeanScore:
    correct = 100 * (predictions == labels).mean(0)
    return lambda rows: float(correct[rows].mean())


def _matthews(predictions: np.ndarray, labels: np.ndarray) -> MeanScore:
    """Of two classes: the correlation of 0 and 1, which is 0 if one side is constant."""
    positive = max(labels.tolist())
    return _correlation((predictions == positive).astype(np.float64), (labels == positive).astype(np.float64))


def _spearman(predictions: np.ndarray, labels: np.ndarray) -> MeanScore:
    found, gold = predictions.astype(np.float64), labels.astype(np.float64)
    return lambda rows: _correlation(rankdata(found[:, rows], axis=1), rankdata(gold[rows]))(slice(None))


def _correlation(found: np.ndarray, gold: np.ndarray) -> MeanScore:
    def mean(rows: np.ndarray) -> float:
        own, expected = found[:, rows], gold[rows]
        own, expected = own - own.mean(1, keepdims=True), expected - expected.mean()
        scale = np.sqrt((own**2).sum(1) * (expected**2).sum())
        return 100 * float(np.divide(own @ expected, scale, out=np.zeros(len(own)), where=scale > 0).mean())

    return mean


def _micro_f1(predictions: np.ndarray, labels: np.ndarray) -> MeanScore:
    """Of lists of labels in JSON."""
    sets, gold = (
        [[set(json.loads(cell)) for cell in row] for row in predictions],
        [set(map(str, json.loads(c))) for c in labels],
    )
    right = np.array([[len(one & other) for one, other in zip(row, gold, strict=True)] for row in sets])
    either = np.array([[len(one) + len(other) for one, other in zip(row, gold, strict=True)] for row in sets])
    return lambda rows: 200 * float((right[:, rows].sum(1) / np.maximum(1, either[:, rows].sum(1))).mean())


MEAN_SCORES = {"accuracy": _accuracy, "matthews": _matthews, "spearman": _spearman, "micro_f1": _micro_f1}


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values corrected by Holm (1979): the k-th smallest of m times m - k + 1, not below those before it, at most 1.

    None stays None and does not count.
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[place] = largest
    return corrected
