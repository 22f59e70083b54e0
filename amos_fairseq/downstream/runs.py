"""The runs of a benchmark: which ones to execute, the directory of each, and its result.

OUT/NAME.setup.json                         the settings that all results of a benchmark in OUT share
OUT/runs/TASK/[TRIAL/]seedN/run.json        the identity of a run, which protects the directory from other runs
                            result.json     the result of a finished run
"""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from amos_fairseq import strangers
from amos_fairseq.downstream.recipes import Hyperparameters
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import json_text, write_text
from amos_fairseq.versions import version_of

IDENTITY_FILE = "run.json"
RESULT_FILE = "result.json"
LOG_FILE = "train.log"


@dataclass(frozen=True)
class BenchmarkTask:
    """A task of a benchmark.

    Attributes:
        name: the name in directories and tables.
        num_examples: number of training examples; it determines the number of updates.
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
        """Whether a recipe scores the best checkpoint, so that the dev set is needed after each epoch."""
        return any(trial.checkpoint == "best" for trial in self.trials)


@dataclass(frozen=True)
class TaskRun:
    """One fine-tuning run: a task, a trial and a seed.

    Attributes:
        trial: name of the combination of hyperparameters if the task has several; otherwise empty.
        finetune_from: checkpoint that provides the encoder; None for random weights.
        identity: everything that determines the result, as plain values. Two runs are the same if these are equal.
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
        return " ".join(part for part in (self.task.name, self.trial, f"seed {self.seed}") if part)

    @property
    def total_updates(self) -> int:
        return self.hyperparameters.total_updates(self.task.num_examples, self.task.carries_rest)

    @property
    def num_epochs(self) -> int:
        return self.hyperparameters.num_epochs(self.task.num_examples, self.task.carries_rest)

    @property
    def updates_per_epoch(self) -> float:
        return self.hyperparameters.updates_per_epoch(self.task.num_examples, self.task.carries_rest)

    def check_directory(self) -> None:
        """Raise :class:`UserError` if the directory holds another run."""
        found = read_optional_json(self.directory / IDENTITY_FILE)
        if found is not None and found != self.identity:
            difference = first_difference(found, self.identity)
            raise UserError(
                f"{self.directory} holds another run ({difference}): give another --out, or delete that directory"
            )

    def create_directory(self) -> None:
        """Create the directory and store the run's identity in it."""
        self.check_directory()
        self.directory.mkdir(parents=True, exist_ok=True)
        write_json(self.directory / IDENTITY_FILE, self.identity)


@dataclass(frozen=True)
class Failure:
    """A run without a result, and the reason."""

    run: TaskRun
    reason: str

    @property
    def log(self) -> Path:
        return self.run.directory / LOG_FILE


def plan_runs(
    tasks: Iterable[BenchmarkTask], seeds: Sequence[int], out: Path, finetune_from: Path | None, origin: dict[str, Any]
) -> list[TaskRun]:
    """Return every run of the tasks. Seeds vary fastest, then trials, so that each task has a result early.

    Args:
        finetune_from: checkpoint of all runs; None for random weights.
        origin: what else determines the result: checkpoint, precision, intermediate task.
    """
    runs = []
    for task in tasks:
        for settings in task.trials:
            trial, values = trial_name(settings, task.trials), settings.as_dict()
            for seed in seeds:
                identity = origin | {"task": task.name, "seed": seed, "settings": values}
                identity |= {"data_sha256": task.data_sha256, "rows": task.num_examples}
                directory = out / "runs" / task.name / trial / f"seed{seed}"
                runs.append(TaskRun(task, settings, trial, seed, finetune_from, directory, identity))
    return runs


def trial_name(hyperparameters: Hyperparameters, trials: Sequence[Hyperparameters]) -> str:
    """Return the values in which the trials differ, such as ``epochs3-lr2e-05``."""
    own, others = hyperparameters.as_dict(), [trial.as_dict() for trial in trials]
    return "-".join(f"{name}{value}" for name, value in own.items() if any(o[name] != value for o in others))


def claim_output_directory(out: Path, name: str, setup: dict[str, Any]) -> None:
    """Create OUT, or check that its results have the same setup: one table shows one checkpoint and one recipe.

    Raises:
        UserError: OUT holds results of another setup, or cannot be written.
    """
    found = read_setup(out, name)
    if found is not None:
        refuse_difference(out, found, setup)
    with explain_os_errors(f"{out} cannot be written", ": give another --out"):
        out.mkdir(parents=True, exist_ok=True)
        write_json(setup_file(out, name), setup)


def check_setup(out: Path, name: str, part: dict[str, Any]) -> None:
    """Raise :class:`UserError` if results in OUT differ in this part of their setup: a check before any work."""
    found = read_setup(out, name)
    if found is not None:
        refuse_difference(out, {key: found.get(key) for key in part}, part)


def read_setup(out: Path, name: str) -> dict[str, Any] | None:
    """Return the settings that all results of a benchmark in OUT share; None if there are no results."""
    return read_optional_json(setup_file(out, name))


def setup_file(out: Path, name: str) -> Path:
    return out / f"{name}.setup.json"


def refuse_difference(out: Path, found: dict[str, Any], given: dict[str, Any]) -> None:
    if found != given:
        raise UserError(
            f"{out} holds results with other settings ({first_difference(found, given)}): give another --out"
        )


def first_difference(found: dict[str, Any], given: dict[str, Any], prefix: str = "") -> str:
    """Return the first setting that differs and its two values, such as "recipe: amos there, electra here"."""
    for name in sorted(found.keys() | given.keys()):
        one, other = found.get(name), given.get(name)
        if one != other and isinstance(one, dict) and isinstance(other, dict):
            return first_difference(one, other, f"{name} ")
        if one != other:
            return f"{prefix}{name}: {_abbreviated(one)} there, {_abbreviated(other)} here"
    return "nothing differs"


def _abbreviated(value: Any) -> str:
    """Shorten a sha256 to its beginning."""
    text = str(value)
    return f"{text[:12]}..." if len(text) == 64 else text


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run; the fields are the keys of ``result.json``, where ``trial`` is called ``point``.

    Attributes:
        directory: relative to OUT.
        scores: in percent.
        checkpoint: name of the file that was scored.
        epoch: number of epochs at the checkpoint that was scored.
        seconds: duration of the training without evaluation, summed over all parts of an interrupted run.
        start_sha256: of the checkpoint that the run started from; None for random weights.
        notes: footnotes about the data.
    """

    task: str
    trial: str
    seed: int
    directory: str
    main_score: str
    scores: dict[str, float]
    checkpoint: str
    epoch: float
    seconds: float
    start_sha256: str | None
    identity: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> float:
        return self.scores[self.main_score]

    def as_dict(self) -> dict[str, Any]:
        return {"point" if name == "trial" else name: value for name, value in dataclasses.asdict(self).items()}


def write_result(out: Path, result: RunResult) -> None:
    write_json(out / result.directory / RESULT_FILE, result.as_dict())


def read_result(directory: Path) -> RunResult | None:
    """Return the result of a run, or None if it is not finished. Raise :class:`UserError` for a damaged file."""
    content = read_optional_json(directory / RESULT_FILE)
    if content is None:
        return None
    try:
        return parse_result(content)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{directory / RESULT_FILE} is not the result of a run: delete it to score the run again"
        ) from error


def parse_result(content: dict[str, Any]) -> RunResult:
    """Return the result that :meth:`RunResult.as_dict` describes; raise ``TypeError``, ``KeyError`` or ``AttributeError`` for
    anything else."""
    values = {"trial" if name == "point" else name: value for name, value in content.items()}
    result = RunResult(**(values | {"notes": tuple(values.get("notes", ()))}))
    result.main + 0.0  # a number
    return result


def read_results(out: Path) -> list[RunResult]:
    """Return all finished runs in OUT, sorted by task, trial and seed."""
    files = sorted((out / "runs").glob(f"**/{RESULT_FILE}"))
    results = [result for file in files if (result := read_result(file.parent))]
    return sorted(results, key=lambda result: (result.task, result.trial, result.seed))


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that determine a result."""
    own = {name: version_of(name) for name in ("amos_fairseq", "fairseq-fixed", "scikit-learn", "scipy", "seqeval")}
    return own | {"python": platform.python_version(), "torch": torch.__version__}


def read_optional_json(file: Path) -> dict[str, Any] | None:
    """Return the content, or None if the file does not exist. Raise :class:`UserError` for a damaged file or no object."""
    return strangers.read_json(file, "delete it and repeat the command that wrote it", optional=True)


def write_json(file: Path, content: Any) -> None:
    write_text(file, json_text(content))


def content_sha256(content: Any) -> str:
    """Return a fingerprint of plain values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()
