"""The interface of a benchmark; :func:`~amos_fairseq.downstream.run_benchmark.run_benchmark` does the rest.

A run is one ``fairseq-train`` process in its own directory, followed by one call of ``evaluate`` in a thread of the
current process. Several runs can be active at once, each on its own device.
"""

import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.downstream.runs import BenchmarkTask, Failure, RunResult, TaskRun
from amos_fairseq.downstream.session import Session
from amos_fairseq.downstream.summary import TaskSummary, format_spread, summarize
from amos_fairseq.output.tables import Table

TOKENS_PER_BATCH = 8192  # of evaluation


class Stopped(Exception):
    """The user asked to stop. Finished runs are kept; the same command continues the others."""


def batches(lengths: Sequence[int] | np.ndarray, stop: threading.Event) -> Iterator[list[int]]:
    """Yield indices of examples of similar length for evaluation; raise :class:`Stopped` once ``stop`` is set."""
    for indices in batches_by_length(lengths, TOKENS_PER_BATCH):
        if stop.is_set():
            raise Stopped
        yield indices


class Benchmark(ABC):
    """A set of tasks on which one checkpoint is fine-tuned, and the table of their scores.

    A new benchmark is a subclass in a file or folder of this package, its hyperparameters under ``tasks`` in the YAMLs of
    ``recipes``, a function in ``prepare`` that writes its data from raw files
    (:func:`~amos_fairseq.text.inside_out.prepared_data`), and a file in ``cli`` that :mod:`amos_fairseq.cli.main` lists.
    Its ``__init__`` gets the session and the prepared data, raises :class:`~amos_fairseq.errors.UserError` for what cannot be
    used, and sets the attributes. It must give ``train_flags`` and ``evaluate``. The other methods have a default, which suits
    a benchmark of independent tasks, one row each.

    Attributes:
        name: the word in the names of its files: ``OUT/NAME.md``, ``.csv``, ``.json``, ``.setup.json``.
        title, columns: of the default ``table``. A title names the data; :func:`run_benchmark` adds what ± means.
            ``columns``: score -> heading; scores that no task has are left out.
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
    def train_flags(self, run: TaskRun) -> list[str]:
        """Return the run's arguments of ``fairseq-train``: data directory, task, criterion, and the score that selects
        ``checkpoint_best.pt``. The runner adds model, optimizer, schedule, seed, device and SAVE_DIR."""

    @abstractmethod
    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Score a fine-tuned checkpoint on the dev splits and write its predictions into ``directory``.

        The prediction runs in float32 and without dropout, whatever the precision of the training.

        Args:
            device: "cpu" or "cuda:N".
            stop: once it is set, raise :class:`Stopped` before the next batch.

        Returns:
            Scores in percent by name, including ``main_score``, as Python floats.
        """

    @staticmethod
    def selection_flags(run: TaskRun) -> list[str]:
        """Return the flags of a run for the score that selects ``checkpoint_best.pt``, or without validation where the recipe
        scores the last checkpoint."""
        if not run.task.scores_best:
            return ["--disable-validation"]
        return ["--best-checkpoint-metric", run.task.main_score, "--maximize-best-checkpoint-metric"]

    def fill_directory(self, run: TaskRun) -> None:
        """Copy what loading a checkpoint needs to the run's directory: ``tokenizer/``, and names of labels where there are
        any."""
        hidden = shutil.ignore_patterns(".*")  # no part of a tokenizer
        shutil.copytree(self.data / "tokenizer", run.directory / "tokenizer", dirs_exist_ok=True, ignore=hidden)

    def setup(self) -> dict[str, Any]:
        """Return the settings that all results in OUT share; a call with others is refused."""
        return self.session.setup(self.session.recipe.trials)

    def execute(self, execute_runs: Callable[[Sequence[TaskRun]], list[Failure]]) -> list[Failure]:
        """Execute the runs of all tasks. Override it to change the order, or to start runs from the results of others."""
        return execute_runs(self.session.plan(self.tasks.values()))

    def owns(self, task: str) -> bool:
        """Return whether a result in OUT belongs to the table. Override it if tasks of earlier calls belong to it too."""
        return task in self.tasks

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        """Return the results and the summaries that the table shows, by task. Override it if a run has the scores of several
        tasks."""
        return results, summarize(results)

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
