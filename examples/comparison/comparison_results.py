"""Results of a comparison as plain values: cost and scores of every entry at every share, and the papers' findings."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from budgets import SHARES, share_name, update_at
from runs import FineTuning, Pretraining

from amos_fairseq.downstream.texts.glue.command import average
from amos_fairseq.downstream.texts.glue.tasks import AVERAGED
from amos_fairseq.experiments.records import RunResult, TaskSummary, spread_of, summarize

AGREES, DISAGREES, UNDECIDED = "agrees", "disagrees", "within the spread"


def entry_results(pretraining: Pretraining, cost: float, fine_tunings: dict[float, FineTuning]) -> dict[str, Any]:
    """Return the values of one entry; None for those that do not exist yet.

    Args:
        cost: floating point operations of an update.
        fine_tunings: share of the budget -> runs.
    """
    points = {}
    for share in SHARES:
        checkpoint = pretraining.checkpoint(share)
        updates = update_at(pretraining.max_update, share)
        if checkpoint is None:
            continue
        fine_tuning = fine_tunings.get(share)
        points[share_name(share)] = {
            "updates": updates,
            "flops": updates * cost,
            "hours": pretraining.hours(share),
            "checkpoint": checkpoint.name,
            "scores": scores_of(fine_tuning.results) if fine_tuning else None,
            "complete": bool(fine_tuning and fine_tuning.finished),
        }
    cfg = pretraining.cfg
    tokens = int(cfg.task.tokens_per_sample) * int(cfg.dataset.batch_size) * int(cfg.optimization.update_freq[0])
    return {
        "label": pretraining.entry.label,
        "config": pretraining.entry.config,
        "settings": pretraining.entry.settings,
        "max_update": pretraining.max_update,
        "updates_so_far": pretraining.num_updates,
        "tokens": pretraining.max_update * tokens,
        "tokens_per_second": pretraining.tokens_per_second(),
        "flops_per_update": cost,
        "points": points,
    }


def scores_of(results: Sequence[RunResult]) -> dict[str, Any] | None:
    """Return median and deviation of every task, and of the average; None without results.

    The average is the mean of the tasks' medians, as in the papers. Its deviation is that of the average of each seed, over
    the seeds that every task has.
    """
    if not results:
        return None
    summaries = {task: summary for task, summary in summarize(results).items() if task in AVERAGED}
    by_task = {task: _scores_by_seed(results, summary) for task, summary in summaries.items()}
    seeds = set.intersection(*(set(by_seed) for by_seed in by_task.values()))
    averages = [statistics.fmean(by_seed[seed] for by_seed in by_task.values()) for seed in sorted(seeds)]
    _, mean = average({task: summary.main.median for task, summary in summaries.items()})
    deviation = spread_of(averages).deviation if averages else None
    return {
        "tasks": {
            task: asdict(summary.main) | {"score": summary.best.main_score, "seeds": by_task[task]}
            for task, summary in summaries.items()
        },
        "average": {"value": mean, "deviation": deviation, "count": len(averages)},
    }


def _scores_by_seed(results: Sequence[RunResult], summary: TaskSummary) -> dict[int, float]:
    own = [result for result in results if result.task == summary.best.task and result.trial == summary.trial]
    return {result.seed: result.main for result in own}


def complete_average(entry: dict[str, Any], share: str) -> dict[str, Any] | None:
    """Return the average at a share; None if its fine-tuning runs are not complete."""
    point = entry["points"].get(share)
    return point["scores"]["average"] if point and point["complete"] else None


def compare_findings(findings: list[dict[str, Any]], entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the papers' findings whose two sides were both compared, with our difference at the end of the budget.

    We agree or disagree if the difference of the averages is larger than its spread, the root of the sum of both squared
    deviations over the seeds of fine-tuning; otherwise the result is undecided.
    """
    compared = []
    for finding in findings:
        sides = [entries.get(finding[side]) for side in ("better", "worse")]
        averages = [complete_average(entry, share_name(1.0)) if entry else None for entry in sides]
        if all(averages):
            compared.append(finding | _verdict(*averages))
    return compared


def _verdict(better: dict[str, Any], worse: dict[str, Any]) -> dict[str, Any]:
    difference = better["value"] - worse["value"]
    deviations = [better["deviation"], worse["deviation"]]
    our_spread = math.hypot(*deviations) if None not in deviations else None
    if our_spread is not None and abs(difference) <= our_spread:
        verdict = UNDECIDED
    else:
        verdict = AGREES if difference > 0 else DISAGREES
    return {"our_points": difference, "our_spread": our_spread, "ours": verdict}


def ordering(entries: dict[str, dict[str, Any]]) -> list[str]:
    """Return names by the average at the end of the budget, highest first, without entries that have none."""
    scored = {name: complete_average(entry, share_name(1.0)) for name, entry in entries.items()}
    return sorted((name for name, found in scored.items() if found), key=lambda name: -scored[name]["value"])
