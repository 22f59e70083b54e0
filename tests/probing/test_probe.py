"""Pooling, probe and loss against loops in float64; probes on made-up features with a known answer."""

import math

import numpy as np
import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, f1_score

from amos_fairseq.probing.features import EncodedSplit, SplitTargets, split_targets
from amos_fairseq.probing.probe import (
    Probe,
    ProbeData,
    ProbeResult,
    ProbeResults,
    ProbeSettings,
    SpanFeatures,
    SpanPooling,
    majority_score,
    micro_f1,
    probe_loss,
    train_probe,
    whitening,
)
from amos_fairseq.probing.tasks import AnnotatedText, Target

LENGTHS = (3, 1, 5)


def made_up_pieces(width: int = 4, seed: int = 0) -> SpanFeatures:
    features = torch.randn(sum(LENGTHS), width, generator=torch.Generator().manual_seed(seed)).mul(3)
    return SpanFeatures(features, torch.tensor(LENGTHS))


def naive_pooling(features: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    pooled, start = [], 0
    for length in LENGTHS:
        span = features[start : start + length].double().tolist()
        weights = [math.exp(sum(w * x for w, x in zip(score.tolist(), piece, strict=True))) for piece in span]
        weighted = [[w * x for x in piece] for w, piece in zip(weights, span, strict=True)]
        pooled.append([sum(column) / sum(weights) for column in zip(*weighted, strict=True)])
        start += length
    return torch.tensor(pooled)


def test_pooling_equals_a_loop_over_spans_and_starts_at_the_mean():
    pooling, pieces = SpanPooling(4), made_up_pieces()
    means = torch.stack([span.mean(0) for span in pieces.features.split(LENGTHS)])
    torch.testing.assert_close(pooling(pieces), means)
    torch.nn.init.normal_(pooling.score.weight)
    torch.testing.assert_close(pooling(pieces), naive_pooling(pieces.features, pooling.score.weight[0].double()))
    torch.nn.init.constant_(pooling.score.weight, 200.0)
    assert pooling(pieces).isfinite().all()


def test_linear_probe_equals_its_formula_for_two_spans():
    probe, first, second = Probe(4, num_spans=2, num_labels=3), made_up_pieces(), made_up_pieces(seed=1)
    for parameter in probe.parameters():
        torch.nn.init.normal_(parameter)
    scores = [pooling.score.weight[0].double() for pooling in probe.poolings]
    pooled = [naive_pooling(first.features, scores[0]), naive_pooling(second.features, scores[1])]
    expected = torch.cat(pooled, dim=1) @ probe.output.weight.T + probe.output.bias
    torch.testing.assert_close(probe([first, second]), expected, rtol=1e-5, atol=1e-5)


def test_untrained_probe_predicts_frequencies():
    probe = Probe(4, num_spans=1, num_labels=2, classifier="mlp")
    probe.set_prior(torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(probe([made_up_pieces()]).sigmoid(), torch.tensor([[0.25, 0.75]] * 3))


def test_loss_equals_a_loop_over_targets_and_labels():
    logits, labels = torch.randn(4, 3) * 4, torch.rand(4, 3) > 0.5
    total = 0.0
    for z, y in zip(logits.double().flatten().tolist(), labels.flatten().tolist(), strict=True):
        probability = 1 / (1 + math.exp(-z))
        total -= math.log(probability if y else 1 - probability)
    assert float(probe_loss(logits, labels)) == pytest.approx(total / 4, rel=1e-5)


LABELS = ["a", "b", "c"]
SETTINGS = ProbeSettings(batch_size=128, updates=60)
SIZES = {"train": 600, "valid": 150, "test": 300}


def made_up(planted: bool, seed: int = 0) -> ProbeData:
    """One target for each pair of pieces; the label is planted in dimension 5 to 7 of one piece, or independent of all."""
    generator = torch.Generator().manual_seed(seed)
    features, targets = {}, {}
    for split, size in SIZES.items():
        classes = torch.randint(3, (size,), generator=generator)
        states = torch.randn(2 * size, 10, generator=generator)
        if planted:
            states[1::2, 5:8] += 6 * torch.eye(3)[classes]
        features[split] = states
        starts = 2 * torch.arange(size)[:, None]
        one_hot = torch.eye(3).bool()[classes]
        gold = [(LABELS[i],) for i in classes.tolist()]
        targets[split] = SplitTargets(starts, torch.full_like(starts, 2), one_hot, gold, 0)
    return ProbeData(features, targets, LABELS, "test")


def test_a_planted_feature_is_found_in_its_layer_alone():
    planted, noise = made_up(planted=True), made_up(planted=False, seed=1).features
    assert train_probe(planted, SETTINGS, 1, "cpu").score > 0.95
    assert train_probe(ProbeData(noise, planted.targets, LABELS, "test"), SETTINGS, 1, "cpu").score < 0.4


def test_scales_and_directions_of_features_do_not_matter():
    """A collapsed layer: nearly all variance in one direction, the label in directions with a thousandth of its deviation."""
    data = made_up(planted=True)
    rotation = torch.linalg.qr(torch.randn(10, 10, generator=torch.Generator().manual_seed(3)))[0]
    scales = torch.tensor([1e3, *[1.0] * 9])
    collapsed = {split: (states * scales) @ rotation + 5.0 for split, states in data.features.items()}
    found = train_probe(ProbeData(collapsed, data.targets, LABELS, "test"), SETTINGS, 1, "cpu").score
    # Rotated whitened features start from other zeros of Adam's coordinates, so the scores are near, not equal.
    assert found == pytest.approx(train_probe(data, SETTINGS, 1, "cpu").score, abs=0.02)


def test_whitened_features_have_the_identity_as_covariance():
    """Compared with NumPy in float64; the last dimension is the sum of two others, so one direction has no variance."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5000, 4, generator=generator) * torch.tensor([30.0, 1.0, 0.1, 2.0]) + 7.0
    features = torch.cat([features, features[:, :1] + features[:, 1:2]], dim=1)
    mean, matrix = whitening(features)
    whitened = (features.double() - mean.double()) @ matrix.double()
    covariance = np.cov(whitened.T.numpy(), bias=True)
    # The projection on the four directions that have variance; float32 matrix entries up to 10, deviations up to 30.
    assert np.sort(np.linalg.eigvalsh(covariance)) == pytest.approx([0, 1, 1, 1, 1], abs=1e-2)
    torch.testing.assert_close(matrix, matrix.T)


def test_a_seed_determines_the_result():
    data = made_up(planted=True)
    first, second = (train_probe(data, ProbeSettings("mlp", 0.01, 64, 20), 3, "cpu") for _ in range(2))
    assert first == second


def test_spans_of_words_become_spans_of_pieces():
    words = [[(0, 2), (2, 3), (3, 6), None], [(6, 7)]]
    encoded = EncodedSplit([], words, 7)
    examples = [
        AnnotatedText(["w"] * 4, [Target(((0, 2), (2, 3)), ("a",)), Target(((0, 1), (3, 4)), ("b", "c"))]),
        AnnotatedText(["w"], [Target(((0, 1), (0, 1)), ("b", "unseen"))]),
    ]
    targets = split_targets(examples, encoded, LABELS)
    assert targets.starts.tolist() == [[0, 3], [6, 6]]
    assert targets.lengths.tolist() == [[3, 3], [1, 1]]
    assert targets.labels.tolist() == [[True, False, False], [False, True, False]]
    assert (targets.num_unread, targets.num_impossible, targets.num_targets) == (1, 3, 3)
    assert targets.gold == [("a",), ("b", "unseen"), ("b", "c")]


def test_micro_f1_equals_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    predicted, labels = (torch.rand(50, 4, generator=generator) > threshold for threshold in (0.6, 0.7))
    expected = f1_score(labels.numpy(), predicted.numpy(), average="micro")
    assert micro_f1(predicted, labels) == pytest.approx(expected)
    # Two labels that training has not seen: a further column that is never predicted.
    more = torch.zeros(50, 1, dtype=torch.bool)
    unseen = more.clone()
    unseen[:2] = True
    gold, found = torch.cat([labels, unseen], 1), torch.cat([predicted, more], 1)
    expected = f1_score(gold.numpy(), found.numpy(), average="micro")
    assert micro_f1(predicted, labels, num_impossible=2) == pytest.approx(expected)
    assert micro_f1(more, more) == 0


def test_the_most_frequent_label_equals_scikit_learn():
    """With one label a target, micro-F1 is the accuracy."""
    train, gold = ["b", "a", "b", "c", "a"], ["c", "a", "b", "a", "unseen"]
    dummy = DummyClassifier(strategy="most_frequent").fit(train, train)  # the first by name of a and b
    expected = accuracy_score(gold, dummy.predict(gold))
    assert majority_score([[one] for one in train], [[one] for one in gold]) == pytest.approx(expected)
    # Several labels or none: a, the answer, is right for two of four targets, which have three labels.
    assert majority_score([["a", "b"], ["a"], []], [["a", "b"], ["a"], [], []]) == pytest.approx(4 / 7)


def test_a_row_of_the_table_is_a_layer():
    """The deviation of 0.5 and 0.7 with divisor n - 1 is 0.1414."""
    scores = [("pos", "generator 4", 0.5), ("pos", "generator 4", 0.7), ("pos", "generator 2", 0.25)]
    results = [ProbeResult(task, layer, 1, score, 9) for task, layer, score in [*scores, ("srl", "generator 4", 0.125)]]
    checkpoint = {"file": "mine/checkpoint_last.pt", "model": "AmosModel", "num_updates": 7}
    table = ProbeResults(checkpoint, {"classifier": "linear"}, ["a note"], results).table()
    assert (table.title, table.notes[-1]) == ("Edge probing of mine (AmosModel) after 7 updates", "a note")
    assert table.columns == ["layer", "pos", "srl"]
    assert table.rows == [["generator 4", "60.0 ± 14.1", "12.5"], ["generator 2", "25.0", "-"]]
