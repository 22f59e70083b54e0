"""Probes on made-up features with a known answer."""

import pytest
import torch
from torch import Tensor

from amos_fairseq.probing.features import EncodedSplit
from amos_fairseq.probing.scores import MICRO_F1
from amos_fairseq.probing.targets import Example, Target
from amos_fairseq.probing.training import ProbeData, ProbeSettings, SplitTargets, split_targets, train_probe

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
        features[split] = [states.half()]
        starts = 2 * torch.arange(size)[:, None]
        one_hot = torch.eye(3).bool()[classes]
        gold = [(LABELS[i],) for i in classes.tolist()]
        targets[split] = SplitTargets(starts, torch.full_like(starts, 2), one_hot, gold, 0, 0)
    return ProbeData(features, targets, LABELS, "test")


def with_features(data: ProbeData, *layers: dict[str, list[Tensor]]) -> ProbeData:
    stacked = {split: [layer[split][0] for layer in layers] for split in SIZES}
    return ProbeData(stacked, data.targets, data.labels, data.scored_split)


def test_a_planted_feature_is_found_in_its_layer_alone():
    planted, noise = made_up(planted=True), made_up(planted=False, seed=1).features
    scores = [
        train_probe(with_features(planted, layer), SETTINGS, 1, "cpu").scores[MICRO_F1]
        for layer in (noise, planted.features, made_up(planted=False, seed=2).features)
    ]
    assert scores[1] > 0.95
    assert max(scores[0], scores[2]) < 0.4
    mixed = train_probe(with_features(planted, noise, planted.features), SETTINGS, 1, "cpu")
    assert mixed.scores[MICRO_F1] > 0.9


def test_random_labels_give_chance():
    """A third of the labels at most: a probe that predicts one label always has F1 1/3, one that predicts none 0."""
    data = made_up(planted=False)
    assert train_probe(data, SETTINGS, 1, "cpu").scores[MICRO_F1] < 0.4
    mlp = ProbeSettings("mlp", lr=0.01, batch_size=128, updates=60)
    assert train_probe(data, mlp, 1, "cpu").scores[MICRO_F1] < 0.45


def test_the_scale_of_features_does_not_matter():
    """Powers of two: the standardized features are equal to the bit."""
    data = made_up(planted=True)
    scaled = ProbeData({s: [f[0] / 32] for s, f in data.features.items()}, data.targets, LABELS, "test")
    assert train_probe(scaled, SETTINGS, 1, "cpu").scores[MICRO_F1] == pytest.approx(
        train_probe(data, SETTINGS, 1, "cpu").scores[MICRO_F1], abs=0.01
    )


def test_a_seed_determines_the_result():
    data = made_up(planted=True)
    first, second = (train_probe(data, ProbeSettings("mlp", 0.01, 64, 20), 3, "cpu") for _ in range(2))
    assert first == second


def test_spans_of_words_become_spans_of_pieces():
    words = [[(0, 2), (2, 3), (3, 6), None], [(6, 7)]]
    encoded = EncodedSplit([], words, 7)
    examples = [
        Example(["w"] * 4, [Target(((0, 2), (2, 3)), ("a",)), Target(((0, 1), (3, 4)), ("b", "c"))]),
        Example(["w"], [Target(((0, 1), (0, 1)), ("b", "unseen"))]),
    ]
    targets = split_targets(examples, encoded, LABELS)
    assert targets.starts.tolist() == [[0, 3], [6, 6]]
    assert targets.lengths.tolist() == [[3, 3], [1, 1]]
    assert targets.labels.tolist() == [[True, False, False], [False, True, False]]
    assert (targets.num_unread, targets.num_impossible, targets.num_targets) == (1, 3, 3)
    assert targets.gold == [("a",), ("b", "unseen"), ("b", "c")]
