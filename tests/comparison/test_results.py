"""Scores over seeds, findings of the papers beside ours, tables and curves, against values by hand."""

import pytest
from benchmark_summary import make_result
from comparison_results import compare_findings, scores_of
from entries import CONFIGS, read_yaml


def test_average_of_medians_and_deviation_over_seeds():
    values = {"RTE": [50.0, 56.0, 53.0], "MRPC": [70.0, 60.0, 80.0]}
    results = []
    for task, own in values.items():
        for seed, value in enumerate(own, start=1):
            scores = {"accuracy": value, "f1": 0.0}
            results.append(make_result(task, seed, "accuracy", scores))
    found = scores_of(results)
    assert {task: own["median"] for task, own in found["tasks"].items()} == {"RTE": 53.0, "MRPC": 70.0}
    assert found["tasks"]["RTE"]["deviation"] == pytest.approx(3.0)
    assert found["average"]["value"] == pytest.approx(61.5)
    # Averages of the seeds: 60, 58, 66.5; their mean is 61.5, their squared deviations 2.25, 12.25, 25.
    assert found["average"]["deviation"] == pytest.approx((39.5 / 2) ** 0.5)
    assert found["average"]["count"] == 3


def entry(*averages: tuple[float, float]) -> dict:
    """An entry with these averages and deviations at a half of the budget and at its end."""
    points = {}
    for share, (value, deviation) in zip(("0.5", "1"), averages, strict=False):
        scores = {"tasks": {}, "average": {"value": value, "deviation": deviation, "count": 3}}
        points[share] = {"scores": scores, "complete": True}
    return {"points": points}


def test_findings_of_compared_pairs():
    entries = {"mlm": entry((50.0, 1.0), (60.0, 1.5)), "electra": entry((49.0, 1.0), (63.0, 2.0))}
    entries |= {"amos": entry((52.0, 1.0), (58.0, 1.0)), "teams": entry()}
    findings = compare_findings(read_yaml(CONFIGS / "paper.yaml")["findings"], entries)
    found = {(one["better"], one["worse"]): one for one in findings}
    assert set(found) == {("electra", "mlm"), ("amos", "electra"), ("amos", "mlm")}
    # 3.0 points, spread sqrt(1.5^2 + 2^2) = 2.5; -5.0 and sqrt(1 + 4); -2.0 and sqrt(1 + 2.25) = 1.8.
    assert found["electra", "mlm"]["our_points"] == pytest.approx(3.0)
    assert found["electra", "mlm"]["our_spread"] == pytest.approx(2.5)
    verdicts = [found[pair]["ours"] for pair in (("electra", "mlm"), ("amos", "electra"), ("amos", "mlm"))]
    assert verdicts == ["agrees", "disagrees", "disagrees"]
