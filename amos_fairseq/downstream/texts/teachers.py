"""Predictions of training rows: what ``--write-train`` writes, and what ``--teachers`` reads to train another model with.

``TASK.tsv`` has a row for each training row, in their order: its number from 0 on, and the probability of each label, or the
number that is predicted for it. ``TASK.json`` beside it says which rows they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from amos_fairseq.downstream.texts.command import TextData
from amos_fairseq.downstream.texts.task import ANNEALED, gold_weight_of
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import content_sha256, read_summary
from amos_fairseq.files import file_sha256, json_text, write_text
from amos_fairseq.untrusted import read_json

INDEX, NUMBER = "index", "score"  # columns
FOLDER = "train"  # in the directory of a run
MULTI = "multi"  # the name of the run of all tasks


def write_train_predictions(directory: Path, data: TextData, logits: np.ndarray) -> None:
    """Write ``TASK.tsv`` and ``TASK.json``; ``logits``: [N, outputs] in the order of the training rows."""
    kind = data.record["kind"]
    values = softmax(logits, axis=1) if kind == "classes" else expit(logits) if kind == "labels" else logits
    lines = ("\t".join([str(index), *(f"{value:.7g}" for value in row)]) for index, row in enumerate(values))
    directory.mkdir(exist_ok=True)
    file = directory / f"{data.name}.tsv"
    write_text(file, "\n".join(["\t".join([INDEX, *(data.label_names or [NUMBER])]), *lines, ""]))
    write_text(file.with_suffix(".json"), json_text(data.rows_identity()))


def read_predictions(file: Path, data: TextData) -> tuple[np.ndarray, str]:
    """Return the predictions of another model for the training rows of ``data``, [rows, outputs] float32, and the sha256 of
    the file."""
    if read_json(file.with_suffix(".json"), "write it again with --write-train") != data.rows_identity():
        raise UserError(f"{file} is for other rows: give the same files, or write it with --write-train")
    values = np.loadtxt(file, delimiter="\t", skiprows=1, ndmin=2)[:, 1:]
    if data.kind == "classes":  # seven digits are written
        values = values / values.sum(axis=1)[:, None]
    return values.astype(np.float32), file_sha256(file)


@dataclass
class Teachers:
    """The predictions that train beside the labels; :func:`read_teachers` finds them.

    Attributes:
        files: the predictions of each task by seed.
        gold_weight: value of ``--gold-weight`` of ``fairseq-train``.
        ensemble: take the mean of all seeds; else each seed learns from the same seed.
    """

    folder: Path
    files: dict[str, dict[int, Path]]
    gold_weight: str
    ensemble: bool
    _read: dict[Path, tuple[np.ndarray, str]] = field(default_factory=dict)  # each file is read once

    def _predictions_for(self, data: TextData, seed: int) -> list[tuple[np.ndarray, str]]:
        """Return what :func:`read_predictions` returns of each file that a run learns from."""
        by_seed = self.files.get(data.name, {})
        files = list(by_seed.values()) if self.ensemble else [by_seed.get(seed)]
        if not by_seed or None in files:
            which = f"{data.name}{'' if self.ensemble else f' of seed {seed}'}"
            known = ", ".join(f"{task} (seeds {', '.join(map(str, seeds))})" for task, seeds in self.files.items())
            raise UserError(f"--teachers {self.folder} has no predictions for {which}; it has {known}")
        for file in files:
            if file not in self._read:
                self._read[file] = read_predictions(file, data)
        return [self._read[file] for file in files]

    def predictions(self, data: TextData, seed: int) -> np.ndarray:
        """Return the mean of the predictions that a run of this seed learns from: [N, outputs] float32."""
        arrays = [array for array, _ in self._predictions_for(data, seed)]
        return np.mean(arrays, axis=0, dtype=np.float64).astype(np.float32)

    def identity(self, tasks: Sequence[TextData], seed: int) -> dict[str, Any]:
        """Return what of the teachers determines the result of a run, as plain values."""
        read = {data.name: [sha256 for _, sha256 in self._predictions_for(data, seed)] for data in tasks}
        return {"gold_weight": self.gold_weight, "teachers_sha256": content_sha256(read)}

    def note(self) -> str:
        weight = "from 0 to 1 over the updates" if self.gold_weight == ANNEALED else self.gold_weight
        which = "the mean of all seeds" if self.ensemble else "each seed by the same seed"
        return f"taught by {self.folder.name}, {which}; weight of the labels: {weight}"


def read_teachers(folder: Path, gold_weight: str | None, ensemble: bool = False) -> Teachers:
    """Find the teachers in ``--out`` of ``amos glue --write-train``."""
    weight = ANNEALED if gold_weight in (None, ANNEALED) else str(gold_weight_of(gold_weight))
    summary, files = read_summary(folder, "glue", "amos glue"), {}
    for run in summary.runs if summary else ():
        file = folder / run.directory / FOLDER / f"{run.task}.tsv"
        if run.trial == summary.tasks[run.task].trial and file.is_file():
            files.setdefault(run.task, {})[run.seed] = file
    if not files:
        raise UserError(f"--teachers {folder} holds no predictions of training rows: make them with --write-train")
    return Teachers(folder.resolve(), files, weight, ensemble)
