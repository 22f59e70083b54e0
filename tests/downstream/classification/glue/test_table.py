"""The differences of two outputs, beside scipy, scikit-learn and values by hand."""

import json

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from synthetic_glue import session

from amos_fairseq.downstream.classification.benchmark import read_glue_data
from amos_fairseq.downstream.classification.glue.command import GlueOptions, open_glue
from amos_fairseq.downstream.classification.glue.table import (
    NUM_RESAMPLES,
    cells,
    difference_table,
    holm,
    mean_score,
    paired_bootstrap,
    read_glue_summary,
    two_sided_p,
)
from amos_fairseq.downstream.runner import run_benchmark
from amos_fairseq.errors import UserError


def test_holm_by_hand():
    """Three p values: the smallest times 3, the next times 2 but not below it, the largest once."""
    assert holm([0.02, 0.01, np.nan, 0.5]) == pytest.approx([0.04, 0.03, np.nan, 0.5], nan_ok=True)
    assert holm([0.04, 0.03, 0.9]) == pytest.approx([0.09, 0.09, 0.9])
    assert holm([0.6, 0.7]) == pytest.approx([1, 1])


def test_paired_bootstrap_is_near_the_normal_approximation():
    """Of 1,000 rows ours is right in 40 where theirs is wrong, theirs in 20 where ours is wrong."""
    labels = np.array(["a", "b"] * 500)
    ours, theirs = labels.copy(), labels.copy()
    theirs[:40] = "c"
    ours[100:120] = "c"
    drawn = paired_bootstrap("accuracy", np.array([ours, ours]), np.array([theirs]), labels)
    deviation = 100 * np.sqrt((60 / 1000 - 0.02**2) / 1000)
    assert drawn.mean() == pytest.approx(2, abs=4 * deviation / np.sqrt(NUM_RESAMPLES))
    assert drawn.std() == pytest.approx(deviation, rel=0.05)  # its error is 1/sqrt(2 N), 1 %
    assert two_sided_p(drawn) == pytest.approx(2 * norm.sf(2 / deviation), abs=0.01)
    same = paired_bootstrap("accuracy", np.array([ours]), np.array([ours]), labels)
    assert two_sided_p(same) == 1
    assert cells([90.0], [90.0], same, (1.0, np.nan)) == ["+0.0", "+0.0 to +0.0", "1.000", "-"]
    # Never 0: the data count as one more resample.
    assert two_sided_p(np.full(NUM_RESAMPLES, 9.0)) == pytest.approx(2 / (NUM_RESAMPLES + 1))


def test_mean_scores_of_repeated_rows_are_those_of_the_libraries():
    """Accuracy, Matthews, Spearman and micro-F1 of the same rows as scikit-learn and scipy."""
    generator = np.random.default_rng(1)
    rows = generator.integers(0, 60, 200)
    classes = np.array(["no", "yes"])
    gold, found = classes[generator.integers(0, 2, 60)], classes[generator.integers(0, 2, (2, 60))]
    accuracy = np.mean([accuracy_score(gold[rows], own[rows]) for own in found])
    assert mean_score("accuracy", found, gold)(rows) == pytest.approx(100 * accuracy)
    matthews = np.mean([matthews_corrcoef(gold[rows], own[rows]) for own in found])
    assert mean_score("matthews", found, gold)(rows) == pytest.approx(100 * matthews)
    assert mean_score("matthews", np.full((1, 60), "no"), gold)(rows) == 0
    gold, found = (generator.normal(size=size).round(1).astype(str) for size in (60, (2, 60)))
    spearman = np.mean([spearmanr(gold[rows].astype(float), own[rows].astype(float))[0] for own in found])
    assert mean_score("spearman", found, gold)(rows) == pytest.approx(100 * spearman)
    names = np.array(["a", "b", "c"])
    gold, found = (generator.random(size) < 0.5 for size in ((60, 3), (2, 60, 3)))
    spelled = [[json.dumps(names[row].tolist()) for row in part] for part in (gold, *found)]
    micro = np.mean([f1_score(gold[rows], own[rows], average="micro") for own in found])
    score = mean_score("micro_f1", np.array(spelled[1:]), np.array(spelled[0]))
    assert score(rows) == pytest.approx(100 * micro)


def test_differences_of_two_outputs(start, data, tmp_path, fake_training):
    for name, seeds in (("one", 3), ("two", 4)):
        run_benchmark(open_glue(session(start, tmp_path / name, seeds=seeds), data, ["CoLA", "STS-B"]))
    one, two = read_glue_summary(tmp_path / "one"), read_glue_summary(tmp_path / "two")
    prepared = {task: read_glue_data(data, task) for task in ("CoLA", "STS-B")}
    rows = {row[0]: row[1:] for row in difference_table(two, [one], prepared).rows}
    assert list(rows) == ["CoLA, from one", "STS-B, from one", "AVG of 2, from one"]
    scores = {task: [[run.main for run in side.shown_runs(task)] for side in (two, one)] for task in prepared}
    ours, theirs = scores["STS-B"]
    assert rows["STS-B, from one"][0] == f"{np.mean(ours) - np.mean(theirs):+.1f}"
    alone = mannwhitneyu(ours, theirs).pvalue
    found = float(rows["STS-B, from one"][-1])
    assert found in (pytest.approx(alone, abs=1e-3), pytest.approx(min(1, 2 * alone), abs=1e-3))
    averages = [np.mean([scores[task][side] for task in prepared], axis=0) for side in (0, 1)]
    difference, _, _, p_value = rows["AVG of 2, from one"]
    assert difference == f"{averages[0].mean() - averages[1].mean():+.1f}"
    assert float(p_value) == pytest.approx(mannwhitneyu(*averages).pvalue, abs=1e-3)
    # Predictions that were changed are refused before a run is started, and those for other rows.
    file = tmp_path / "one" / "runs" / "CoLA" / "seed1" / "predictions.valid.tsv"
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(UserError, match=r"seed1/predictions\.valid\.tsv was changed after the run"):
        open_glue(session(start, tmp_path / "two"), data, ["CoLA"], GlueOptions(beside=[tmp_path / "one"]))
