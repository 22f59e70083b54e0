"""The fine-tunings of one checkpoint: ``amos glue`` in a folder of its own, and what it found there."""

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pieces import Piece

from amos_fairseq.finetuning.glue.experiment import average
from amos_fairseq.finetuning.glue.tasks import AVERAGED
from amos_fairseq.finetuning.report import TaskSummary, spread, summarize
from amos_fairseq.finetuning.runs import Result, read_results


@dataclass(frozen=True)
class FineTuning:
    """The runs of one checkpoint.

    Attributes:
        directory: the OUT of ``amos glue``.
        flags: further flags of it, with their values.
    """

    label: str
    checkpoint: Path | None
    data: Path
    directory: Path
    tasks: tuple[str, ...]
    num_seeds: int
    flags: tuple[str, ...]

    @property
    def results(self) -> list[Result]:
        """Of the tasks and seeds that are asked for; the folder may hold more."""
        found = read_results(self.directory)
        return [result for result in found if result.task in self.tasks and result.seed <= self.num_seeds]

    @property
    def total(self) -> int:
        return len(self.tasks) * self.num_seeds

    @property
    def finished(self) -> bool:
        return len({(result.task, result.seed) for result in self.results}) == self.total

    def run(self, piece: Piece) -> None:
        """Make the runs that have no result yet.

        Raises:
            Stopped: the piece has ended; a run that was under way has saved its state.
            RunFailed: ``amos glue`` ended with an error.
        """
        command = [sys.executable, "-W", "ignore", "-m", "amos_fairseq.cli.main", "glue", *self._arguments()]
        piece.run(self.label, command, self.directory, dict(os.environ), self.total, lambda _: len(self.results))

    def _arguments(self) -> list[str]:
        values = {
            "--checkpoint": self.checkpoint,
            "--data": self.data,
            "--out": self.directory,
            "--tasks": ",".join(self.tasks),
            "--seeds": self.num_seeds,
        }
        return [str(part) for pair in values.items() for part in pair] + list(self.flags)


def scores_of(results: Sequence[Result]) -> dict[str, Any] | None:
    """Median and deviation of every task, and of the average; None without results.

    The average is the mean of the tasks' medians, as in the papers; its deviation that of the seeds' own averages, over
    the seeds that every task has.
    """
    if not results:
        return None
    summaries = {task: summary for task, summary in summarize(results).items() if task in AVERAGED}
    chosen = {task: _scores_by_seed(results, summary) for task, summary in summaries.items()}
    common = set.intersection(*(set(by_seed) for by_seed in chosen.values()))
    averages = [statistics.fmean(by_seed[seed] for by_seed in chosen.values()) for seed in sorted(common)]
    _, mean = average({task: summary.main.median for task, summary in summaries.items()})
    return {
        "tasks": {
            task: summary.main.as_dict() | {"score": summary.best.main_score, "seeds": chosen[task]}
            for task, summary in summaries.items()
        },
        "average": {
            "value": mean,
            "deviation": spread(averages).deviation if averages else None,
            "count": len(averages),
        },
    }


def _scores_by_seed(results: Sequence[Result], summary: TaskSummary) -> dict[int, float]:
    own = [result for result in results if result.task == summary.task and result.trial == summary.trial]
    return {result.seed: result.main for result in own}
