"""Results over seeds: medians, standard deviations, the best run."""

import statistics
from dataclasses import dataclass
from typing import Any, Sequence

from amos_fairseq.finetuning.results import Result


@dataclass(frozen=True)
class Spread:
    """Scores of several seeds.

    Attributes:
        median: as AMOS reports (section 4, "the median of five random seeds").
        deviation: sample standard deviation (divided by n - 1), the estimate of what another seed would change; the paper
            does not say which of the two it prints. None for a single seed.
        count: number of seeds.
    """

    median: float
    deviation: float | None
    count: int

    def as_dict(self) -> dict[str, Any]:
        return {"median": self.median, "deviation": self.deviation, "count": self.count}


def spread(values: Sequence[float]) -> Spread:
    """Raises ``statistics.StatisticsError`` for no values."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.median(values), deviation, len(values))


@dataclass(frozen=True)
class TaskSummary:
    """What the table says of a task.

    Attributes:
        point: the combination of hyperparameters that was chosen; empty where there is one only.
        points: number of combinations that have results.
        scores: spread of every score over the seeds of that combination.
        best: the run with the highest main score, over all combinations.
    """

    task: str
    point: str
    points: int
    scores: dict[str, Spread]
    best: Result

    @property
    def main(self) -> Spread:
        return self.scores[self.best.main_score]


def summarize(results: Sequence[Result]) -> dict[str, TaskSummary]:
    """Summaries by task. Of several combinations the one with the highest median of the main score is shown; of equal
    ones the first."""
    by_task: dict[str, list[Result]] = {}
    for result in results:
        by_task.setdefault(result.task, []).append(result)
    return {task: _summarize_task(task, own) for task, own in by_task.items()}


def _summarize_task(task: str, results: list[Result]) -> TaskSummary:
    by_point: dict[str, list[Result]] = {}
    for result in results:
        by_point.setdefault(result.point, []).append(result)
    point = max(by_point, key=lambda name: statistics.median(result.main for result in by_point[name]))
    chosen = by_point[point]
    scores = {name: spread([result.scores[name] for result in chosen]) for name in chosen[0].scores}
    return TaskSummary(task, point, len(by_point), scores, best_run(results))


def best_run(results: Sequence[Result]) -> Result:
    """The highest main score; of equal ones the first seed."""
    return max(results, key=lambda result: (result.main, -result.seed))
