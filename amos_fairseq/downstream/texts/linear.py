"""A linear model on states of the frozen encoder: the output layer of a head, fitted by scikit-learn instead of trained.

With a hundred rows it can be better than fine-tuning, and it takes seconds.
"""

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.downstream.model import TEXT_HEAD, scale_of
from amos_fairseq.downstream.texts.labeling import predict_logits
from amos_fairseq.models.pretraining import CLASSIFICATION

MOST_ROWS = 5_000  # of more rows fine-tuning is better; measured: docs/classification.md
OUTPUT_LAYER = f"{CLASSIFICATION}{TEXT_HEAD}.output"  # in a checkpoint
INVERSE_PENALTY = 0.03  # scikit-learn's C; ours, found on 500 and 3,000 rows of sentence polarity with all-MiniLM


def fit_head(
    loaded: LoadedCheckpoint, rows: Sequence[Tensor], targets: np.ndarray, kind: str, device: str, stop: threading.Event
) -> dict[str, Tensor]:
    """Return the weights of the output layer of the head for texts, by their names in the checkpoint.

    Args:
        loaded: the checkpoint; its model loses the layer.
        rows: the texts to train on, LongTensors [L].
        targets: classes [N] int64; labels [N, labels] bool; or numbers [N] float64.
    """
    head = loaded.model.classification_heads[TEXT_HEAD]
    if kind == "number":
        mean, deviation = scale_of(head.scale_bits)
        targets = (targets - mean) / deviation
    head.output, head.scale_bits = nn.Identity(), None
    weight, bias = linear_layer(kind, predict_logits(loaded, rows, device, stop), targets)
    return {
        f"{OUTPUT_LAYER}.{name}": torch.from_numpy(value).float()
        for name, value in (("weight", weight), ("bias", bias))
    }


def linear_layer(kind: str, states: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weight [outputs, D] and bias [outputs] of a logistic regression, one for each of several labels, or of a ridge
    regression; it is fitted to standardized states [N, D]."""
    from sklearn.exceptions import ConvergenceWarning  # takes a second to import
    from sklearn.linear_model import LogisticRegression, RidgeCV

    mean, scale = states.mean(0), states.std(0)
    scale[scale == 0] = 1

    def fitted(model: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the fit is close enough
            model.fit((states - mean) / scale, values)
        weight = np.atleast_2d(model.coef_) / scale
        return weight, np.atleast_1d(model.intercept_) - weight @ mean

    def classifier(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The layer has one row for two classes."""
        if (values == values[0]).all():
            return np.zeros((1, states.shape[1])), np.array([np.log(2 * len(values) + 1) * (1 if values[0] else -1)])
        return fitted(LogisticRegression(C=INVERSE_PENALTY, max_iter=500), values)

    if kind == "number":
        return fitted(RidgeCV(np.logspace(0, 5, 11)), targets)
    if kind == "labels":
        weights, biases = zip(*map(classifier, targets.T), strict=True)
        return np.concatenate(weights), np.concatenate(biases)
    weight, bias = classifier(targets)
    if len(bias) == 1:  # the softmax of (-z/2, z/2) is the sigmoid of z
        weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return weight, bias
