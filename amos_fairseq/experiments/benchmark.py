"""The plan of a fine-tuning command: its tasks, its runs, and what a task gives for training, scoring and the table."""

import functools
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.experiments.recipes import Hyperparameters, Schedule
from amos_fairseq.experiments.records import (
    NO_CONSTANTS,
    ConstantScores,
    RunResult,
    Summaries,
    TaskSummary,
    content_sha256,
    format_spread,
    summarize,
)
from amos_fairseq.experiments.session import Session
from amos_fairseq.files import file_sha256
from amos_fairseq.output.tables import Table

IDENTITY_DIGITS = 8


class Stopped(Exception):
    """The user asked to stop. Finished runs are kept; the same command continues the others."""


class RunFailed(Exception):
    """A run ended without a result. The message is one line."""


@dataclass(frozen=True)
class BenchmarkTask:
    """A task of a benchmark."""

    name: str
    num_examples: int  # for training; it determines the number of updates
    main_score: str  # selects the best run and is shown in the table
    data_sha256: str  # fingerprint of the prepared data
    trials: tuple[Hyperparameters, ...]  # the combinations of hyperparameters to run: one, or those of a grid
    notes: tuple[str, ...] = ()  # footnotes for the scores, such as a training set that differs from the official one
    sampling_exponent: float | None = None  # of the shares of several tasks that one model learns

    @property
    def continues_across_epochs(self) -> bool:
        """Whether the examples that make no whole update at the end of an epoch begin the next one."""
        return self.sampling_exponent is not None

    @property
    def scores_best(self) -> bool:
        """Whether the dev set is needed after each epoch."""
        return any(trial.checkpoint == "best" for trial in self.trials)

    @property
    def selection_flags(self) -> list[str]:
        """The flags that select ``checkpoint_best.pt``; without validation where the last checkpoint is scored."""
        if not self.scores_best:
            return ["--disable-validation"]
        return ["--best-checkpoint-metric", self.main_score, "--maximize-best-checkpoint-metric"]


@dataclass(frozen=True)
class TaskRun:
    """One fine-tuning run: a task, a trial and a seed."""

    task: BenchmarkTask
    hyperparameters: Hyperparameters
    trial: str  # name of the combination of hyperparameters if the task has several; otherwise empty
    seed: int
    finetune_from: Path | None  # checkpoint to start from; None for random weights
    settings: dict[str, Any]  # everything that determines the result but the seed, as plain values
    directory: Path

    @property
    def label(self) -> str:
        return " ".join(word for word in (self.task.name, self.trial, f"seed {self.seed}") if word)

    @functools.cached_property
    def schedule(self) -> Schedule:
        return self.hyperparameters.schedule(self.task.num_examples, self.task.continues_across_epochs)


def trial_name(hyperparameters: Hyperparameters, trials: Sequence[Hyperparameters]) -> str:
    """Return the values in which the trials differ, such as ``epochs3-lr2e-05``."""
    all_values = [trial.as_dict() for trial in trials]
    return "-".join(
        f"{name}{value}"
        for name, value in hyperparameters.as_dict().items()
        if any(values[name] != value for values in all_values)
    )


class Benchmark(ABC):
    """A set of tasks on which one checkpoint is fine-tuned, and the table of their scores.

    A subclass must give ``train_flags`` and ``evaluate``. The other methods have a default, which suits independent tasks, one
    row each.

    Attributes:
        name: the word in the names of its files: ``OUT/NAME.md``, ``.csv``, ``.json``.
        title, columns: of the default ``table``. A title names the data; :func:`~amos_fairseq.experiments.table.run_benchmark`
            adds what ± means. ``columns``: score -> heading; scores that no task has are left out.
        trained_as: fairseq's task and criterion.
        unit: what the scores count.
        only_trains: prefixes of weights that no prediction needs.
        session: what all runs share.
        data: directory of the prepared data, with ``tokenizer/``.
        tasks: by name. OUT may hold results of several benchmarks, so that names must differ from those of others.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    trained_as: str
    unit: str = "rows"
    only_trains: tuple[str, ...] = ()
    session: Session
    data: Path
    tasks: dict[str, BenchmarkTask]

    @abstractmethod
    def train_flags(self, run: TaskRun) -> list[str]:
        """Return the run's arguments of ``fairseq-train``: data directory, those of the task, and the score that selects
        ``checkpoint_best.pt``. The runner adds task, model, optimizer, schedule, seed, device and SAVE_DIR."""

    @abstractmethod
    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Score a fine-tuned checkpoint on the dev splits and write its predictions beside it.

        The prediction runs in float32 and without dropout, whatever the precision of the training.

        Args:
            device: "cpu" or "cuda:N".
            stop: once it is set, raise :class:`Stopped` before the next batch.

        Returns:
            Scores by name, in percent but for a mean squared error and a threshold, including ``main_score``, as Python floats.
        """

    def fill_directory(self, run: TaskRun) -> None:
        """Copy what loading a checkpoint needs to the run's directory: ``tokenizer/``, and names of labels."""
        hidden = shutil.ignore_patterns(".*")  # no part of a tokenizer
        shutil.copytree(self.data / "tokenizer", run.directory / "tokenizer", dirs_exist_ok=True, ignore=hidden)

    def more_settings(self, task: str, seed: int) -> dict[str, Any]:
        """Return what determines a result besides checkpoint, data and hyperparameters, as plain values."""
        return {}

    def plan(self, tasks: Iterable[BenchmarkTask], intermediate: Path | None = None) -> list[TaskRun]:
        """Return every run of the tasks; seeds vary fastest, then trials. ``intermediate``: checkpoint to start from instead of
        the session's."""
        session = self.session
        start, origin = None if session.checkpoint.from_scratch else session.checkpoint.file, session.origin
        if intermediate is not None:
            start, origin = intermediate, origin | {"intermediate_sha256": file_sha256(intermediate)}
        runs = []
        for task in tasks:
            data = {"task": task.name, "data_sha256": task.data_sha256, "rows": task.num_examples}
            data |= {"sampling_exponent": task.sampling_exponent}
            for trial in task.trials:
                for seed in session.seeds:
                    settings = origin | data | self.more_settings(task.name, seed)
                    settings["hyperparameters"] = trial.as_dict()
                    folder = session.out / "runs" / task.name / content_sha256(settings)[:IDENTITY_DIGITS]
                    name = trial_name(trial, task.trials)
                    runs.append(TaskRun(task, trial, name, seed, start, settings, folder / f"seed{seed}"))
        return runs

    def execute(self, runner: Any) -> None:
        """Execute the runs of all tasks. Override it to change the order, or to start runs from the results of others.

        Args:
            runner: :class:`~amos_fairseq.experiments.runner.Runner`.
        """
        runner.execute(self.plan(self.tasks.values()))

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        return results, summarize(results)

    def constants(self) -> dict[str, ConstantScores]:
        """Return the scores of a constant prediction, by the task of a summary."""
        return {}

    def label(self, task: str) -> str:
        return task

    def table(self, summaries: Summaries, constants: Mapping[str, ConstantScores], notes: Sequence[str]) -> Table:
        """Return the table; by default with a row for each task that has results, one for each of its constant predictions, and
        a column for each score."""
        shown = [score for score in self.columns if any(score in summary.scores for summary in summaries.values())]
        rows = []
        for task, summary in sorted(summaries.items()):
            cells = [format_spread(summary.scores.get(score), score) for score in shown]
            rows.append([f"{self.label(task)}: {self.session.row_name}", *cells])
            constant = constants.get(task, NO_CONSTANTS)
            rows += [[f"{self.label(task)}: {row}", *constant.cells(row, shown)] for row in constant.scores]
        return Table(self.title, ["", *(self.columns[score] for score in shown)], rows, notes)

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterable[str]:
        return ()

    def average(self, summaries: Summaries) -> dict[str, Any] | None:
        """Return name and value of the average of the main scores, where the table has one."""
        return None

    def write_more(self, summaries: Summaries, stop: threading.Event) -> tuple[Sequence[Path], Sequence[str]]:
        """Write further files after the table; return their paths, and notices for the user."""
        return (), ()


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def usable_folder(folder: Path) -> Path:
    """Return the absolute path; refuse one that fairseq would take for several."""
    folder = folder.resolve()
    if os.pathsep in str(folder):
        raise UserError(f"{folder}: fairseq separates folders at {os.pathsep!r}: give a path without it")
    return folder
