"""Other results of ``amos glue`` beside a table, and tests of the differences from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap, mannwhitneyu, spearmanr
from sklearn.metrics import matthews_corrcoef

from amos_fairseq.data.table_files import TableFile
from amos_fairseq.data.text_scores import correlation
from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.runs import RunResult, parse_result, read_optional_json
from amos_fairseq.summary_file import Summary, parse_summary
from amos_fairseq.tables import MISSING, Table

NUM_RESAMPLES = 2000
RESAMPLES_AT_ONCE = 50  # in memory
CONFIDENCE = 0.95
TITLE = "GLUE dev: differences from the other rows"
NOTES = (
    "difference: of the means over seeds, in points; above 0 the first row is better",
    f"interval and p of the bootstrap: the dev rows are drawn {NUM_RESAMPLES:,} times, the same ones for both (paired); they "
    "say how much depends on the choice of the dev set",
    "p of Mann-Whitney: its U test over the seeds of both; it says how much depends on the seeds of fine-tuning, and cannot "
    "be below 0.1 with three seeds each",
    "both p are two-sided and corrected by Holm for the number of tasks (thesis, Table 3.1); seeds of pretraining are in "
    "neither",
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

    def predictions(self, task: str) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the predictions of each seed, and the labels of the rows: strings [N].

        Raises:
            UserError: a file is missing or damaged.
        """
        predictions, labels = [], np.array([])
        for run in self.runs[task]:
            of_all_tasks = self.out / run.directory / f"predictions.{task}.valid.tsv"
            own = of_all_tasks if of_all_tasks.is_file() else self.out / run.directory / "predictions.valid.tsv"
            rows = [(row.get("prediction"), row.get("label")) for _, row in TableFile(own, ordinary_quotes=True).rows()]
            predictions.append(np.array([str(prediction) for prediction, _ in rows]))
            labels = np.array([str(label) for _, label in rows])
        return predictions, labels


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


def difference_table(own: GlueResults, others: Sequence[GlueResults]) -> Table:
    """Return a table with a row for each task that is also in another output.

    Raises:
        UserError: predictions are missing, or they are of other dev rows.
    """
    rows = []
    for other in others:
        tasks = [task for task in own.runs if other.runs.get(task)]
        compared = [_compare(own, other, task) for task in tasks]
        corrected = [holm([one[kind] for one in compared]) for kind in ("bootstrap", "seeds")]
        for task, one, *p_values in zip(tasks, compared, *corrected, strict=True):
            interval = f"{one['low']:+.1f} to {one['high']:+.1f}" if one["low"] is not None else MISSING
            cells = [f"{one['difference']:+.1f}", interval, *map(_spell, p_values)]
            rows.append([f"{task}, from {other.summary.folder_name}", *cells])
    columns = ["", "difference", f"{CONFIDENCE:.0%} interval", "p, bootstrap", "p, Mann-Whitney"]
    return Table(TITLE, columns, rows, NOTES)


def _spell(p_value: float | None) -> str:
    if p_value is None:
        return MISSING
    return f"{p_value:.3f}" if p_value >= 0.001 else "< 0.001"


def _compare(own: GlueResults, other: GlueResults, task: str) -> dict[str, float | None]:
    scores = [[run.main for run in side.runs[task]] for side in (own, other)]
    difference = float(np.mean(scores[0]) - np.mean(scores[1]))
    found: dict[str, float | None] = {
        "difference": difference,
        "low": None,
        "high": None,
        "bootstrap": None,
        "seeds": None,
    }
    if min(map(len, scores)) > 1:
        found["seeds"] = float(mannwhitneyu(*scores, alternative="two-sided").pvalue)
    score = SCORERS.get(own.summary.main_scores[task])
    if score is None:
        return found
    (ours, labels), (theirs, their_labels) = own.predictions(task), other.predictions(task)
    if not np.array_equal(labels, their_labels):
        raise UserError(
            f"{own.out} and {other.out} have predictions for other dev rows of {task}: they cannot be compared"
        )
    return found | paired_bootstrap(score, ours, theirs, labels)


def paired_bootstrap(
    score: Callable[[np.ndarray, np.ndarray], float],
    ours: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    labels: np.ndarray,
) -> dict[str, float]:
    """Resample the rows, the same ones on both sides, and take the difference of the mean scores over seeds.

    Args:
        score: from predictions and labels [N] to percent.
        ours, theirs: predictions of each seed, strings [N].

    Returns:
        ``low`` and ``high``, the ends of the percentile interval, and ``bootstrap``, the two-sided p: twice the share of
        resamples on the smaller side of 0.
    """
    codes, number = _codes([*ours, *theirs, labels]), len(ours)

    def difference(rows: np.ndarray) -> float:
        rows, gold = rows.astype(np.int64), codes[-1]
        means = (
            np.mean([score(side[rows], gold[rows]) for side in part]) for part in (codes[:number], codes[number:-1])
        )
        return float(np.subtract(*means))

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
    drawn = found.bootstrap_distribution
    p_value = min(1.0, 2 * min(np.mean(drawn <= 0), np.mean(drawn >= 0)))
    low, high = found.confidence_interval
    return {"low": float(low), "high": float(high), "bootstrap": float(p_value)}


def _codes(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return numbers [N] for columns of strings: their values, or codes that are equal for equal strings."""
    try:
        return [column.astype(np.float64) for column in columns]
    except ValueError:
        codes = np.unique(np.concatenate(columns), return_inverse=True)[1]
        return np.split(codes, len(columns))


def _accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
    return 100 * float(np.mean(predictions == labels))


def _matthews(predictions: np.ndarray, labels: np.ndarray) -> float:
    return 100 * float(matthews_corrcoef(labels, predictions))


def _spearman(predictions: np.ndarray, labels: np.ndarray) -> float:
    return 100 * correlation(spearmanr, predictions, labels)


# Main scores; of several labels a row the file has lists, and there is no bootstrap.
SCORERS = {"accuracy": _accuracy, "matthews": _matthews, "spearman": _spearman}


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
