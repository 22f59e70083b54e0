"""The linear model on frozen states: its layer beside scikit-learn's own predictions, and its run beside the trained one."""

import random

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from synthetic_glue import open_table

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.model import TEXT_HEAD
from amos_fairseq.downstream.texts.dataset import open_texts
from amos_fairseq.downstream.texts.linear import INVERSE_PENALTY, linear_layer
from amos_fairseq.downstream.texts.prepare import NAME
from amos_fairseq.experiments.records import best_runs
from amos_fairseq.experiments.table import run_benchmark
from tests.helpers.benchmark_summary import read_results

WORDS = {"fox": "a", "dog": "b", "end": "c"}


@pytest.mark.parametrize("kind", ["two classes", "classes", "labels", "number"])
def test_the_layer_predicts_what_scikit_learn_does(kind):
    generator = np.random.default_rng(3)
    states, new = (generator.normal(2, np.linspace(0.1, 9, 5), (count, 5)) for count in (80, 30))
    states[:, 2] = new[:, 2] = 1.5  # a state that never changes
    sums = states @ generator.standard_normal((5, 4))
    regression = LogisticRegression(C=INVERSE_PENALTY, max_iter=500)
    targets, model = {
        "two classes": (sums[:, :2].argmax(1), regression),
        "classes": (sums.argmax(1), regression),
        "labels": (sums > sums.mean(0), OneVsRestClassifier(regression)),
        "number": (sums[:, 0], RidgeCV(np.logspace(0, 5, 11))),
    }[kind]
    expected = make_pipeline(StandardScaler(), model).fit(states, targets)
    weight, bias = linear_layer(kind.split()[-1], states, targets)
    outputs = torch.tensor(new @ weight.T + bias)
    if kind == "number":
        np.testing.assert_allclose(outputs[:, 0], expected.predict(new), rtol=1e-9)
        return
    probabilities = outputs.sigmoid() if kind == "labels" else outputs.softmax(1)
    np.testing.assert_allclose(probabilities, expected.predict_proba(new), atol=1e-9)


def test_a_label_that_all_rows_have():
    targets = np.array([[True, False], [True, False], [True, True]])
    weight, bias = linear_layer("labels", np.arange(6.0).reshape(3, 2), targets)
    assert weight.shape == (2, 2)
    assert not weight[0].any()
    assert bias[0] == np.log(7)


def test_the_better_one_is_kept_and_predicts(start, fake_training, tmp_path):
    """The class is a word of the text, which random weights show; the trained model here is random, head and all. The linear
    one trains for one update, with one seed."""
    generator = random.Random(4)
    for split, count in (("train", 60), ("dev", 40)):
        rows = [generator.choice(list(WORDS)) for _ in range(count)]
        lines = (f"the {word} jumps over {split} {n}\t{WORDS[word]}\n" for n, word in enumerate(rows))
        (tmp_path / f"{split}.tsv").write_text("text\tlabel\n" + "".join(lines))
    options = {"recipe": "own_labels", "seeds": 2, "dev": tmp_path / "dev.tsv"}
    benchmark = open_table(start, tmp_path / "out", tmp_path / "train.tsv", **options)
    outcome = run_benchmark(benchmark)
    assert not outcome.failures
    results = {(result.trial, result.seed): result for result in read_results(tmp_path / "out")}
    assert results.keys() == {("", 1), ("", 2), ("linear", 1)}
    *_, command = fake_training.commands
    for flag in ("--max-update 1", "--pooling mean", "--pooler-activation-fn linear", "--freeze-encoder"):
        assert flag in " ".join(command)
    best = best_runs(tmp_path / "out", NAME, "amos classify")[NAME]
    assert best == results["linear", 1]
    assert best.scores["accuracy_error"] > 0
    assert best.main > max(results["", seed].main for seed in (1, 2)) + 20
    assert [path.parent.name for path in tmp_path.glob("out/runs/*/*/*/*.pt")] == ["seed1"]
    names = [row[0] for row in outcome.table.rows]
    assert names[1:] == ["label: linear model on its frozen states", "label: most frequent class"]
    assert any("the linear model is better by two standard errors: it is kept" in note for note in outcome.table.notes)

    best.checkpoint_in(tmp_path / "out").unlink()  # as another command in OUT does, which preferred a run of its own
    assert not run_benchmark(benchmark).failures
    assert best_runs(tmp_path / "out", NAME, "amos classify")[NAME].main == best.main
    loaded = load_checkpoint(best.checkpoint_in(tmp_path / "out"))
    head, dev = loaded.model.classification_heads[TEXT_HEAD], benchmark.prepared[NAME]

    def states(split):
        rows = open_texts(dev.directory, split, loaded.model.max_positions(), loaded.separator)
        with torch.no_grad():
            read = (loaded.model.extract_features(rows[index][None].long())[0, 0] for index in range(len(rows)))
            return torch.stack([torch.tanh(head.dense(state)) for state in read]).double().numpy()

    model = make_pipeline(StandardScaler(), LogisticRegression(C=INVERSE_PENALTY, max_iter=500))
    predicted = model.fit(states("train"), dev.labels("train")).predict(states("valid"))
    assert best.scores["accuracy"] == pytest.approx(100 * (predicted == dev.labels("valid")).mean())
