"""Pooling, probe and loss against loops in float64."""

import math

import pytest
import torch

from amos_fairseq.probing.probe import LayerMixture, Probe, SpanFeatures, SpanPooling, probe_loss

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


def test_mixture_equals_a_sum_over_layers():
    mixture, features = LayerMixture(3), torch.randn(5, 3, 4)
    mixture.scores.data, mixture.scale.data = torch.tensor([0.5, -1.0, 2.0]), torch.tensor(1.5)
    exponentials = [math.exp(s) for s in (0.5, -1.0, 2.0)]
    expected = sum(1.5 * e / sum(exponentials) * features[:, layer] for layer, e in enumerate(exponentials))
    torch.testing.assert_close(mixture(features), expected)


@pytest.mark.parametrize("rows", [1, 4])
def test_loss_equals_a_loop_over_targets_and_labels(rows: int):
    logits, labels = torch.randn(rows, 3) * 4, torch.rand(rows, 3) > 0.5
    total = 0.0
    for z, y in zip(logits.double().flatten().tolist(), labels.flatten().tolist(), strict=True):
        probability = 1 / (1 + math.exp(-z))
        total -= math.log(probability if y else 1 - probability)
    assert float(probe_loss(logits, labels)) == pytest.approx(total / rows, rel=1e-5)
