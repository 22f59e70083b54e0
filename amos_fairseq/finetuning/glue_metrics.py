"""Scores of predictions, by scikit-learn and scipy, in percent."""

import warnings

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from amos_fairseq.finetuning.glue_tasks import GlueTask

POSITIVE_CLASS = 1  # "1" of MRPC and QQP: a paraphrase


def score(task: GlueTask, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Scores of one dev split.

    Args:
        predictions: [N] class numbers, or values of a regression.
        labels: [N] likewise.

    Returns:
        ``matthews`` and ``accuracy`` for CoLA; ``spearman`` and ``pearson`` for STS-B; ``accuracy``, for MRPC and QQP with
        ``f1`` of the positive class, for the rest.
    """
    if task.main_score == "spearman":
        return {
            "spearman": 100 * correlation(spearmanr, predictions, labels),
            "pearson": 100 * correlation(pearsonr, predictions, labels),
        }
    scores = {"accuracy": 100 * float(accuracy_score(labels, predictions))}
    if task.main_score == "matthews":
        scores = {"matthews": 100 * float(matthews_corrcoef(labels, predictions)), **scores}
    if task.with_f1:
        # 0 where neither labels nor predictions have a positive, as elsewhere where nothing is found.
        scores["f1"] = 100 * float(f1_score(labels, predictions, pos_label=POSITIVE_CLASS, zero_division=0))
    return scores


def correlation(measure: "type[spearmanr]", predictions: np.ndarray, labels: np.ndarray) -> float:
    """A correlation of scipy's; 0 where one side is constant and it is not defined.

    So is Matthews' correlation in scikit-learn: a model that gives every row the same value has learned nothing, and its
    seed must stay in the median.
    """
    if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # values that are nearly constant: scipy warns and gives a number
        value = float(measure(predictions, labels)[0])
    return value if np.isfinite(value) else 0.0
