"""What a comparison has found so far: every entry's cost and scores at every share of its budget, and the papers' findings."""

import math
from typing import Any

from budgets import SHARES, share_name, update_at
from costs import Cost
from fine_tuning_runs import FineTuning, scores_of
from pretraining_runs import Pretraining

AGREES, DISAGREES, UNDECIDED = "agrees", "disagrees", "within the spread"


def entry_results(pretraining: Pretraining, cost: Cost, fine_tunings: dict[float, FineTuning]) -> dict[str, Any]:
    """One row: plain values, None for what is not there yet.

    Args:
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
            "flops_thesis": updates * cost.thesis,
            "flops_matmuls": updates * cost.matmuls,
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
        "flops_per_update_thesis": cost.thesis,
        "flops_per_update_matmuls": cost.matmuls,
        "points": points,
    }


def last_average(entry: dict[str, Any], share: str) -> dict[str, Any] | None:
    """The average at a share whose fine-tunings are complete."""
    point = entry["points"].get(share)
    return point["scores"]["average"] if point and point["complete"] else None


def findings_beside_ours(findings: list[dict[str, Any]], entries: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each finding of a paper whose two sides were both compared, with our difference at the end of the budget.

    Ours agrees or disagrees where the difference of the averages is larger than its spread, the root of the sum of both
    squared deviations over the seeds of fine-tuning; otherwise it says nothing.
    """
    compared = []
    for finding in findings:
        sides = [entries.get(finding[side]) for side in ("better", "worse")]
        averages = [last_average(entry, share_name(1.0)) if entry else None for entry in sides]
        if all(averages):
            compared.append(finding | _verdict(*averages))
    return compared


def _verdict(better: dict[str, Any], worse: dict[str, Any]) -> dict[str, Any]:
    difference = better["value"] - worse["value"]
    deviations = [better["deviation"], worse["deviation"]]
    spread = math.hypot(*deviations) if None not in deviations else None
    if spread is not None and abs(difference) <= spread:
        verdict = UNDECIDED
    else:
        verdict = AGREES if difference > 0 else DISAGREES
    return {"our_points": difference, "our_spread": spread, "ours": verdict}


def ordering(entries: dict[str, dict[str, Any]]) -> list[str]:
    """Names by the average at the end of the budget, highest first; those without one are left out."""
    scored = {name: last_average(entry, share_name(1.0)) for name, entry in entries.items()}
    return sorted((name for name, found in scored.items() if found), key=lambda name: -scored[name]["value"])
