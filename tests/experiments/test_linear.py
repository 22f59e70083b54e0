"""The linear model: its inputs beside single texts through the loaded encoder, its predictions on states that are separable."""

import threading

import numpy as np
import pytest
import torch

import amos_fairseq
from amos_fairseq.experiments import linear
from amos_fairseq.experiments.linear import FrozenInput, fit, linear_predictions, rows_to_fit

TEXTS = ["the quick fox", "a lazy dog over the end", "jumps", "brown dog and fox"]


@pytest.mark.parametrize("positions", [None, torch.tensor([1, 2])])
def test_states_are_those_of_the_loaded_encoder(start, monkeypatch, positions):
    """Each fit and prediction has the states of its inputs, in the order of the targets, whatever the batches."""
    encoder, fitted, scored = amos_fairseq.load(start), [], []

    def record(kind, states, targets):
        fitted.append((states, targets))
        return lambda rows: scored.append(rows) or np.arange(len(rows))

    monkeypatch.setattr(linear, "fit", record)
    inputs = [FrozenInput(encoder(text).tokens[0], positions) for text in TEXTS]
    num_examples = 1 if positions is None else len(positions)
    targets = [np.full(num_examples, number) for number in range(len(TEXTS))]
    predicted = linear_predictions(start, "classes", inputs, targets, inputs[::-1], "cpu", threading.Event())
    expected = []
    for text in TEXTS:
        of_text = encoder(text)
        expected.append(of_text.pooled() if positions is None else of_text.states[0, positions])
    ((states, in_order),) = fitted
    for number, rows in enumerate(expected):
        np.testing.assert_allclose(states[in_order == number], rows.numpy(), atol=1e-5)
    np.testing.assert_allclose(np.sort(np.concatenate(scored), 0), np.sort(torch.cat(expected).numpy(), 0), atol=1e-5)
    assert list(map(len, predicted)) == [num_examples] * len(TEXTS)


def test_each_kind_of_label_is_fitted():
    generator = np.random.default_rng(1)
    states = generator.normal(size=(400, 8)).astype(np.float32)
    weights = generator.normal(size=(8, 3))
    outputs = states @ weights
    train, dev = slice(0, 300), slice(300, None)
    classes = outputs.argmax(1)
    assert (fit("classes", states[train], classes[train])(states[dev]) == classes[dev]).mean() > 0.9
    labels = outputs > 0
    labels[:, 1] = True  # a label of every training row
    found = fit("labels", states[train], labels[train])(states[dev])
    assert (found.shape, found.dtype, found[:, 1].all()) == ((100, 3), bool, True)
    assert (found == labels[dev]).mean() > 0.9
    numbers = 1000 + 50 * outputs[:, 0]
    np.testing.assert_allclose(fit("number", states[train], numbers[train])(states[dev]), numbers[dev], atol=2)
    assert (fit("classes", states[:5], np.full(5, 2))(states) == 2).all()


def test_states_in_memory_are_bounded():
    for inputs, examples, used in ((500, 500, 500), (20_001, 20_001, 10_001), (1000, 60_000, 334)):
        assert len(rows_to_fit(inputs, examples)) == used
