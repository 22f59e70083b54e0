"""Predictions and scores of texts with a class, several labels, or a number."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

# By kind of label. The first selects the best checkpoint and seed.
SCORES = {
    "classes": ("accuracy", "macro_f1", "matthews"),
    "labels": ("micro_f1", "macro_f1"),
    "number": ("spearman", "pearson", "mse"),
}
# In tables.
HEADINGS = {"accuracy": "accuracy", "f1": "F1", "micro_f1": "micro-F1", "macro_f1": "macro-F1", "matthews": "Matthews"}
HEADINGS |= {"ece_before": "ECE before", "ece": "ECE"}
HEADINGS |= {"spearman": "Spearman", "pearson": "Pearson", "mse": "MSE"}

NUM_BINS = 15  # of the calibration error


def average_score(scores: Mapping[str, float], averaged: Collection[str]) -> float:
    """Return the mean of the main scores of tasks: of those that are ``averaged``, or of all if none of them is."""
    return fmean([score for task, score in scores.items() if task in averaged] or scores.values())


def predictions_of(kind: str, logits: Any) -> Any:
    """Return what a model predicts.

    Args:
        kind: classes, labels or number.
        logits: array or tensor [N, outputs]; of numbers [N, 1], in the unit of the label.

    Returns:
        As ``logits``: classes [N] int64; labels [N, num_labels] bool, those of a probability above 0.5; numbers [N].
    """
    if kind == "classes":
        return logits.argmax(1)
    return logits > 0 if kind == "labels" else logits[:, 0]


def text_scores(kind: str, predictions: np.ndarray, targets: np.ndarray, names: Sequence[str] = ()) -> dict[str, float]:
    """Compute the scores of scikit-learn and scipy, in percent, except for the mean squared error.

    Args:
        predictions, targets: see :func:`predictions_of`. A class among the targets that is no class of the model is wrong.
        names: of the scores: of :data:`SCORES` of the kind, all of them by default, and of two classes also ``f1``, that of
            the second one.

    Returns:
        The scores by name. ``macro_f1`` is the mean over the classes or labels that are present or predicted.
    """
    scores = _all_scores(kind, predictions, targets)
    if "f1" in names:
        from sklearn.metrics import f1_score

        # 0 if neither labels nor predictions have the class, as for any model that does not find it.
        scores["f1"] = 100 * float(f1_score(targets, predictions, pos_label=1, zero_division=0))
    return {name: scores[name] for name in names or scores}


def fit_temperature(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return T between 0.05 and 20 with the least cross-entropy of softmax(logits / T) (Guo et al. 2017, section 4.2).

    One more row has each class in equal shares (as Platt 1999): a few rows that are all right do not make T infinitely small.

    Args:
        logits: [N, classes]; targets: [N] int64, without those that are no class.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    def loss(log_temperature: float) -> float:
        log_probabilities = log_softmax(logits / np.exp(log_temperature), axis=1)
        of_targets = np.take_along_axis(log_probabilities, targets[:, None], axis=1)
        return -float(of_targets.sum() + log_probabilities.mean())

    return float(np.exp(minimize_scalar(loss, bounds=np.log([0.05, 20]), method="bounded").x))


def calibration_error(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the expected calibration error in percent (Guo et al. 2017, equation 3), in 15 bins of equal width: the mean
    distance between the probability of the predicted class and the share of right predictions."""
    from scipy.special import softmax

    probabilities = softmax(logits, axis=1).max(1)
    is_right = logits.argmax(1) == targets
    bins = np.minimum((probabilities * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = np.bincount(bins, probabilities - is_right, NUM_BINS)  # of each bin, times its number of rows
    return 100 * float(np.abs(gaps).sum() / len(targets))


def scores_of_classes(predictions: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> list[list[str]]:
    """Return a row for each class or label: its name, precision, recall and F1 in percent, and how many rows have it."""
    from sklearn.metrics import precision_recall_fscore_support

    columns = precision_recall_fscore_support(targets, predictions, labels=range(len(names)), zero_division=0)
    cells = ([*(f"{100 * value:.1f}" for value in row[:3]), f"{row[3]:,}"] for row in zip(*columns, strict=True))
    return [[name, *row] for name, row in zip(names, cells, strict=True)]


def _all_scores(kind: str, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    # scikit-learn takes a second to import, and training needs it only where it validates.
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

    if kind == "number":
        return {
            "spearman": 100 * correlation(spearmanr, predictions, targets),
            "pearson": 100 * correlation(pearsonr, predictions, targets),
            "mse": float(mean_squared_error(targets, predictions)),
        }
    if kind == "classes":
        return {
            "accuracy": 100 * float(accuracy_score(targets, predictions)),
            "macro_f1": 100 * float(f1_score(targets, predictions, average="macro", zero_division=0)),
            "matthews": 100 * float(matthews_corrcoef(targets, predictions)),
        }
    return label_scores(label_counts(predictions, targets))


def label_counts(predictions: Any, targets: Any) -> Any:
    """Count, for each label, the rows where it is right, predicted, and present: [3, num_labels] int64, of the type of the
    arguments, arrays or tensors [N, num_labels] bool."""
    import torch  # here: amos prepare needs only the names of scores

    stacked = torch.stack if torch.is_tensor(predictions) else np.stack
    return stacked([(predictions & targets).sum(0), predictions.sum(0), targets.sum(0)])


def label_scores(counts: np.ndarray) -> dict[str, float]:
    """Return F1 = 2 right / (predicted + present) in percent, of the sums over all labels (micro), and its mean over the
    labels that are present or predicted (macro), as scikit-learn does; 0 if there are none."""
    right, either = counts[0], counts[1] + counts[2]
    used = either > 0
    if not used.any():
        return {"micro_f1": 0.0, "macro_f1": 0.0}
    micro, macro = 2 * right.sum() / either.sum(), np.mean(2 * right[used] / either[used])
    return {"micro_f1": 100 * float(micro), "macro_f1": 100 * float(macro)}


def correlation(measure: Callable[..., Sequence[Any]], predictions: np.ndarray, labels: np.ndarray) -> float:
    """Compute one of scipy's correlations; 0 if one side is constant, where it is undefined.

    scikit-learn's Matthews correlation does the same. A model that predicts one value for all inputs has learned nothing,
    and its seed must count in the median.
    """
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns about nearly constant values, and returns a number
        value = float(measure(predictions, labels)[0])
    return value if np.isfinite(value) else 0.0
