"""A linear model on states of the frozen encoder: the output layer of a head, fitted by scikit-learn instead of trained.

With a hundred rows it can be better than fine-tuning, and it takes seconds.
"""

import threading
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.downstream.labeled_task import pad_tokens
from amos_fairseq.downstream.model import TEXT_HEAD, scale_of
from amos_fairseq.downstream.prediction import predict
from amos_fairseq.downstream.texts.dataset import ShortenedTexts
from amos_fairseq.models.pretraining import CLASSIFICATION

MOST_ROWS = 5_000  # of more rows fine-tuning is better; measured: docs/classification.md
INVERSE_PENALTY = 0.03  # scikit-learn's C; ours, found on 500 and 3,000 rows of sentence polarity with all-MiniLM


def fit_head(
    loaded: LoadedCheckpoint, rows: ShortenedTexts, targets: np.ndarray, kind: str, device: str, stop: threading.Event
) -> dict[str, Tensor]:
    """Return the weights of the output layer of the head for texts, by their names in the checkpoint.

    Args:
        rows: the texts to train on.
        targets: classes [N] int64; labels [N, labels] bool; or numbers [N] float64.
    """
    model, tokens = loaded.model, [rows[index] for index in range(len(rows))]
    head = model.classification_heads[TEXT_HEAD]

    def inputs(indices: list[int]) -> dict[str, Any]:
        return pad_tokens([tokens[index] for index in indices])

    def read_out(output: tuple[Tensor, None], indices: list[int]) -> np.ndarray:
        states = output[0]  # [B,T,D]
        lengths = torch.tensor([len(tokens[index]) for index in indices], device=states.device)
        padding = torch.arange(states.size(1), device=states.device) >= lengths[:, None]
        with torch.inference_mode():
            return head.features(states, padding).double().cpu().numpy()

    states = np.stack(predict(model, list(map(len, tokens)), inputs, read_out, device, stop))
    if kind == "number":
        mean, deviation = scale_of(head.scale_bits)
        targets = (targets - mean) / deviation
    weight, bias = linear_layer(kind, states, targets)
    name = f"{CLASSIFICATION}{TEXT_HEAD}.output"
    return {f"{name}.weight": torch.from_numpy(weight).float(), f"{name}.bias": torch.from_numpy(bias).float()}


def linear_layer(kind: str, states: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weight [outputs, D] and bias [outputs] of a logistic regression, one for each of several labels, or of a ridge
    regression; it is fitted to standardized states [N, D]."""
    from sklearn.exceptions import ConvergenceWarning  # takes a second to import
    from sklearn.linear_model import LogisticRegression, RidgeCV

    mean, scale = states.mean(0), states.std(0)
    scale[scale == 0] = 1

    def fitted(model: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # it is near enough
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
        rows = [classifier(column) for column in targets.T]
        return np.concatenate([weight for weight, _ in rows]), np.concatenate([bias for _, bias in rows])
    weight, bias = classifier(targets)
    # The softmax of (-z/2, z/2) is the sigmoid of z.
    return (
        (weight, bias) if len(bias) > 1 else (np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2)
    )
