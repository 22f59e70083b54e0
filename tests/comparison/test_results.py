"""Scores over seeds, findings of the papers beside ours, tables and curves, against values by hand."""

import pytest
from benchmark_summary import LAST
from comparison_results import compare_findings, scores_of
from entries import CONFIGS, read_yaml

from amos_fairseq.downstream.results import RunResult


def result(task: str, seed: int, value: float) -> RunResult:
    directory, scores = f"runs/{task}/seed{seed}", {"accuracy": value, "f1": 0.0}
    return RunResult(task, "", seed, directory, "accuracy", scores, *LAST)


def results(**scores: list[float]) -> list[RunResult]:
    return [result(task, seed, value) for task, values in scores.items() for seed, value in enumerate(values, start=1)]


def test_average_of_medians_and_deviation_over_seeds():
    found = scores_of(results(RTE=[50.0, 56.0, 53.0], MRPC=[70.0, 60.0, 80.0]))
    assert {task: own["median"] for task, own in found["tasks"].items()} == {"RTE": 53.0, "MRPC": 70.0}
    assert found["tasks"]["RTE"]["deviation"] == pytest.approx(3.0)
    assert found["average"]["value"] == pytest.approx(61.5)
    # Averages of the seeds: 60, 58, 66.5; their mean is 61.5, their squared deviations 2.25, 12.25, 25.
    assert found["average"]["deviation"] == pytest.approx((39.5 / 2) ** 0.5)
    assert found["average"]["count"] == 3


def entry(label: str, *averages: tuple[float, float | None]) -> dict:
    """An entry whose last points have these averages and deviations, each of twice the cost of the one before."""
    points = {}
    for number, (value, deviation) in enumerate(averages):
        share = 2.0 ** (number + 1 - len(averages))
        scores = {"tasks": {}, "average": {"value": value, "deviation": deviation, "count": 3}}
        points[f"{share:g}"] = {"flops_thesis": share * 1e12, "hours": share * 4, "scores": scores, "complete": True}
    progress = {"max_update": 16, "updates_so_far": 16, "tokens": 1000, "tokens_per_second": 12.5}
    flops = {"flops_per_update_thesis": 1e12 / 16, "flops_per_update_matmuls": 5e11 / 16}
    return {"label": label, **progress, **flops, "points": points}


@pytest.fixture
def content() -> dict:
    entries = {
        "mlm": entry("MLM (BERT)", (50.0, 1.0), (60.0, 1.5)),
        "electra": entry("ELECTRA", (49.0, 1.0), (63.0, 2.0)),
        "amos": entry("AMOS", (52.0, 1.0), (58.0, 1.0)),
        "teams": entry("TEAMS") | {"updates_so_far": 3},
    }
    setup = {"budget": "16 updates", "tasks": ["RTE"], "fine_tune_at": [0.5, 1.0], "size": "tiny", "device": "CPU"}
    found = compare_findings(read_yaml(CONFIGS / "paper.yaml")["findings"], entries)
    return {"setup": setup, "entries": entries, "findings": found, "notes": ["a note"]}


def test_findings_of_compared_pairs(content):
    found = {(one["better"], one["worse"]): one for one in content["findings"]}
    assert set(found) == {("electra", "mlm"), ("amos", "electra"), ("amos", "mlm")}
    # 3.0 points, spread sqrt(1.5^2 + 2^2) = 2.5; -5.0 and sqrt(1 + 4); -2.0 and sqrt(1 + 2.25) = 1.8.
    assert found["electra", "mlm"]["our_points"] == pytest.approx(3.0)
    assert found["electra", "mlm"]["our_spread"] == pytest.approx(2.5)
    verdicts = [found[pair]["ours"] for pair in (("electra", "mlm"), ("amos", "electra"), ("amos", "mlm"))]
    assert verdicts == ["agrees", "disagrees", "disagrees"]
