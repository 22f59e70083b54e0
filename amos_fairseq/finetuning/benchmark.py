"""What a benchmark has to give; :func:`~amos_fairseq.finetuning.run_benchmark.run_benchmark` does the rest.

A run is one ``fairseq-train`` process in its own directory, followed by one call of ``evaluate`` in a thread of the
current process. Several runs can be active at once, each on its own device.
"""

import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.finetuning.report import TaskSummary, format_spread
from amos_fairseq.finetuning.runs import BenchmarkTask, Failure, RunResult, TaskRun
from amos_fairseq.finetuning.session import Session
from amos_fairseq.tables import Table


class Stopped(Exception):
    """The user asked to stop. Finished runs are kept; the same command continues the others."""


class Benchmark(ABC):
    """A set of tasks on which one checkpoint is fine-tuned, and the table of their scores.

    A new benchmark is a subclass in a file or folder of this package, and a thin file in ``cli``. Its ``__init__`` gets
    the session and the prepared data, raises :class:`~amos_fairseq.errors.UserError` for what cannot be used, and sets
    the attributes. It must give ``train_flags`` and ``evaluate``. The other methods have a default, which suits a
    benchmark of independent tasks, one row each.

    Attributes:
        name: the word in the names of its files: ``OUT/NAME.md``, ``.csv``, ``.json``, ``.setup.json``.
        title: title of the table.
        columns: columns of the table: score -> heading. Scores that no task has are left out.
        session: the checked arguments of the command. Its recipe has the hyperparameters by section, usually a task.
        data: directory of the prepared data, with ``tokenizer/``.
        tasks: by name. OUT may hold results of several benchmarks, so that names must differ from those of others.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    session: Session
    data: Path
    tasks: dict[str, BenchmarkTask]

    @abstractmethod
    def train_flags(self, task: str) -> list[str]:
        """Return the task's arguments of ``fairseq-train``: data directory, task, criterion, and the score that selects
        ``checkpoint_best.pt``. The runner adds model, optimizer, schedule, seed, device and SAVE_DIR."""

    @abstractmethod
    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Score a fine-tuned checkpoint on the dev splits and write its predictions into ``directory``.

        Args:
            device: "cpu" or "cuda:N".
            stop: once it is set, raise :class:`Stopped` before the next batch.

        Returns:
            Scores in percent by name, including ``main_score``, as Python floats.
        """

    def copy_tokenizer_and_labels(self, task: str, directory: Path) -> None:
        """Copy the files that loading the checkpoints needs into ``directory``: ``tokenizer/``, with labels ``labels.txt``."""
        shutil.copytree(self.data / "tokenizer", directory / "tokenizer", dirs_exist_ok=True)

    def setup(self) -> dict[str, Any]:
        """Return the settings that all results in OUT share; a call with others is refused."""
        return self.session.setup(self.session.recipe.trials)

    def execute(self, execute_runs: Callable[[Sequence[TaskRun]], list[Failure]]) -> list[Failure]:
        """Execute the runs of all tasks; for another order, or runs that start from the result of others."""
        return execute_runs(self.session.plan(self.tasks.values()))

    def owns(self, task: str) -> bool:
        """Return whether a result in OUT belongs to the table, also where the task is not one of this call's."""
        return task in self.tasks

    def label(self, task: str) -> str:
        """Return the name of a task in the table."""
        return task

    def table(self, summaries: Mapping[str, TaskSummary], notes: Sequence[str]) -> Table:
        """Return the table; by default with a row for each task that has results, and a column for each score."""
        shown = [score for score in self.columns if any(score in summary.scores for summary in summaries.values())]
        rows = [
            [f"{self.label(task)}: {self.session.row_name}", *(format_spread(summary.scores.get(s)) for s in shown)]
            for task, summary in sorted(summaries.items())
        ]
        return Table(self.title, ["", *(self.columns[score] for score in shown)], rows, notes)

    def notes(self, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]) -> Iterable[str]:
        """Return footnotes of the table, besides those on recipe, seeds and data."""
        return ()

    def summary_parts(self, summaries: Mapping[str, TaskSummary]) -> dict[str, Any]:
        """Return further parts of the summary ``OUT/NAME.json``."""
        return {}

    def write_more(
        self, summaries: Mapping[str, TaskSummary], stop: threading.Event
    ) -> tuple[Sequence[Path], Sequence[str]]:
        """Write further files after the table; return their paths, and notices for the user."""
        return (), ()
