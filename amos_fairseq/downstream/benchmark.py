"""What a fine-tuning command consists of: its tasks, the runs of all seeds and trials, and the :class:`Benchmark`, which says
how they are trained, scored and shown. :mod:`amos_fairseq.downstream.runner` executes them.

OUT/runs/TASK/[TRIAL/]seedN/run.json   the identity of a run, which protects the directory from other runs
"""

import functools
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.downstream.recipes import Hyperparameters, Schedule
from amos_fairseq.downstream.results import RunResult, TaskSummary, format_spread, summarize, write_record
from amos_fairseq.downstream.session import ANOTHER_OUT, Session
from amos_fairseq.errors import UserError
from amos_fairseq.files import check_claim, file_sha256
from amos_fairseq.output.tables import Table

IDENTITY_FILE = "run.json"
LOG_FILE = "train.log"
TOKENS_PER_BATCH = 8192  # of evaluation


class Stopped(Exception):
    """The user asked to stop. Finished runs are kept; the same command continues the others."""


@dataclass(frozen=True)
class BenchmarkTask:
    """A task of a benchmark.

    Attributes:
        num_examples: for training; it determines the number of updates.
        main_score: the score that selects the best run and is shown in the table.
        data_sha256: fingerprint of the prepared data; runs on other data are not continued.
        trials: the combinations of hyperparameters to run: one, or those of a grid.
        notes: footnotes for the scores, such as a training set that differs from the official one.
        carries_rest: whether the examples that make no whole update at the end of an epoch begin the next one.
    """

    name: str
    num_examples: int
    main_score: str
    data_sha256: str
    trials: tuple[Hyperparameters, ...]
    notes: tuple[str, ...] = ()
    carries_rest: bool = False

    @property
    def scores_best(self) -> bool:
        """Whether the dev set is needed after each epoch."""
        return any(trial.checkpoint == "best" for trial in self.trials)


@dataclass(frozen=True)
class TaskRun:
    """One fine-tuning run: a task, a trial and a seed.

    Attributes:
        trial: name of the combination of hyperparameters if the task has several; otherwise empty.
        finetune_from: checkpoint to start from; None for random weights.
        identity: everything that determines the result, as plain values.
    """

    task: BenchmarkTask
    hyperparameters: Hyperparameters
    trial: str
    seed: int
    finetune_from: Path | None
    directory: Path
    identity: dict[str, Any]

    @property
    def label(self) -> str:
        return " ".join(word for word in (self.task.name, self.trial, f"seed {self.seed}") if word)

    @functools.cached_property
    def schedule(self) -> Schedule:
        return self.hyperparameters.schedule(self.task.num_examples, self.task.carries_rest)

    def check_directory(self, claims: Callable[..., bool] = check_claim) -> None:
        """Refuse a directory that holds another run; with :func:`claim` as ``claims``, make it the directory of this run."""
        advice = f"{ANOTHER_OUT}, or delete that directory"
        claims(self.directory / IDENTITY_FILE, self.identity, f"{self.directory} holds another run", advice)


def plan_runs(session: Session, tasks: Iterable[BenchmarkTask], intermediate: Path | None = None) -> list[TaskRun]:
    """Return every run of the tasks; seeds vary fastest, then trials. ``intermediate``: checkpoint to start from instead of the
    session's."""
    finetune_from, origin = None if session.checkpoint.from_scratch else session.checkpoint.file, session.origin
    if intermediate is not None:
        finetune_from, origin = intermediate, origin | {"intermediate_sha256": file_sha256(intermediate)}
    runs = []
    for task in tasks:
        for settings in task.trials:
            trial = trial_name(settings, task.trials)
            for seed in session.seeds:
                identity = origin | {"task": task.name, "seed": seed, "settings": settings.as_dict()}
                identity |= {"data_sha256": task.data_sha256, "rows": task.num_examples}
                directory = session.out / "runs" / task.name / trial / f"seed{seed}"
                runs.append(TaskRun(task, settings, trial, seed, finetune_from, directory, identity))
    return runs


def trial_name(hyperparameters: Hyperparameters, trials: Sequence[Hyperparameters]) -> str:
    """Return the values in which the trials differ, such as ``epochs3-lr2e-05``."""
    all_values = [trial.as_dict() for trial in trials]
    return "-".join(
        f"{name}{value}"
        for name, value in hyperparameters.as_dict().items()
        if any(values[name] != value for values in all_values)
    )


@dataclass(frozen=True)
class Failure:
    run: TaskRun
    reason: str

    @property
    def log(self) -> Path:
        return self.run.directory / LOG_FILE


class Benchmark(ABC):
    """A set of tasks on which one checkpoint is fine-tuned, and the table of their scores.

    A subclass must give ``train_flags`` and ``evaluate``. The other methods have a default, which suits independent tasks, one
    row each.

    Attributes:
        name: the word in the names of its files: ``OUT/NAME.md``, ``.csv``, ``.json``, ``.setup.json``.
        title, columns: of the default ``table``. A title names the data; :func:`run_benchmark` adds what ± means.
            ``columns``: score -> heading; scores that no task has are left out.
        session: what all runs share.
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
    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Score a fine-tuned checkpoint on the dev splits and write its predictions beside it.

        The prediction runs in float32 and without dropout, whatever the precision of the training.

        Args:
            device: "cpu" or "cuda:N".
            stop: once it is set, raise :class:`Stopped` before the next batch.

        Returns:
            Scores in percent by name, including ``main_score``, as Python floats.
        """

    def fill_directory(self, run: TaskRun) -> None:
        """Copy what loading a checkpoint needs to the run's directory: ``tokenizer/``, and names of labels."""
        hidden = shutil.ignore_patterns(".*")  # no part of a tokenizer
        shutil.copytree(self.data / "tokenizer", run.directory / "tokenizer", dirs_exist_ok=True, ignore=hidden)

    def setup(self) -> dict[str, Any]:
        """Return the settings that all results in OUT share."""
        return self.session.setup(self.session.recipe.trials)

    def execute(self, execute_runs: Callable[[Sequence[TaskRun]], list[Failure]]) -> list[Failure]:
        """Execute the runs of all tasks. Override it to change the order, or to start runs from the results of others."""
        return execute_runs(plan_runs(self.session, self.tasks.values()))

    def shows(self, task: str) -> bool:
        """Return whether the table has the results of a task in OUT, which may be those of an earlier call."""
        return task in self.tasks

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        shown = [result for result in results if self.shows(result.task)]
        return shown, summarize(shown)

    def label(self, task: str) -> str:
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
        return ()

    def summary_parts(self, summaries: Mapping[str, TaskSummary]) -> dict[str, Any]:
        return {}

    def write_more(
        self, summaries: Mapping[str, TaskSummary], stop: threading.Event
    ) -> tuple[Sequence[Path], Sequence[str]]:
        """Write further files after the table; return their paths, and notices for the user."""
        return (), ()


def common_notes(
    benchmark: Benchmark, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]
) -> Iterator[str]:
    """Yield the footnotes of every table: recipe, seeds, selection by dev score, data."""
    session = benchmark.session
    recipe, labels = session.recipe, {task: benchmark.label(task) for task in summaries}
    values = [
        f"{name} {str(value).lower() if isinstance(value, bool | str) else f'{value:g}'}"
        for name, value in session.overrides.items()
    ]
    changed = f"; instead of its own: {', '.join(values)}" if values else ""
    name = Path(recipe.name).name
    yield f"fine-tuning settings: recipe {name} ({recipe.description}; values for {recipe.size} models){changed}"
    counts = [summary.main.count for summary in summaries.values()]
    listed = ", ".join(f"{label} {count}" for label, count in zip(labels.values(), counts, strict=True))
    divisor = "; standard deviations divide by n - 1" if max(counts) > 1 else ""
    yield f"seeds: {f'{counts[0]} per task' if len(set(counts)) == 1 else listed}{divisor}"
    if session.checkpoint.from_scratch:
        yield "random weights: only the architecture of the checkpoint, none of its weights"
    for task, summary in summaries.items():
        if summary.num_trials > 1:
            yield (
                f"{labels[task]}: {summary.trial}, selected from {summary.num_trials} combinations by the highest median "
                "on the same dev set"
            )
    if any(result.checkpoint == "checkpoint_best.pt" for result in results):
        yield "each run is scored at its best epoch on the same dev set"
    yield from dict.fromkeys(note for result in results for note in result.notes)


def save_results(
    benchmark: Benchmark,
    setup: dict[str, Any],
    table: Table,
    results: Sequence[RunResult],
    summaries: Mapping[str, TaskSummary],
) -> list[Path]:
    """Write NAME.md, NAME.csv and NAME.json into OUT; return their paths."""
    checkpoint, stem = benchmark.session.checkpoint, benchmark.session.out / benchmark.name
    summary = {
        "benchmark": benchmark.name,
        "setup": setup,
        "tasks": {task: summary.as_dict() for task, summary in summaries.items()},
        "checkpoint": {"file": str(checkpoint.file), "num_updates": checkpoint.num_updates},
        **benchmark.summary_parts(summaries),
        "notes": list(table.notes),
        "runs": [vars(result) for result in results],
    }
    write_record(stem.with_suffix(".json"), summary)
    return [*table.save(stem), stem.with_suffix(".json")]


def usable_folder(folder: Path) -> Path:
    """Return the absolute path; refuse one that fairseq would take for several."""
    folder = folder.resolve()
    if os.pathsep in str(folder):
        raise UserError(f"{folder}: fairseq separates folders at {os.pathsep!r}: give a path without it")
    return folder


def selection_flags(task: BenchmarkTask) -> list[str]:
    """Return the flags that select ``checkpoint_best.pt``; without validation where the last checkpoint is scored."""
    if not task.scores_best:
        return ["--disable-validation"]
    return ["--best-checkpoint-metric", task.main_score, "--maximize-best-checkpoint-metric"]


def batches(lengths: Sequence[int] | np.ndarray, stop: threading.Event) -> Iterator[list[int]]:
    """Yield indices of examples of similar length for evaluation; raise :class:`Stopped` once ``stop`` is set."""
    for indices in batches_by_length(lengths, TOKENS_PER_BATCH):
        if stop.is_set():
            raise Stopped
        yield indices
