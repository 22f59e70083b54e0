"""Results of fine-tuning: of one run, of the seeds and trials of a task, and of a whole OUT, which other commands read.

OUT/runs/TASK/[TRIAL/]seedN/result.json is a :class:`RunResult`. OUT/NAME.json, beside the table, has::

    {"benchmark": "glue", "setup": {"checkpoint_sha256": ..., "from_scratch": false, ...},
     "tasks": {"RTE": {"main_score": "accuracy", "scores": {"accuracy": {"median": 70.5, "deviation": 1.2, "count": 3}}}},
     "checkpoint": {"file": ..., "num_updates": ...}, "notes": [...],
     "runs": [{"task": "RTE", "trial": "", "seed": 1, "main_score": "accuracy", ...}, ...]}
"""

import dataclasses
import hashlib
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from amos_fairseq import strangers
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, write_text
from amos_fairseq.output.tables import MISSING, format_score
from amos_fairseq.process import version_of
from amos_fairseq.strangers import finite_number, plain_name, whole_number

RESULT_FILE = "result.json"
PAPER_RESULTS = Path(__file__).with_name("paper_results.yaml")
SCORE_RANGE = (-100, 100)  # percent; a correlation can be negative


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run; the fields are the keys of ``result.json``.

    Attributes:
        trial: name of the combination of hyperparameters if the task has several; otherwise empty.
        directory: relative to OUT.
        scores: in percent.
        epoch: number of epochs at the checkpoint that was scored.
        seconds: duration of the training without evaluation, summed over all parts of an interrupted run.
        start_sha256: of the checkpoint that the run started from; None for random weights.
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


def package_versions() -> dict[str, str]:
    names = ("amos_fairseq", "fairseq-fixed", "scikit-learn", "scipy", "seqeval", "torch")
    return {name: version_of(name) for name in names} | {"python": platform.python_version()}


def write_result(out: Path, result: RunResult) -> None:
    write_json(out / result.directory / RESULT_FILE, asdict(result))


def read_result(directory: Path) -> RunResult | None:
    """Return the result of a run; None if it is not finished."""
    content = read_optional_json(directory / RESULT_FILE)
    if content is None:
        return None
    try:
        return parse_result(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{directory / RESULT_FILE} is not the result of a run: delete it") from error


def parse_result(content: dict[str, Any]) -> RunResult:
    """Return the result; raise ``ValueError``, ``TypeError``, ``KeyError`` or ``AttributeError`` for anything else."""
    result = RunResult(**(content | {"notes": tuple(content.get("notes", ()))}))
    plain_name(f"{result.task} {result.trial}")
    finite_number(result.main)
    return result


def read_results(out: Path) -> list[RunResult]:
    """Return all finished runs in OUT, sorted by task, trial and seed."""
    files = sorted((out / "runs").glob(f"**/{RESULT_FILE}"))
    results = [result for file in files if (result := read_result(file.parent))]
    return sorted(results, key=lambda result: (result.task, result.trial, result.seed))


@dataclass(frozen=True)
class Spread:
    """Median of one score over seeds, as AMOS reports (section 4, "the median of five random seeds"), and standard deviation.

    The paper does not state which deviation it prints; this one is divided by n - 1, and None for a single seed.
    """

    median: float
    deviation: float | None
    count: int


def spread_of(values: Sequence[float]) -> Spread:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.median(values), deviation, len(values))


def format_spread(spread: Spread | None) -> str:
    return MISSING if spread is None else format_score(spread.median, spread.deviation)


@dataclass(frozen=True)
class TaskSummary:
    """The results of a task that the table shows: ``scores`` are those of the selected ``trial``, ``best`` is the run with the
    highest main score of all trials."""

    trial: str
    num_trials: int
    scores: dict[str, Spread]
    best: RunResult

    @property
    def main(self) -> Spread:
        return self.scores[self.best.main_score]

    def as_dict(self) -> dict[str, Any]:
        best = self.best
        return {
            "main_score": best.main_score,
            "scores": {name: asdict(spread) for name, spread in self.scores.items()},
            "settings": self.trial,
            "settings_tried": self.num_trials,
            "best_run": {"directory": best.directory, "seed": best.seed, best.main_score: best.main},
        }


def summarize(results: Sequence[RunResult]) -> dict[str, TaskSummary]:
    """Summarize each task by the trial with the highest median of the main score; the first one on a tie."""
    by_task: dict[str, dict[str, list[RunResult]]] = {}
    for result in results:
        by_task.setdefault(result.task, {}).setdefault(result.trial, []).append(result)
    summaries = {}
    for task, by_trial in by_task.items():
        trial = max(by_trial, key=lambda name: statistics.median(result.main for result in by_trial[name]))
        chosen = by_trial[trial]
        scores = {name: spread_of([result.scores[name] for result in chosen]) for name in chosen[0].scores}
        best = best_run([result for of_trial in by_trial.values() for result in of_trial])
        summaries[task] = TaskSummary(trial, len(by_trial), scores, best)
    return summaries


def summarize_divided(
    results: Sequence[RunResult], divided: dict[str, list[RunResult]]
) -> tuple[list[RunResult], dict[str, TaskSummary]]:
    """Summarize runs that have the scores of several tasks. ``divided``: directory of a run -> a result for each of its tasks.
    The trial and the best run of all tasks are those of the whole runs."""
    summaries = {}
    for task, whole in summarize(results).items():
        of_trial = [result for result in results if result.task == task and result.trial == whole.trial]
        chosen = summarize([of_task for result in of_trial for of_task in divided[result.directory]])
        best = {of_task.task: of_task for of_task in divided[whole.best.directory]}
        for name, summary in chosen.items():
            summaries[name] = dataclasses.replace(summary, best=best[name], num_trials=whole.num_trials)
    shown = [of_task for result in results for of_task in divided[result.directory]]
    return shown, summaries


def divide(result: RunResult, main_scores: dict[str, str]) -> list[RunResult]:
    """Return a result for each task of a run, whose scores are named "TASK SCORE"."""
    results = []
    for task, main_score in main_scores.items():
        prefix = f"{task} "
        scores = {name.removeprefix(prefix): score for name, score in result.scores.items() if name.startswith(prefix)}
        results.append(dataclasses.replace(result, task=task, main_score=main_score, scores=scores))
    return results


def best_run(results: Sequence[RunResult]) -> RunResult:
    """Return the result with the highest main score; the lowest seed on a tie."""
    return max(results, key=lambda result: (result.main, -result.seed))


def best_checkpoint(out: Path, best: RunResult) -> Path:
    """Return the checkpoint of a run (AMOS Table 5: "the best development set model"); refuse a missing one."""
    file = out / best.directory / best.checkpoint
    if not file.is_file():
        problem = f"{file}, the checkpoint of the best run of {best.task}, is missing"
        raise UserError(f"{problem}: delete {file.parent} and repeat the run")
    return file


def best_run_of(out: Path, task: str) -> RunResult | None:
    """Return the best finished run of a task in OUT; None without one."""
    summary = summarize([result for result in read_results(out) if result.task == task]).get(task)
    return summary.best if summary else None


@dataclass(frozen=True)
class Summary:
    """The content of ``OUT/NAME.json``.

    Attributes:
        benchmark: glue, squad, tagging, parsing or classification.
        setup: settings that all runs share.
        main_scores: name of the main score by task.
        spreads: of every score, by task and name.
        trials: the combination of hyperparameters that the table shows, by task.
        checkpoint: the fine-tuned checkpoint, as its path was when the benchmark ran.
    """

    file: Path
    benchmark: str
    setup: dict[str, Any]
    main_scores: dict[str, str]
    spreads: dict[str, dict[str, Spread]]
    trials: dict[str, str]
    runs: list[RunResult]
    checkpoint: Path
    num_updates: int
    notes: list[str]

    @property
    def from_scratch(self) -> bool:
        """Whether the weights of the checkpoint were replaced by random ones."""
        return bool(self.setup["from_scratch"])

    @property
    def folder_name(self) -> str:
        return self.file.absolute().parent.name

    @property
    def seeds(self) -> dict[str, list[float]]:
        """The main score of each run in percent, by task and, for a grid, its combination of hyperparameters."""
        seeds: dict[str, list[float]] = {}
        for run in self.runs:
            seeds.setdefault(f"{run.task} {run.trial}".strip(), []).append(run.main)
        return seeds

    def shown_runs(self, task: str) -> list[RunResult]:
        """Return the runs of a task that the table shows."""
        return [run for run in self.runs if (run.task, run.trial) == (task, self.trials.get(task))]


def parse_summary(file: Path, content: dict[str, Any], complaint: str) -> Summary:
    """Return the content of a summary; ``complaint``: the end of the message about any other content."""
    try:
        tasks = {plain_name(name): task for name, task in content["tasks"].items()}
        checkpoint, setup = content["checkpoint"], dict(content["setup"])
        setup["from_scratch"] = bool(setup["from_scratch"])
        runs = [parse_result(run) for run in content["runs"]]
        for run in runs:
            finite_number(run.main, *SCORE_RANGE)
        return Summary(
            file=file,
            benchmark=plain_name(content["benchmark"]),
            setup=setup,
            main_scores={name: plain_name(task["main_score"]) for name, task in tasks.items()},
            spreads={name: _spreads(task) for name, task in tasks.items()},
            trials={name: task.get("settings", "") for name, task in tasks.items()},
            runs=runs,
            checkpoint=Path(plain_name(checkpoint["file"], longest=4096)),
            num_updates=whole_number(checkpoint["num_updates"]),
            notes=[plain_name(note, longest=10_000) for note in content["notes"]],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} {complaint}") from error


def _spreads(task: dict[str, Any]) -> dict[str, Spread]:
    spreads = {}
    for name, values in task["scores"].items():
        in_percent = name.removesuffix("_mm") == task["main_score"]
        median, deviation = finite_number(values["median"], *(SCORE_RANGE if in_percent else ())), values["deviation"]
        if deviation is not None:
            finite_number(deviation, 0, *((200,) if in_percent else ()))
        spreads[plain_name(name)] = Spread(median, deviation, whole_number(values["count"]))
    return spreads


def read_summary(out: Path, name: str) -> Summary | None:
    """Return ``OUT/NAME.json``; None if it does not exist."""
    file = out / f"{name}.json"
    content = read_optional_json(file)
    if content is None:
        return None
    return parse_summary(file, content, f"is not a summary of amos {name}: repeat that command")


def paper_results() -> list[dict[str, Any]]:
    """Return the rows of ``--paper``."""
    return yaml.safe_load(PAPER_RESULTS.read_text(encoding="utf-8"))


def paper_squad_cells(paper: dict[str, Any], scores: Sequence[str]) -> list[str]:
    deviations = paper.get("deviations", {})
    return [format_score(paper["squad"].get(name), deviations.get(name)) for name in scores]


def read_optional_json(file: Path) -> dict[str, Any] | None:
    """Return the content; None if the file does not exist. A damaged file, or one without an object, is refused."""
    return strangers.read_json(file, "delete it and repeat the command that wrote it", optional=True)


def write_json(file: Path, content: Any) -> None:
    write_text(file, json_text(content))


def content_sha256(content: Any) -> str:
    """Return a fingerprint of plain values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()
