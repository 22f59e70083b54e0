"""What a fine-tuning command consists of: its tasks, the runs of all seeds and trials, and the :class:`Benchmark`, which says
how they are trained, scored and shown. :mod:`amos_fairseq.experiments.runner` executes them.

OUT/runs/TASK/[TRIAL/]seedN/run.json   the identity of a run, which protects the directory from other runs
"""

import functools
import itertools
import os
import shlex
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.recipes import Hyperparameters, Schedule
from amos_fairseq.experiments.records import (
    NO_BASELINES,
    Baselines,
    RunResult,
    Summaries,
    TaskSummary,
    error_in_words,
    format_spread,
    standard_error,
    summarize,
    write_record,
)
from amos_fairseq.experiments.session import ANOTHER_OUT, Session
from amos_fairseq.files import check_claim, file_sha256
from amos_fairseq.output.tables import Table
from amos_fairseq.output.terminal import progress_bar

IDENTITY_FILE = "run.json"
LOG_FILE = "train.log"
LINEAR = "linear model on frozen states"  # a row of the table
TOKENS_PER_BATCH = 8192  # of evaluation


class Stopped(Exception):
    """The user asked to stop. Finished runs are kept; the same command continues the others."""


@dataclass(frozen=True)
class BenchmarkTask:
    """A task of a benchmark."""

    name: str
    num_examples: int  # for training; it determines the number of updates
    main_score: str  # selects the best run and is shown in the table
    data_sha256: str  # fingerprint of the prepared data; runs on other data are not continued
    trials: tuple[Hyperparameters, ...]  # the combinations of hyperparameters to run: one, or those of a grid
    notes: tuple[str, ...] = ()  # footnotes for the scores, such as a training set that differs from the official one
    sampling_exponent: float | None = None  # of the shares of several tasks that one model learns

    @property
    def carries_rest(self) -> bool:
        """Whether the examples that make no whole update at the end of an epoch begin the next one."""
        return self.sampling_exponent is not None

    @property
    def scores_best(self) -> bool:
        """Whether the dev set is needed after each epoch."""
        return any(trial.checkpoint == "best" for trial in self.trials)


@dataclass(frozen=True)
class TaskRun:
    """One fine-tuning run: a task, a trial and a seed."""

    task: BenchmarkTask
    hyperparameters: Hyperparameters
    trial: str  # name of the combination of hyperparameters if the task has several; otherwise empty
    seed: int
    finetune_from: Path | None  # checkpoint to start from; None for random weights
    directory: Path
    identity: dict[str, Any]  # everything that determines the result, as plain values

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
                identity["data_sha256"] = task.data_sha256
                if task.sampling_exponent is None:
                    identity["rows"] = task.num_examples
                else:  # the number of rows follows from it
                    identity["sampling_exponent"] = task.sampling_exponent
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
        trained_as: fairseq's task and criterion.
        unit: what the scores count.
        judged_too: scores besides the main one that :func:`verdicts` compares with the baselines.
        only_trains: prefixes of weights that no prediction needs.
        section: of the recipe, where all results in OUT share one, whatever their tasks are.
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
    section: str | None = None
    judged_too: Sequence[str] = ()
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

    def setup(self) -> dict[str, Any]:
        """Return the settings that all results in OUT share."""
        if self.section is None:
            return self.session.setup(self.session.recipe.trials)
        (trials,) = {task.trials for task in self.tasks.values()}
        return self.session.setup({self.section: trials})

    def execute(self, execute_runs: Callable[[Sequence[TaskRun]], list[Failure]]) -> list[Failure]:
        """Execute the runs of all tasks. Override it to change the order, or to start runs from the results of others."""
        return execute_runs(plan_runs(self.session, self.tasks.values()))

    def shows(self, task: str) -> bool:
        """Return whether the table has the results of a task in OUT, which may be those of an earlier call."""
        return task in self.tasks

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        shown = [result for result in results if self.shows(result.task)]
        return shown, summarize(shown)

    def constants(self) -> dict[str, Baselines]:
        """Return the scores of a constant prediction, by the task of a summary."""
        return {}

    def linear_scores(self, stop: threading.Event) -> dict[str, dict[str, float]]:
        """Return the scores of a linear model on states of the frozen encoder, by the task of a summary."""
        return {}

    def label(self, task: str) -> str:
        return task

    def row_name(self, task: str, model: str) -> str:
        return f"{self.label(task)}: {model}"

    def table(self, summaries: Summaries, baselines: Mapping[str, Baselines], notes: Sequence[str]) -> Table:
        """Return the table; by default with a row for each task that has results, one for each of its baselines, and a column
        for each score."""
        shown = [score for score in self.columns if any(score in summary.scores for summary in summaries.values())]
        rows = []
        for task, summary in sorted(summaries.items()):
            cells = [format_spread(summary.scores.get(score), score) for score in shown]
            rows.append([self.row_name(task, self.session.row_name), *cells])
            of_task = baselines.get(task, NO_BASELINES)
            rows += [[self.row_name(task, row), *of_task.cells(row, shown)] for row in of_task.scores]
        return Table(self.title, ["", *(self.columns[score] for score in shown)], rows, notes)

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterable[str]:
        return ()

    def summary_parts(self, summaries: Summaries) -> dict[str, Any]:
        return {}

    def write_more(self, summaries: Summaries, stop: threading.Event) -> tuple[Sequence[Path], Sequence[str]]:
        """Write further files after the table; return their paths, and notices for the user."""
        return (), ()


def settings_in_words(session: Session) -> str:
    """Return the recipe, and what flags have changed in it."""
    recipe = session.recipe
    values = [
        f"{name} {str(value).lower() if isinstance(value, bool | str) else f'{value:g}'}"
        for name, value in session.overrides.items()
    ]
    of_size = f"; values for {recipe.size} models" if recipe.size else ""
    changed = f"; instead of its own: {', '.join(values)}" if values else ""
    return f"recipe {Path(recipe.name).name} ({recipe.description}{of_size}){changed}"


def schedules_in_words(benchmark: Benchmark) -> Iterator[str]:
    """Yield a line for each task of this call: rate and number of updates, and why there are so many."""
    for task in benchmark.tasks.values():
        if len(task.trials) > 1:
            yield f"{task.name}: {len(task.trials)} combinations of settings"
            continue
        settings, schedule = task.trials[0], task.trials[0].schedule(task.num_examples, task.carries_rest)
        epochs = f"{schedule.num_epochs} epoch{'' if schedule.num_epochs == 1 else 's'}"
        if schedule.repetitions > 1:
            epochs += f" ({settings.epochs}, repeated for {settings.min_updates:,} updates or more)"
        yield (
            f"{task.name}: learning rate {settings.lr:.3g}, {task.num_examples:,} examples in batches of "
            f"{settings.batch_size}, {epochs}, {schedule.total_updates:,} updates"
        )


def verdicts(benchmark: Benchmark, summaries: Summaries, baselines: Mapping[str, Baselines]) -> Iterator[str]:
    """Yield a line for each task that is not clearly better than a constant prediction, or worse than a linear model.

    Clearly: by more than the deviation over seeds, and than two standard errors of the constant prediction on this dev set.
    """
    for task, summary in summaries.items():
        of_task = baselines.get(task, NO_BASELINES)
        judged = (summary.best.main_score, *benchmark.judged_too)
        for score, (row, scores) in itertools.product(judged, of_task.scores.items()):
            if score not in scores:  # OUT may be another user's
                continue
            found = summary.scores[score]
            baseline = scores[score]
            margin = max(found.deviation or 0.0, 2 * standard_error(score, baseline, of_task.num_scored))
            if row == LINEAR and found.median < baseline:
                relation = f"below the {row} ({baseline:.1f})"
            elif row != LINEAR and found.median <= baseline + margin:
                relation = f"not clearly above the row {row} ({baseline:.1f}, and {margin:.1f} for chance)"
            else:
                continue
            advice = "try twice or half of the --lr, more updates (--min-updates), or more rows to train on"
            yield f"{benchmark.label(task)}: {score} {found.median:.1f} is {relation}: {advice}"
            break


def common_notes(
    benchmark: Benchmark, results: Sequence[RunResult], summaries: Summaries, baselines: Mapping[str, Baselines]
) -> Iterator[str]:
    """Yield the footnotes of every table: recipe, seeds, what chance does, selection by dev score, data."""
    session, labels = benchmark.session, {task: benchmark.label(task) for task in summaries}
    yield f"fine-tuning settings: {settings_in_words(session)}"
    counts = [summary.main.count for summary in summaries.values()]
    listed = ", ".join(f"{label} {count}" for label, count in zip(labels.values(), counts, strict=True))
    divisor = "; standard deviations divide by n - 1" if max(counts) > 1 else ""
    alone = "; one seed does not tell how much another one differs" if min(counts) == 1 else ""
    yield f"seeds: {f'{counts[0]} per task' if len(set(counts)) == 1 else listed}{divisor}{alone}"
    for task, summary in summaries.items():
        if num_scored := baselines.get(task, NO_BASELINES).num_scored:
            error = error_in_words(summary.best.main_score, summary.main.median, num_scored, benchmark.unit)
            advice = ": a difference of two models below twice that is weak evidence" if error else ""
            yield f"{labels[task]}: dev has {num_scored:,} {benchmark.unit}{error}{advice}"
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
    summaries: Summaries,
    baselines: Mapping[str, Baselines],
) -> list[Path]:
    """Write NAME.md, NAME.csv and NAME.json into OUT; return their paths."""
    checkpoint, stem = benchmark.session.checkpoint, benchmark.session.out / benchmark.name
    summary = {
        "benchmark": benchmark.name,
        "setup": setup,
        "tasks": {task: summary.as_dict() for task, summary in summaries.items()},
        "checkpoint": {"file": str(checkpoint.file), "num_updates": checkpoint.num_updates},
        "baselines": {task: asdict(of_task) for task, of_task in baselines.items()},
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


def export_notice(out: Path, best: RunResult | None, flags: str = "") -> list[str]:
    """Return the line that says how the best run of a table is exported, if its checkpoint is there; ``flags`` begin with a
    space."""
    if best is None or not (checkpoint := out / best.directory / best.checkpoint).is_file():
        return []
    return [f"to export the run that is best on dev: amos export {shlex.quote(str(checkpoint))} HF_DIR{flags}"]


def selection_flags(task: BenchmarkTask) -> list[str]:
    """Return the flags that select ``checkpoint_best.pt``; without validation where the last checkpoint is scored."""
    if not task.scores_best:
        return ["--disable-validation"]
    return ["--best-checkpoint-metric", task.main_score, "--maximize-best-checkpoint-metric"]


def batches(lengths: Sequence[int] | np.ndarray, stop: threading.Event) -> Iterator[list[int]]:
    """Yield indices of examples of similar length for evaluation, and show progress where that takes longer; raise
    :class:`Stopped` once ``stop`` is set."""
    with progress_bar(int(sum(lengths)), "predict", "token", delay=2) as bar:
        bar.leave = False
        for indices in batches_by_length(lengths, TOKENS_PER_BATCH):
            if stop.is_set():
                raise Stopped
            yield indices
            bar.update(sum(int(lengths[index]) for index in indices))
