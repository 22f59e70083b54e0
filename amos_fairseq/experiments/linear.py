"""A linear model on states of the frozen encoder: what fine-tuning must be better than, in seconds.

Shapes: L tokens of an input, W words, N examples in all inputs, D width of the encoder.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from amos_fairseq.checkpoints.encoder import load
from amos_fairseq.experiments.benchmark import batches
from amos_fairseq.output.terminal import say

MOST_EXAMPLES = 20_000  # to train on, at equal distances: their states are in memory
INVERSE_PENALTY = 0.03  # scikit-learn's C; ours, found on 500 and 3,000 rows of sentence polarity with all-MiniLM


class FrozenInput(NamedTuple):
    """What the encoder reads; the examples are its words, or the whole text."""

    tokens: Tensor  # [L] int64
    positions: Tensor | None = None  # [W] int64, of the first pieces of the words; None for the mean of all states


def rows_to_fit(num_inputs: int, num_examples: int) -> range:
    """Return which of the training inputs are used; together they have ``num_examples``."""
    return range(0, num_inputs, max(1, math.ceil(num_examples / MOST_EXAMPLES)))


def linear_predictions(
    checkpoint: Path,
    kind: str,
    train: Sequence[FrozenInput],
    targets: Sequence[np.ndarray],
    dev: Sequence[FrozenInput],
    device: str,
    stop: threading.Event,
) -> list[np.ndarray]:
    """Fit a linear model on the training inputs, and return what it predicts for each example of each dev input.

    Args:
        kind: classes (of words, too), labels or number.
        targets: for each training input those of its examples: classes [W] or [1] int64, labels [1, labels] bool, or a number
            [1] float64.
    """
    say(f"linear model on states of {len(train):,} training and {len(dev):,} dev inputs", "linear")
    encoder = load(checkpoint, device=device)

    def states_of(inputs: Sequence[FrozenInput]) -> Iterator[tuple[list[int], list[np.ndarray]]]:
        """Yield places in ``inputs``, and the states of their examples, [W, D] or [1, D]."""
        for places in batches([len(one.tokens) for one in inputs], stop):
            batch = [inputs[place] for place in places]
            states = zip(batch, encoder.encode([one.tokens for one in batch]), strict=True)
            read = [each.mean(0, True) if one.positions is None else each[one.positions] for one, each in states]
            yield places, [each.cpu().numpy() for each in read]

    order, states = [], []
    for places, of_places in states_of(train):
        order += places
        states += of_places
    predict = fit(kind, np.concatenate(states), np.concatenate([targets[place] for place in order]))
    predicted: list[np.ndarray] = [np.empty(0)] * len(dev)
    for places, of_places in states_of(dev):
        ends = np.cumsum([len(each) for each in of_places])
        parts = np.split(predict(np.concatenate(of_places)), ends[:-1]) if ends[-1] else of_places
        for place, part in zip(places, parts, strict=True):
            predicted[place] = part
    return predicted


def fit(kind: str, states: np.ndarray, targets: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function of a fitted model: states [N, D] to predictions, which are as the targets.

    Logistic regression, one for each of several labels, or for numbers ridge regression; on standardized states.
    """
    from sklearn.dummy import DummyClassifier  # takes a second to import
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def classifier(classes: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        is_constant = (classes == classes[0]).all()
        model = DummyClassifier() if is_constant else LogisticRegression(C=INVERSE_PENALTY, max_iter=500)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it is near enough
            return make_pipeline(StandardScaler(), model).fit(states, classes).predict

    if kind == "number":
        return make_pipeline(StandardScaler(), RidgeCV(np.logspace(0, 5, 11))).fit(states, targets).predict
    if kind == "classes":
        return classifier(targets)
    of_labels = [classifier(column) for column in targets.T]
    return lambda rows: np.stack([predict(rows) for predict in of_labels], axis=1)
