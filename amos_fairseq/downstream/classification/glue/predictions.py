"""Predictions and scores of GLUE's splits with a fine-tuned checkpoint."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.downstream.classification.command import predict_logits, spell_predictions
from amos_fairseq.downstream.classification.glue.data import GlueData
from amos_fairseq.downstream.classification.glue.tasks import DIAGNOSTIC, INTERMEDIATE_TASK, TASKS, GlueTask
from amos_fairseq.downstream.classification.scores import correlation, predictions_of, text_scores
from amos_fairseq.files import write_text

POSITIVE_CLASS = 1  # "1" of MRPC and QQP: a paraphrase


def predict_splits(
    data: GlueData,
    loaded: LoadedCheckpoint,
    splits: Sequence[str],
    max_positions: int,
    device: str,
    stop: threading.Event,
) -> dict[str, np.ndarray]:
    """Predict splits with a fine-tuned checkpoint: class indices [N] int64, or values of a regression [N] float64.

    The diagnostic set is predicted by the head of MNLI.

    Raises:
        Stopped: ``stop`` is set.
    """
    predicted, task = {}, INTERMEDIATE_TASK if data.name == DIAGNOSTIC else data.name
    for split in splits:
        rows = data.inputs(split, max_positions, loaded.separator)
        logits = predict_logits(loaded, [rows[index] for index in range(len(rows))], device, stop, task)
        predicted[split] = predictions_of(data.record["kind"], logits)
    return predicted


def predict_train(
    data: GlueData, loaded: LoadedCheckpoint, max_positions: int, device: str, stop: threading.Event
) -> np.ndarray:
    """Return the outputs of the head for the rows to train on: [N, outputs] float64; see :func:`predict_splits`."""
    return predict_logits(loaded, data.train_inputs(max_positions, loaded.separator), device, stop, data.name)


def write_prediction_table(file: Path, data: GlueData, split: str, predictions: np.ndarray, labels: np.ndarray) -> None:
    """Write a table of index, prediction and label; see :func:`spell`."""
    rows = zip(data.ids(split), spell(data, predictions), spell(data, labels), strict=True)
    write_text(file, "index\tprediction\tlabel\n" + "".join("\t".join(row) + "\n" for row in rows))


def spell(data: GlueData, values: np.ndarray) -> list[str]:
    """Return predictions or labels as cells of a table: classes by name, values of STS-B with four decimals, others as those of
    ``amos classify``."""
    if data.name in TASKS and data.is_regression:
        return [f"{value:.4f}" for value in values]
    return spell_predictions(data.record["kind"], data.label_names, values)


def score_split(data: GlueData, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Score one dev split: GLUE's by :func:`score`, tasks of one's own by
    :func:`~amos_fairseq.downstream.classification.scores.text_scores`."""
    if data.name in TASKS:
        return score(TASKS[data.name], predictions, labels)
    return text_scores(data.record["kind"], predictions, labels)


def score(task: GlueTask, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Score one dev split with scikit-learn and scipy, in percent.

    Args:
        predictions, labels: [N] class indices, or values of a regression.

    Returns:
        ``matthews`` and ``accuracy`` for CoLA; ``spearman`` and ``pearson`` for STS-B; ``accuracy`` for the others, with
        ``f1`` of the positive class for MRPC and QQP.
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
        # 0 if neither labels nor predictions have a positive, as for any model that finds no positive.
        scores["f1"] = 100 * float(f1_score(labels, predictions, pos_label=POSITIVE_CLASS, zero_division=0))
    return scores
