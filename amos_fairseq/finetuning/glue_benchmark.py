"""GLUE for the shared runner: fairseq's ``sentence_prediction`` trains, predictions and scores are made here."""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from amos_fairseq.checkpoints.read import load_pretrained
from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file
from amos_fairseq.finetuning.glue_data import GlueData, batches, read_glue_data
from amos_fairseq.finetuning.glue_metrics import score
from amos_fairseq.finetuning.glue_tasks import TASKS
from amos_fairseq.finetuning.starting_point import StartingPoint

HEAD = "sentence_classification_head"


class Glue:
    """Prepared tasks in one directory, for one checkpoint.

    Raises:
        UserError: a task is not prepared, or with another tokenizer than the checkpoint's.
    """

    name = "glue"

    def __init__(self, data: Path, tasks: Sequence[str], start: StartingPoint) -> None:
        if not data.is_dir():
            raise UserError(f"{data} is no directory: name what preprocess/glue/prepare.sh wrote with --data")
        self.data = data.resolve()
        self.max_positions = start.max_positions
        self.prepared = {task: read_glue_data(self.data, task) for task in tasks}
        start.check_tokenizer(self.data / "tokenizer")
        self.tasks = {task: prepared.as_task() for task, prepared in self.prepared.items()}

    def train_flags(self, task: str) -> list[str]:
        """See :class:`~amos_fairseq.finetuning.benchmark.Benchmark`."""
        facts, prepared = TASKS[task], self.prepared[task]
        flags = [str(prepared.directory), "--task", "sentence_prediction", "--criterion", "sentence_prediction"]
        flags += ["--num-classes", str(prepared.record["num_classes"]), "--init-token", "0"]
        # What is longer than the encoder reads loses its end, in training as in scoring.
        flags += ["--shorten-method", "truncate", "--classification-head-name", HEAD]
        flags += ["--best-checkpoint-metric", facts.fairseq_metric, "--maximize-best-checkpoint-metric"]
        flags += ["--regression-target"] if prepared.is_regression else []
        return flags + ([facts.report_flag] if facts.report_flag else [])

    def furnish(self, task: str, directory: Path) -> None:
        """``tokenizer/`` and, for a classification, ``labels.txt``: a class name a line."""
        shutil.copytree(self.data / "tokenizer", directory / "tokenizer", dirs_exist_ok=True)
        names = self.prepared[task].label_names
        if names:
            with whole_file(str(directory / "labels.txt")) as unfinished:
                Path(unfinished).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Scores by name, those of MNLI's mismatched set with ``_mm``; predictions go to ``predictions.SPLIT.tsv``."""
        prepared, scores = self.prepared[task], {}
        splits = {split: suffix for split, suffix in TASKS[task].dev_splits.items() if prepared.has(split)}
        predictions = predict(prepared, checkpoint, list(splits), self.max_positions, device, stop)
        for split, suffix in splits.items():
            labels = prepared.labels(split)
            write_predictions(directory / f"predictions.{split}.tsv", prepared, split, predictions[split], labels)
            scores |= {
                f"{name}{suffix}": value for name, value in score(TASKS[task], predictions[split], labels).items()
            }
        return scores


def predict(
    data: GlueData, checkpoint: Path, splits: Sequence[str], max_positions: int, device: str, stop: threading.Event
) -> dict[str, np.ndarray]:
    """What a fine-tuned checkpoint says of each row: class numbers [N] int64, or values [N] float64 of a regression.

    In float32 and without dropout, whatever precision the training had.

    Raises:
        Stopped: ``stop`` is set.
    """
    pretrained = load_pretrained(checkpoint)
    model = pretrained.model.to(device)
    predicted = {}
    for split in splits:
        texts = data.texts(split, max_positions)
        logits = np.empty((len(texts), 1 if data.is_regression else len(data.label_names)))
        for rows, tokens in batches(texts, pretrained.dictionary.pad(), stop):
            with torch.inference_mode():
                output, _ = model(tokens.to(device), features_only=True, classification_head_name=HEAD)
            logits[rows] = output.float().cpu().numpy()
        predicted[split] = logits[:, 0] if data.is_regression else logits.argmax(axis=1)
    return predicted


def write_predictions(file: Path, data: GlueData, split: str, predictions: np.ndarray, labels: np.ndarray) -> None:
    """A table of index, prediction and label, by name."""
    with whole_file(str(file)) as unfinished, open(unfinished, "w", encoding="utf-8") as stream:
        stream.write("index\tprediction\tlabel\n")
        for index, prediction, label in zip(data.ids(split), predictions, labels, strict=True):
            stream.write(f"{index}\t{spelled(data, prediction)}\t{spelled(data, label)}\n")


def spelled(data: GlueData, value: float) -> str:
    """A class by its name; a value of a regression with four digits."""
    return f"{value:.4f}" if data.is_regression else data.label_names[int(value)]
