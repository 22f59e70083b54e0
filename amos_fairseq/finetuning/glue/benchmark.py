"""GLUE for the shared runner: fairseq's ``sentence_prediction`` trains; this file predicts and scores."""

import shutil
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.glue_tasks import TASKS, GlueTask
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text
from amos_fairseq.finetuning.glue.data import GlueData, batches, read_glue_data
from amos_fairseq.finetuning.pretrained_checkpoint import PretrainedCheckpoint
from amos_fairseq.finetuning.recipes import Recipe

HEAD = "sentence_classification_head"
POSITIVE_CLASS = 1  # "1" of MRPC and QQP: a paraphrase


class Glue:
    """Prepared tasks in one directory, for one checkpoint and the settings of one recipe.

    Raises:
        UserError: the recipe lacks a task; a task has not been prepared, or with a tokenizer other than the checkpoint's.
    """

    name = "glue"

    def __init__(self, data: Path, tasks: Sequence[str], checkpoint: PretrainedCheckpoint, recipe: Recipe) -> None:
        if not data.is_dir():
            raise UserError(f"{data} is not a directory: give the one that preprocess/glue/prepare.sh wrote as --data")
        self.data = data.resolve()
        self.max_positions = checkpoint.max_positions
        self.prepared = {task: read_glue_data(self.data, task) for task in tasks}
        checkpoint.check_tokenizer(self.data / "tokenizer")
        self.tasks = {
            task: prepared.as_task(self.max_positions, {trial.separator for trial in recipe.trials_of(task)})
            for task, prepared in self.prepared.items()
        }

    def train_flags(self, task: str) -> list[str]:
        """See :class:`~amos_fairseq.finetuning.benchmark.Benchmark`."""
        facts, prepared = TASKS[task], self.prepared[task]
        flags = [str(prepared.directory), "--task", "sentence_prediction", "--criterion", "sentence_prediction"]
        flags += ["--num-classes", str(prepared.record["num_classes"]), "--init-token", "0"]
        # compat/truncation.py: the longer text of a pair is cut first, in training as in evaluation.
        flags += ["--shorten-method", "truncate", "--classification-head-name", HEAD]
        flags += ["--best-checkpoint-metric", facts.fairseq_metric, "--maximize-best-checkpoint-metric"]
        flags += ["--regression-target"] if prepared.is_regression else []
        return flags + ([facts.report_flag] if facts.report_flag else [])

    def copy_tokenizer_and_labels(self, task: str, directory: Path) -> None:
        """Copy ``tokenizer/`` and, for a classification, write ``labels.txt`` with one class name per line."""
        shutil.copytree(self.data / "tokenizer", directory / "tokenizer", dirs_exist_ok=True)
        names = self.prepared[task].label_names
        if names:
            write_text(directory / "labels.txt", "".join(f"{name}\n" for name in names))

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Return the scores by name and write ``predictions.SPLIT.tsv``. Scores of MNLI's mismatched set end in ``_mm``."""
        prepared, scores = self.prepared[task], {}
        suffixes = {split: suffix for split, suffix in TASKS[task].dev_splits.items() if prepared.has(split)}
        predictions = predict(prepared, checkpoint, list(suffixes), self.max_positions, device, stop)
        for split, suffix in suffixes.items():
            labels = prepared.labels(split)
            write_predictions(directory / f"predictions.{split}.tsv", prepared, split, predictions[split], labels)
            found = score(TASKS[task], predictions[split], labels)
            scores |= {f"{name}{suffix}": value for name, value in found.items()}
        return scores


def predict(
    data: GlueData, checkpoint: Path, splits: Sequence[str], max_positions: int, device: str, stop: threading.Event
) -> dict[str, np.ndarray]:
    """Predict splits with a fine-tuned checkpoint: class indices [N] int64, or values of a regression [N] float64.

    The prediction runs in float32 and without dropout, whatever the precision of the training.

    Raises:
        Stopped: ``stop`` is set.
    """
    loaded = load_checkpoint(checkpoint)
    model = loaded.model.to(device)
    predicted = {}
    for split in splits:
        rows = data.inputs(split, max_positions, loaded.separator)
        sequences = [rows[index] for index in range(len(rows))]
        logits = np.empty((len(sequences), 1 if data.is_regression else len(data.label_names)))
        for indices, tokens in batches(sequences, loaded.dictionary.pad(), stop):
            with torch.inference_mode():
                output, _ = model(tokens.to(device), features_only=True, classification_head_name=HEAD)
            logits[indices] = output.float().cpu().numpy()
        predicted[split] = logits[:, 0] if data.is_regression else logits.argmax(axis=1)
    return predicted


def write_predictions(file: Path, data: GlueData, split: str, predictions: np.ndarray, labels: np.ndarray) -> None:
    """Write a table of index, prediction and label; classes by name, values of a regression with four decimals."""

    def spell(value: float) -> str:
        return f"{value:.4f}" if data.is_regression else data.label_names[int(value)]

    rows = zip(data.ids(split), predictions, labels, strict=True)
    lines = (f"{index}\t{spell(prediction)}\t{spell(label)}\n" for index, prediction, label in rows)
    write_text(file, "index\tprediction\tlabel\n" + "".join(lines))


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


def correlation(measure: "type[spearmanr]", predictions: np.ndarray, labels: np.ndarray) -> float:
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
