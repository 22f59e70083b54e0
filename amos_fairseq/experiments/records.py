"""Results of fine-tuning: of one run, of the seeds and trials of a task, and of a whole OUT, which other commands read.

Both files are records: JSON with ``sha256``, a fingerprint of its other entries. OUT/runs/TASK/[TRIAL/]seedN/result.json is a
:class:`RunResult`. OUT/NAME.json, beside the table, has::

    {"benchmark": "glue", "setup": {"checkpoint_sha256": ..., "from_scratch": false, ...},
     "tasks": {"RTE": {"main_score": "accuracy", "scores": {"accuracy": {"median": 70.5, "deviation": 1.2, "count": 3}}}},
     "baselines": {"RTE": {"num_scored": 277, "scores": {"most frequent class": {"accuracy": 52.7}}}},
     "checkpoint": {"file": ..., "num_updates": ...}, "notes": [...],
     "runs": [{"task": "RTE", "trial": "", "seed": 1, "main_score": "accuracy", ...}, ...], "sha256": ...}
"""

import dataclasses
import hashlib
import json
import math
import platform
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amos_fairseq import strangers
from amos_fairseq.errors import UserError
from amos_fairseq.files import file_sha256, json_text, write_text
from amos_fairseq.output.tables import MISSING, format_score
from amos_fairseq.output.terminal import say
from amos_fairseq.process import version_of
from amos_fairseq.strangers import finite_number, plain_name, whole_number

RESULT_FILE = "result.json"
# Percent; a correlation can be negative, and rounding makes 100.00000000000001 of a perfect one.
SCORE_RANGE = (-100.000001, 100.000001)
CORRELATIONS = ("matthews", "spearman", "pearson")
NOT_PERCENT = ("mse", "null_threshold")  # scores in the unit of the label, or of a model's outputs
LONGEST_NOTE = 10_000
MOVE_AWAY = "move it away and repeat the command that wrote it"
LABEL_FILES = ("task.json", "labels.txt")  # beside a checkpoint: what its outputs mean
# Paths that a file of a stranger may name: inside of OUT, and of the run's directory.
_PATHS = {"directory": r"runs(/(?!\.\.?(/|$))[^/]+)+", "checkpoint": r"checkpoint_\w+\.pt"}


def write_record(file: Path, content: dict[str, Any]) -> None:
    write_text(file, json_text(content | {"sha256": content_sha256(content)}))


def read_record(file: Path, advice: str, optional: bool = False) -> dict[str, Any] | None:
    """Return what :func:`write_record` wrote, or None if there is no file and it is ``optional``. A changed file is refused,
    with ``advice``."""
    content = strangers.read_json(file, advice, optional=optional)
    if content is not None and content.pop("sha256", None) != content_sha256(content):
        raise UserError(f"{file} was changed, or is of another version of this package: {advice}")
    return content


def content_sha256(content: Any) -> str:
    """Return a fingerprint of plain values that does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run; the fields are the keys of ``result.json``."""

    task: str
    trial: str  # name of the combination of hyperparameters if the task has several; otherwise empty
    seed: int
    directory: str  # relative to OUT
    main_score: str
    scores: dict[str, float]  # in percent, but for NOT_PERCENT
    checkpoint: str
    epoch: float  # number of epochs at the checkpoint that was scored
    seconds: float  # of training without evaluation, summed over all parts of an interrupted run
    identity: dict[str, Any]
    # As the checkpoint is kept, and as it was scored. Only the first one lacks the state of the optimizer; a kill at the moment
    # when it replaces the second leaves the second.
    checkpoint_sha256: list[str]
    files: dict[str, str]  # sha256 of labels, predictions and other files of the result, by their path in ``directory``
    versions: dict[str, str]
    notes: list[str]

    @property
    def main(self) -> float:
        return self.scores[self.main_score]


def parse_result(content: Any) -> RunResult:
    """Return the result of a run; raise ``ValueError`` unless each field has a value that a run can have."""
    if not isinstance(content, dict) or content.keys() != RunResult.__dataclass_fields__.keys():
        raise ValueError("it has other fields than the result of a run")
    objects = [strangers.field(content, name, dict) for name in ("identity", "files", "versions")]
    lists = [strangers.field(content, name, list) for name in ("checkpoint_sha256", "notes")]
    names = [content["task"], strangers.field(content, "trial", str) or "none", content["main_score"]]
    for text in (*names, *objects[1].values(), *objects[2].values(), *lists[0], *lists[1]):
        plain_name(text, longest=LONGEST_NOTE)
    for name, pattern in _PATHS.items():
        if not re.fullmatch(pattern, plain_name(content[name])):
            raise ValueError(f"{name} is {content[name]!r:.60}")
    if content["main_score"] not in finite_scores(content, "scores"):
        raise ValueError(f"the main score {content['main_score']:.60} is not among the scores")
    whole_number(content["seed"])
    finite_number(content["epoch"], 0)
    finite_number(content["seconds"])
    return RunResult(**content)


def finite_scores(content: dict[str, Any], name: str) -> dict[str, float]:
    """Return ``content[name]``; raise ``ValueError`` unless it has scores that a model can have."""
    scores = strangers.field(content, name, dict)
    for score, value in scores.items():
        finite_number(value, *(() if plain_name(score).endswith(NOT_PERCENT) else SCORE_RANGE))
    return scores


def package_versions() -> dict[str, str]:
    names = ("amos_fairseq", "fairseq-fixed", "scikit-learn", "scipy", "seqeval", "torch")
    return {name: version_of(name) for name in names} | {"python": platform.python_version()}


def write_result(out: Path, result: RunResult) -> None:
    """Write ``result.json``; refuse a result that would be refused when it is read, such as scores that are not finite."""
    try:
        parse_result(asdict(result))
    except ValueError as error:
        raise UserError(
            f"{out / result.directory} has no result ({error}); if the scores are not finite, give a lower --lr"
        ) from error
    write_record(out / result.directory / RESULT_FILE, asdict(result))


def read_result(directory: Path) -> RunResult | None:
    """Return the result of a run; None if it is not finished."""
    advice = f"move {directory} away and repeat the command that wrote it"
    content = read_record(directory / RESULT_FILE, advice, optional=True)
    try:
        return None if content is None else parse_result(content)
    except ValueError as error:
        raise UserError(f"{directory / RESULT_FILE} is not the result of a run ({error}): {advice}") from error


def read_results(out: Path) -> list[RunResult]:
    """Return all finished runs in OUT, sorted by task, trial and seed."""
    results = []
    for file in sorted((out / "runs").glob(f"**/{RESULT_FILE}")):
        result = read_result(file.parent)
        place = Path("runs", result.task, result.trial, f"seed{result.seed}")
        if not (file.parent.relative_to(out) == place == Path(result.directory)):
            raise UserError(f"{file} is the result of {place}: move {file.parent} away and repeat its command")
        results.append(result)
    return sorted(results, key=lambda result: (result.task, result.trial, result.seed))


def checked_file(directory: Path, result: RunResult, name: str) -> Path:
    """Return the path of a file of a run; refuse one with another content than it had when the run ended."""
    file, advice = directory / name, f"restore it, or move {directory} away and repeat the command that wrote it"
    if not file.is_file():
        raise UserError(f"{file} is missing: {advice}")
    known = result.checkpoint_sha256 if name == result.checkpoint else [result.files.get(name)]
    if known == [None]:
        raise UserError(f"{file} is no file of the run: move it away, or give another directory")
    if file_sha256(file) not in known:
        raise UserError(f"{file} was changed after the run: {advice}")
    return file


def best_checkpoint(out: Path, best: RunResult) -> Path:
    """Return the checkpoint of a run (AMOS Table 5: "the best development set model"); refuse another one, and other labels."""
    for name in best.files:
        if name.rpartition("/")[2] in LABEL_FILES:
            checked_file(out / best.directory, best, name)
    return checked_file(out / best.directory, best, best.checkpoint)


def check_scored(checkpoint: Path) -> None:
    """Refuse a checkpoint in the place of the one that the ``result.json`` beside it is of."""
    result = read_result(checkpoint.parent)
    if result is not None and result.checkpoint == checkpoint.name:
        checked_file(checkpoint.parent, result, checkpoint.name)


def best_run(results: Sequence[RunResult]) -> RunResult:
    """Return the result with the highest main score; the lowest seed on a tie."""
    return max(results, key=lambda result: (result.main, -result.seed))


def best_run_of(out: Path, task: str) -> RunResult | None:
    """Return the best finished run of a task in OUT; None without one."""
    results = [result for result in read_results(out) if result.task == task]
    return best_run(results) if results else None


def best_model(out: Path, command: str, best: RunResult | None) -> Path:
    """Return the checkpoint of the best run of a command in OUT, for its --predict, and say which it is; refuse None."""
    if best is None:
        raise UserError(f"{out} has no finished run of amos {command}: give the --out of that command as --checkpoint")
    say(f"{best.directory} is the best run on dev ({best.main_score} {best.main:.1f})", command)
    return best_checkpoint(out, best)


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


def check_scores(results: Sequence[RunResult], names: Collection[str]) -> None:
    """Refuse results of a task with other scores than these, which somebody else has written."""
    for result in results:
        if result.scores.keys() != set(names) or result.main_score != results[0].main_score:
            found, expected = ", ".join(result.scores), ", ".join(names)
            raise UserError(f"{result.directory} has the scores {found:.200}, not {expected:.200}: {MOVE_AWAY}")


def spreads_of(results: Sequence[RunResult]) -> dict[str, Spread]:
    """Return the spread of each score over the seeds of a trial."""
    check_scores(results, results[0].scores)
    return {name: spread_of([result.scores[name] for result in results]) for name in results[0].scores}


def format_spread(spread: Spread | None, score: str = "") -> str:
    """Return the cell of a score: percent with one decimal, or a mean squared error with three digits."""
    if spread is None:
        return MISSING
    if score != "mse":
        return format_score(spread.median, spread.deviation)
    return f"{spread.median:.3g}" if spread.deviation is None else f"{spread.median:.3g} ± {spread.deviation:.2g}"


def standard_error(score: str, value: float, num_scored: int) -> float:
    """Return by how much chance moves a score, in percent, on a dev set of ``num_scored`` examples.

    It is that of a share of right examples, sqrt(p (1 - p) / n), to which F1 is compared too, or of a correlation,
    (1 - r^2) / sqrt(n).
    """
    share = value / 100
    if score in CORRELATIONS:
        return 100 * (1 - share**2) / math.sqrt(num_scored)
    share = min(max(share, 0.0), 1.0)
    return 100 * math.sqrt(share * (1 - share) / num_scored)


def error_in_words(score: str, value: float, num_scored: int, unit: str) -> str:
    """Return "; standard error of accuracy about 1.3"; empty for other kinds of scores, and for perfect ones."""
    error = standard_error(score, value, num_scored)
    if score not in ("accuracy", *CORRELATIONS) or error == 0:
        return ""
    about = "at least" if unit == "words" else "about"  # the words of a sentence are not independent
    return f"; standard error of {score} {about} {error:.1f}"


@dataclass(frozen=True)
class Baselines:
    """Scores without fine-tuning on a dev set of ``num_scored`` rows or words, by the name of their row and the score.

    ``data_sha256``: of the data that they were fitted to and scored on.
    """

    num_scored: int
    scores: dict[str, dict[str, float]]
    data_sha256: str = ""

    def cells(self, row: str, shown: Sequence[str]) -> list[str]:
        scores = self.scores[row]
        return [format_spread(Spread(scores[name], None, 1) if name in scores else None, name) for name in shown]


NO_BASELINES = Baselines(0, {})


def parse_baselines(content: dict[str, Any]) -> dict[str, Baselines]:
    """Return the baselines by task; raise ``ValueError`` for other values than these can have."""
    baselines = {}
    for task, saved in strangers.field(content, "baselines", dict).items():
        rows = strangers.field(saved, "scores", dict)
        scores = {plain_name(row): finite_scores(rows, row) for row in rows}
        sha256, count = plain_name(saved.get("data_sha256")), whole_number(saved.get("num_scored"), low=1)
        baselines[plain_name(task)] = Baselines(count, scores, sha256)
    return baselines


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


Summaries = Mapping[str, TaskSummary]  # by task


def summarize(results: Sequence[RunResult]) -> dict[str, TaskSummary]:
    """Summarize each task by the trial with the highest median of the main score; the first one on a tie."""
    by_task: dict[str, dict[str, list[RunResult]]] = {}
    for result in results:
        by_task.setdefault(result.task, {}).setdefault(result.trial, []).append(result)
    summaries = {}
    for task, by_trial in by_task.items():
        of_task = [result for of_trial in by_trial.values() for result in of_trial]
        check_scores(of_task, of_task[0].scores)
        trial = max(by_trial, key=lambda name: statistics.median(result.main for result in by_trial[name]))
        summaries[task] = TaskSummary(trial, len(by_trial), spreads_of(by_trial[trial]), best_run(of_task))
    return summaries


def summarize_divided(
    results: Sequence[RunResult], divide: Callable[[RunResult], list[RunResult]]
) -> tuple[list[RunResult], dict[str, TaskSummary]]:
    """Summarize runs that have the scores of several tasks. ``divide``: gives a result for each task of a run.
    The trial and the best run of all tasks are those of the whole runs."""
    summaries = {}
    for task, whole in summarize(results).items():
        of_trial = [result for result in results if result.task == task and result.trial == whole.trial]
        chosen = summarize([of_task for result in of_trial for of_task in divide(result)])
        best = {of_task.task: of_task for of_task in divide(whole.best)}
        for name, summary in chosen.items():
            summaries[name] = dataclasses.replace(summary, best=best[name], num_trials=whole.num_trials)
    return [of_task for result in results for of_task in divide(result)], summaries


def divide(result: RunResult, main_scores: dict[str, str]) -> list[RunResult]:
    """Return a result for each task of a run, whose scores are named "TASK SCORE"."""
    results = []
    for task, main_score in main_scores.items():
        prefix = f"{task} "
        scores = {name.removeprefix(prefix): score for name, score in result.scores.items() if name.startswith(prefix)}
        if main_score not in scores:
            raise UserError(f"{result.directory} has no score {prefix}{main_score}: {MOVE_AWAY}")
        results.append(dataclasses.replace(result, task=task, main_score=main_score, scores=scores))
    return results


@dataclass(frozen=True)
class Summary:
    """What other commands read of ``OUT/NAME.json``."""

    file: Path
    benchmark: str  # glue, squad, tagging, parsing or classification
    setup: dict[str, Any]  # settings that all runs share
    trials: dict[str, str]  # the combination of hyperparameters that the table shows, by task
    runs: list[RunResult]
    checkpoint: Path  # as the path of the fine-tuned one was when the benchmark ran
    num_updates: int
    baselines: dict[str, Baselines]
    notes: list[str]

    @property
    def weights(self) -> str:
        """What was fine-tuned: random weights have only the architecture of the checkpoint."""
        if self.from_scratch:
            return "random weights"
        return f"{self.num_updates:,} updates" if self.num_updates else "as imported"

    @property
    def from_scratch(self) -> bool:
        return self.setup["from_scratch"]

    @property
    def folder_name(self) -> str:
        return self.file.absolute().parent.name

    @property
    def spreads(self) -> dict[str, dict[str, Spread]]:
        """The spread of every score that the table shows, by task and name."""
        return {task: spreads_of(self.shown_runs(task)) for task in self.trials}

    @property
    def main_scores(self) -> dict[str, str]:
        return {task: self.shown_runs(task)[0].main_score for task in self.trials}

    def shown_runs(self, task: str) -> list[RunResult]:
        """Return the runs of a task that the table shows."""
        return [run for run in self.runs if (run.task, run.trial) == (task, self.trials.get(task))]


def read_summary(file: Path, advice: str, optional: bool = False) -> Summary | None:
    """Return ``OUT/NAME.json``, or None if there is no file and it is ``optional``. A file that was changed is refused with
    ``advice``."""
    content = read_record(file, advice, optional)
    if content is None:
        return None
    try:
        setup, checkpoint = strangers.field(content, "setup", dict), strangers.field(content, "checkpoint", dict)
        strangers.field(setup, "from_scratch", bool)
        plain_name(setup.get("arch", "none"))
        notes = [plain_name(note, longest=LONGEST_NOTE) for note in strangers.field(content, "notes", list)]
        tasks = strangers.field(content, "tasks", dict).items()
        summary = Summary(
            file=file,
            benchmark=plain_name(content.get("benchmark")),
            setup=setup,
            trials={plain_name(name): strangers.field(task, "settings", str) for name, task in tasks},
            runs=list(map(parse_result, strangers.field(content, "runs", list))),
            checkpoint=Path(plain_name(checkpoint.get("file"), longest=4096)),
            num_updates=whole_number(checkpoint.get("num_updates")),
            baselines=parse_baselines(content),
            notes=notes,
        )
        if not all(map(summary.shown_runs, summary.trials)):
            raise ValueError("the runs of a task are missing")
    except ValueError as error:
        raise UserError(f"{file} holds no results of fine-tuning ({error}): {advice}") from error
    return summary
