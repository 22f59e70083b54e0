"""Predictions and scores of GLUE's splits with a fine-tuned checkpoint."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.glue_tasks import TASKS, GlueTask
from amos_fairseq.data.labeled_texts import UNKNOWN_CLASS
from amos_fairseq.data.text_scores import correlation, predictions_of, text_scores
from amos_fairseq.files import write_text
from amos_fairseq.finetuning.classification import UNKNOWN_NAME, predict_logits
from amos_fairseq.finetuning.glue.data import GlueData

POSITIVE_CLASS = 1  # "1" of MRPC and QQP: a paraphrase


def predict_splits(
    data: GlueData, checkpoint: Path, splits: Sequence[str], max_positions: int, device: str, stop: threading.Event
) -> dict[str, np.ndarray]:
    """Predict splits with a fine-tuned checkpoint: class indices [N] int64, or values of a regression [N] float64.

    Raises:
        Stopped: ``stop`` is set.
    """
    loaded, predicted = load_checkpoint(checkpoint), {}
    for split in splits:
        rows = data.inputs(split, max_positions, loaded.separator)
        logits = predict_logits(loaded, [rows[index] for index in range(len(rows))], device, stop, data.name)
        predicted[split] = predictions_of(data.record["kind"], logits)
    return predicted


def predict_train(
    data: GlueData, checkpoint: Path, max_positions: int, device: str, stop: threading.Event
) -> np.ndarray:
    """Return the outputs of the head for the rows to train on: [N, outputs] float64; see :func:`predict_splits`."""
    loaded = load_checkpoint(checkpoint)
    return predict_logits(loaded, data.train_inputs(max_positions, loaded.separator), device, stop, data.name)


def write_prediction_table(file: Path, data: GlueData, split: str, predictions: np.ndarray, labels: np.ndarray) -> None:
    """Write a table of index, prediction and label; classes by name, values of a regression with four decimals, several labels
    as a JSON list."""

    def spell(value: Any) -> str:
        if data.record["kind"] == "labels":
            return json.dumps([data.label_names[index] for index in np.flatnonzero(value)], ensure_ascii=False)
        return f"{value:.4f}" if data.is_regression else spell_class(int(value))

    def spell_class(value: int) -> str:
        return UNKNOWN_NAME if value == UNKNOWN_CLASS else data.label_names[value]

    rows = zip(data.ids(split), predictions, labels, strict=True)
    lines = (f"{index}\t{spell(prediction)}\t{spell(label)}\n" for index, prediction, label in rows)
    write_text(file, "index\tprediction\tlabel\n" + "".join(lines))


def score_split(data: GlueData, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Score one dev split: GLUE's by :func:`score`, tasks of one's own by
    :func:`~amos_fairseq.data.text_scores.text_scores`."""
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
