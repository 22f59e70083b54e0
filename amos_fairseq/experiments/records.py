"""Results of fine-tuning as files in OUT, for other commands, too. Nothing here imports PyTorch or fairseq.

OUT/runs/TASK/IDENTITY/seedN/result.json is a :class:`RunResult`. OUT/NAME.json, beside the table, is a :class:`Summary`.
"""

import dataclasses
import hashlib
import json
import math
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, write_text
from amos_fairseq.output.terminal import MISSING, format_score, say
from amos_fairseq.process import version_of

FORMAT = 1  # of all records
RESULT_FILE, SCORES_OF_TEST = "result.json", "scores.test.json"  # of a run, in its folder
LINEAR = "linear"  # the trial that fits a linear model to frozen states
ERROR = "_error"  # ends the name of a score that is the standard error of another

T = TypeVar("T")


def write_record(file: Path, content: Mapping[str, Any]) -> None:
    write_text(file, json_text({"format": FORMAT, **content}))


def read_record(file: Path, kind: Callable[..., T], what: str, command: str) -> T | None:
    """Return ``kind(**content)`` of what :func:`write_record` wrote, or None if there is no file; ``what`` it is, and the
    ``command`` that writes it, are for the message."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError("another format")
        return kind(**content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{file} is not readable as {what}: write it again with {command}") from error


def content_sha256(content: Any) -> str:
    """Return a fingerprint of plain values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run; the fields are the keys of ``result.json``."""

    task: str
    trial: str  # name of the combination of hyperparameters if the command has several; otherwise empty
    seed: int
    identity: str  # first 8 digits of the sha256 of ``settings``
    directory: str  # relative to OUT
    main_score: str
    scores: dict[str, float]  # in percent, but for a mean squared error and a threshold
    checkpoint: str
    epoch: float  # number of epochs at the checkpoint that was scored
    seconds: float  # of training without evaluation, summed over all parts of an interrupted run
    settings: dict[str, Any]  # all that determines the result but the seed, such as the sha256 of checkpoint and data
    keeps_checkpoints: bool  # with --keep-checkpoints
    versions: dict[str, str]
    notes: list[str]

    @property
    def main(self) -> float:
        return self.scores[self.main_score]

    def checkpoint_in(self, out: Path) -> Path:
        return out / self.directory / self.checkpoint


def package_versions() -> dict[str, str]:
    names = ("amos_fairseq", "fairseq-fixed", "scikit-learn", "scipy", "torch")
    return {name: version_of(name) for name in names} | {"python": platform.python_version()}


def write_result(out: Path, result: RunResult) -> None:
    """Write ``result.json``; refuse scores that are not finite, because the training diverged."""
    file = out / result.directory / RESULT_FILE
    if not all(map(math.isfinite, result.scores.values())):
        raise UserError(f"{file} is not written: the scores {result.scores} are not finite: give a lower --lr")
    write_record(file, asdict(result))


def read_result(directory: Path) -> RunResult | None:
    """Return the result of a run; None if it is not finished."""
    command = "its command, after you have removed it"
    return read_record(directory / RESULT_FILE, RunResult, "the result of a run", command)


def in_order(results: Iterable[RunResult]) -> list[RunResult]:
    return sorted(results, key=lambda result: (result.task, result.trial, result.seed, result.identity))


def preference(result: RunResult) -> float:
    """Return the main score, of a linear model without two of its standard errors: where dev is small, chance would choose it
    before a trained model that is better on other rows (docs/classification.md)."""
    return result.main - 2 * result.scores.get(result.main_score + ERROR, 0.0) * (result.trial == LINEAR)


def best_run(results: Sequence[RunResult]) -> RunResult:
    """Return the preferred result; the lowest seed on a tie."""
    return max(results, key=lambda result: (preference(result), -result.seed))


@dataclass(frozen=True)
class Spread:
    """Median of one score over seeds, as AMOS reports (section 4, "the median of five random seeds"), and standard deviation.

    The paper does not state which deviation it prints; this one is divided by n - 1, and None for a single seed.
    """

    median: float
    deviation: float | None
    count: int


def spread_of(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def spreads_of(results: Sequence[RunResult]) -> dict[str, Spread]:
    return {name: spread_of([result.scores[name] for result in results]) for name in results[0].scores}


def format_spread(spread: Spread | None, score: str = "") -> str:
    """Return the cell of a score: percent with one decimal, or a mean squared error with three digits."""
    if spread is None:
        return MISSING
    if score != "mse":
        return format_score(spread.median, spread.deviation)
    return f"{spread.median:.3g}" if spread.deviation is None else f"{spread.median:.3g} ± {spread.deviation:.2g}"


@dataclass(frozen=True)
class ConstantScores:
    """Scores of predictions that do not depend on the input, on a dev set of ``num_scored`` rows or words, by the name of their
    row and the score."""

    num_scored: int
    scores: dict[str, dict[str, float]]

    def cells(self, row: str, shown: Sequence[str]) -> list[str]:
        scores = self.scores[row]
        return [format_spread(Spread(scores[name], None, 1) if name in scores else None, name) for name in shown]


NO_CONSTANTS = ConstantScores(0, {})


@dataclass(frozen=True)
class TaskSummary:
    """The results of a task that the table shows: ``scores`` are those of the selected ``trial``, of ``num_trials`` that were
    trained; ``best`` is the preferred run of all trials; ``beside`` has the scores of the linear model where
    it is not the selected trial, or else those of the best trained one."""

    main_score: str
    trial: str
    num_trials: int
    scores: dict[str, Spread]
    best: RunResult
    beside: dict[str, dict[str, Spread]] = field(default_factory=dict)

    @classmethod
    def of_record(
        cls, scores: dict[str, Any], best: dict[str, Any], beside: dict[str, Any], **others: Any
    ) -> "TaskSummary":
        def read(spreads: dict[str, Any]) -> dict[str, Spread]:
            return {name: Spread(**spread) for name, spread in spreads.items()}

        more = {trial: read(spreads) for trial, spreads in beside.items()}
        return cls(scores=read(scores), best=RunResult(**best), beside=more, **others)

    @property
    def main(self) -> Spread:
        return self.scores[self.main_score]


Summaries = Mapping[str, TaskSummary]  # by task


def summarize(results: Sequence[RunResult]) -> dict[str, TaskSummary]:
    """Summarize each task by the trial with the highest median of the main score, the first one on a tie; by the linear model
    only if it is the best run."""
    by_task: dict[str, dict[str, list[RunResult]]] = {}
    for result in results:
        by_task.setdefault(result.task, {}).setdefault(result.trial, []).append(result)
    summaries = {}
    for task, by_trial in by_task.items():
        best = best_run([result for trial_results in by_trial.values() for result in trial_results])
        medians = {name: statistics.median(map(preference, by_trial[name])) for name in by_trial}
        # A linear model has one run, which is compared with the best one of the others.
        order = sorted(by_trial, key=lambda name: (name == LINEAR != best.trial, -medians[name]))
        trained = [name for name in order if name != LINEAR]
        beside = trained[:1] if order[0] == LINEAR else [name for name in order if name == LINEAR]
        scores, more = spreads_of(by_trial[order[0]]), {name: spreads_of(by_trial[name]) for name in beside}
        summaries[task] = TaskSummary(best.main_score, order[0], len(trained), scores, best, more)
    return summaries


def summarize_divided(
    results: Sequence[RunResult], divide: Callable[[RunResult], list[RunResult]]
) -> tuple[list[RunResult], dict[str, TaskSummary]]:
    """Summarize runs that have the scores of several tasks. ``divide``: gives a result for each task of a run.
    The trial and the best run of all tasks are those of the whole runs."""
    summaries = {}
    for task, whole in summarize(results).items():
        shown = [result for result in results if result.task == task and result.trial == whole.trial]
        best = {part.task: part for part in divide(whole.best)}
        for name, summary in summarize([part for result in shown for part in divide(result)]).items():
            summaries[name] = dataclasses.replace(summary, best=best[name], num_trials=whole.num_trials)
    return [part for result in results for part in divide(result)], summaries


def divide(result: RunResult, main_scores: Mapping[str, str]) -> list[RunResult]:
    """Return a result for each task of a run, whose scores are named "TASK SCORE"."""
    parts = []
    for task, main_score in main_scores.items():
        prefix = f"{task} "
        scores = {name.removeprefix(prefix): score for name, score in result.scores.items() if name.startswith(prefix)}
        parts.append(dataclasses.replace(result, task=task, main_score=main_score, scores=scores))
    return parts


@dataclass(frozen=True)
class Summary:
    """``OUT/NAME.json``: the table of the last command in OUT, and the runs that it is made of.

    Attributes:
        benchmark: glue, squad, tagging, parsing or classification.
        checkpoint: what was fine-tuned: file, as its path was when the command ran, sha256, arch, num_updates, from_scratch.
        average: of the main scores, with its name, where a table has one.
        details: further tables: title, columns, rows and notes.
    """

    benchmark: str
    checkpoint: dict[str, Any]
    tasks: dict[str, TaskSummary]
    notes: list[str]
    runs: list[RunResult]
    average: dict[str, Any] | None = None
    details: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of_record(cls, tasks: dict[str, Any], runs: list[dict[str, Any]], **others: Any) -> "Summary":
        summaries = {name: TaskSummary.of_record(**task) for name, task in tasks.items()}
        return cls(tasks=summaries, runs=[RunResult(**run) for run in runs], **others)

    @property
    def save_dir(self) -> Path:
        """The folder of the checkpoint that was fine-tuned."""
        return Path(self.checkpoint["file"]).parent

    @property
    def weights(self) -> str:
        """What was fine-tuned: random weights have only the architecture of the checkpoint."""
        if self.checkpoint["from_scratch"]:
            return "random weights"
        updates = self.checkpoint["num_updates"]
        return f"{updates:,} updates" if updates else "as imported"


def read_summary(out: Path, name: str, command: str) -> Summary | None:
    """Return ``OUT/NAME.json``, which ``command`` writes; None if there is no file."""
    return read_record(out / f"{name}.json", Summary.of_record, "a table of results", command)


def best_runs(out: Path, name: str, command: str) -> dict[str, RunResult]:
    """Return the selected run of each task of the last ``command`` in OUT, for its --predict, and say which they are."""
    summary = read_summary(out, name, command)
    if summary is None:
        raise UserError(f"{out} has no {name}.json: give the --out of {command}, once it has ended, as --checkpoint")
    best = {task: task_summary.best for task, task_summary in summary.tasks.items()}
    for directory, run in {run.directory: run for run in best.values()}.items():
        say(f"{directory} was selected on dev ({run.main_score} {run.main:.1f})", command.partition(" ")[2])
    return best


def best_checkpoint(path: Path) -> Path:
    """Return the checkpoint of the selected run, of an OUT with one; any other path as it is."""
    for name, command in (("classification", "amos classify"), ("tagging", "amos tag")):
        summary = read_summary(path, name, command) if (path / "runs").is_dir() else None
        best = {task.best.checkpoint_in(path) for task in summary.tasks.values()} if summary else ()
        if len(best) == 1:
            return best.pop()
    return path
