"""Statistics over seeds, the papers' results, and reading the summary ``OUT/NAME.json`` of another benchmark."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from amos_fairseq.downstream.runs import RunResult, read_optional_json
from amos_fairseq.errors import UserError
from amos_fairseq.output.tables import MISSING, format_score
from amos_fairseq.summary_file import Spread, Summary, parse_summary

PAPER_RESULTS = Path(__file__).with_name("paper_results.yaml")


def spread_of(values: Sequence[float]) -> Spread:
    """Raise ``statistics.StatisticsError`` if there are no values."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.median(values), deviation, len(values))


@dataclass(frozen=True)
class TaskSummary:
    """The results of a task that the table shows.

    Attributes:
        trial: the selected combination of hyperparameters; empty if there is only one.
        num_trials: number of trials that have results.
        scores: spread of every score over the seeds of the selected trial.
        best: the run with the highest main score of all trials.
    """

    task: str
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
        best = best_run([result for own in by_trial.values() for result in own])
        summaries[task] = TaskSummary(task, trial, len(by_trial), scores, best)
    return summaries


def best_run(results: Sequence[RunResult]) -> RunResult:
    """Return the result with the highest main score; the lowest seed on a tie."""
    return max(results, key=lambda result: (result.main, -result.seed))


def best_checkpoint(out: Path, summary: TaskSummary) -> Path:
    """Return the checkpoint of the run with the best dev score (AMOS Table 5: "the best development set model").

    Raises:
        UserError: the file is missing.
    """
    file = out / summary.best.directory / summary.best.checkpoint
    if not file.is_file():
        raise UserError(
            f"{file}, the checkpoint of the best run of {summary.task}, is missing: delete {file.parent} and repeat the run"
        )
    return file


def format_spread(found: Spread | None) -> str:
    return MISSING if found is None else format_score(found.median, found.deviation)


def paper_results() -> list[dict[str, Any]]:
    """Return the papers' results of ``--paper``, one dictionary per row."""
    return yaml.safe_load(PAPER_RESULTS.read_text(encoding="utf-8"))


def paper_squad_cells(paper: dict[str, Any], scores: Sequence[str]) -> list[str]:
    """Return the paper's scores of SQuAD 2.0; a dash for a score that it does not report."""
    deviations = paper.get("deviations", {})
    return [format_score(paper["squad"].get(name), deviations.get(name)) for name in scores]


def summary_of_same_weights(out: Path, name: str, setup: dict[str, Any]) -> Summary | None:
    """Read the summary of another benchmark, to show it next to results of the same weights.

    Returns:
        The summary, or None if the file does not exist.

    Raises:
        UserError: the file is not a summary, or it belongs to another checkpoint or to random weights.
    """
    file = out / f"{name}.json"
    content = read_optional_json(file)
    if content is None:
        return None
    complaint = f"is not a summary of amos {name}: repeat that command, which writes it again"
    found = parse_summary(file, content, complaint)
    for part in ("checkpoint_sha256", "from_scratch"):
        if found.setup.get(part) != setup[part]:
            raise UserError(
                f"{file} has results of other weights ({part} {found.setup.get(part)}, not {setup[part]}): "
                f"give the results of the same weights with --{name}"
            )
    return found
