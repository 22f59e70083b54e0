"""Predictions of training rows: what ``--write-train`` writes, and what ``--teachers`` reads to train another model with.

``TASK.tsv`` has a row for each training row, in their order: its number from 0 on, and the probability of each label, or the
number that is predicted for it. ``TASK.json`` beside it says which rows they are; other programs need not write it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, softmax

from amos_fairseq import strangers
from amos_fairseq.data.table_files import TableFile
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, write_text
from amos_fairseq.finetuning.glue.data import GlueData
from amos_fairseq.finetuning.runs import content_sha256, read_results
from amos_fairseq.finetuning.summary import summarize
from amos_fairseq.fingerprint import file_sha256

INDEX, NUMBER = "index", "score"  # columns
FOLDER = "train"  # in the directory of a run
MULTI = "multi"  # the name of the run of all tasks
SUM_TOLERANCE = 1e-3  # of probabilities with three decimals and more


def columns_of(data: GlueData) -> list[str]:
    """Return the columns beside the index: the labels, or one for a number."""
    return data.label_names or [NUMBER]


def write_train_predictions(directory: Path, data: GlueData, logits: np.ndarray) -> None:
    """Write ``TASK.tsv`` and ``TASK.json`` into ``directory``.

    Args:
        logits: [N, outputs] float64, in the order of the training rows; of a regression the values.
    """
    kind, name = data.record["kind"], data.record["task"]
    values = {"classes": lambda: softmax(logits, axis=1), "labels": lambda: expit(logits), "number": lambda: logits}[
        kind
    ]()
    lines = ("\t".join([str(index), *(f"{value:.7g}" for value in row)]) for index, row in enumerate(values))
    directory.mkdir(exist_ok=True)
    write_text(directory / f"{name}.tsv", "\n".join(["\t".join([INDEX, *columns_of(data)]), *lines, ""]))
    write_text(directory / f"{name}.json", json_text(data.rows_identity()))


def has_train_predictions(directory: Path, task: str) -> bool:
    """Return whether a run has written the predictions of the training rows of a task."""
    return (directory / FOLDER / f"{task}.json").is_file()


def read_predictions(file: Path, data: GlueData) -> np.ndarray:
    """Return the predictions of another model for the training rows of ``data``: [N, outputs] float32.

    Raises:
        UserError: they are of other rows or labels, or no probabilities.
    """
    _check_rows(file, data)
    kind, names, rows = data.record["kind"], columns_of(data), data.num_train
    table = TableFile(file)
    if sorted(table.columns) != sorted([INDEX, *names]):
        raise UserError(
            f"{file} has the columns {', '.join(table.columns)}, the task {INDEX}, {', '.join(names)}: give predictions for "
            "this task"
        )
    values = np.zeros((rows, len(names)))
    count = 0
    for line, row in table.rows():
        where = f"{file}, line {line}"
        try:
            numbers = [strangers.finite_number(float(row[name])) for name in names]
            index = int(row[INDEX])
        except ValueError as error:
            raise UserError(f"{where}: {error}: each row needs an index and finite numbers") from error
        if index != count or count >= rows:
            raise UserError(
                f"{where} is row {index}, expected were {rows:,} rows from 0 on, in the order of the training rows: give "
                "predictions for these rows"
            )
        values[count] = numbers
        count += 1
    if table.broken_lines:
        raise UserError(f"{file}, line {table.broken_lines[0]} has another number of columns: correct it")
    if count != rows:
        raise UserError(f"{file} has {count:,} rows, the training set {rows:,}: give predictions for these rows")
    if kind == "number":
        return values.astype(np.float32)
    if values.min() < 0 or values.max() > 1 + SUM_TOLERANCE:
        raise UserError(f"{file} has values that are no probabilities, from 0 to 1: give those of each label")
    if kind == "classes":
        sums = values.sum(axis=1, keepdims=True)
        if worst := int(np.abs(sums - 1).argmax() + 1) if np.abs(sums - 1).max() > SUM_TOLERANCE else 0:
            raise UserError(f"{file}, row {worst - 1}: the probabilities have the sum {sums[worst - 1, 0]:.4g}, not 1")
        values = values / sums
    return values.astype(np.float32)


def _check_rows(file: Path, data: GlueData) -> None:
    """Raise :class:`UserError` if the record beside the predictions names other rows than those of ``data``."""
    beside = file.with_suffix(".json")
    found = strangers.read_json(beside, "delete it, or give other predictions", optional=True)
    if found is None:
        return
    for name, here in data.rows_identity().items():
        if name in found and found[name] != here:
            shown = [f"{str(value)[:40]}" for value in (found[name], here)]
            raise UserError(
                f"{file} has predictions for other rows than those to train on ({name.replace('_', ' ')}: {shown[0]} there, "
                f"{shown[1]} here): give those for the same files and the same --max-rows"
            )


@dataclass(frozen=True)
class Teachers:
    """The predictions that train beside the labels.

    Args:
        folder: ``--out`` of ``amos glue --write-train``, or a folder of ``TASK.tsv``.
        gold_weight: value of ``--gold-weight`` of ``fairseq-train``.
        ensemble: take the mean of all seeds; else each seed learns from the same seed.

    Raises:
        UserError: the folder has no predictions.
    """

    folder: Path
    gold_weight: str
    ensemble: bool = False
    files: dict[str, dict[int | None, Path]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise UserError(
                f"--teachers {self.folder} is no directory: give an --out of amos glue, or a folder of TASK.tsv"
            )
        results = read_results(self.folder)
        summaries = summarize(results)
        for result in results:
            if result.trial == summaries[result.task].trial:
                for file in sorted((self.folder / result.directory / FOLDER).glob("*.tsv")):
                    # A model of its own teaches a task rather than one of all tasks.
                    if result.task == file.stem or file.stem not in summaries:
                        self.files.setdefault(file.stem, {})[result.seed] = file
        for file in sorted(self.folder.glob("*.tsv")):
            self.files.setdefault(file.stem, {None: file})
        if not self.files:
            raise UserError(
                f"--teachers {self.folder} holds no predictions of training rows: repeat its command with --write-train"
            )
        if self.ensemble and all(len(own) == 1 for own in self.files.values()):
            raise UserError(f"--ensemble: {self.folder} has one teacher for each task: leave it out")

    def files_for(self, task: str, seed: int) -> list[Path]:
        """Return the predictions that a run learns from; raise :class:`UserError` if there are none for this seed."""
        if task not in self.files:
            known = ", ".join(self.files)
            raise UserError(
                f"--teachers {self.folder} has no predictions for {task} (it has {known}): leave that out of --tasks"
            )
        own = self.files[task]
        if self.ensemble:
            return list(own.values())
        if None not in own and seed not in own:
            raise UserError(
                f"--teachers {self.folder} has predictions for {task} of the seeds {', '.join(map(str, sorted(own)))} and none "
                f"of seed {seed}: give --seeds {max(own)}, or --ensemble"
            )
        return [own.get(seed) or own[None]]

    def predictions(self, data: GlueData, seed: int) -> np.ndarray:
        """Return the mean of the predictions that a run of this seed learns from: [N, outputs] float32.

        Raises:
            UserError: there are none, or they are of other rows.
        """
        files = self.files_for(data.record["task"], seed)
        return np.mean([read_predictions(file, data) for file in files], axis=0, dtype=np.float64).astype(np.float32)

    def identity(self, tasks: list[str], seed: int) -> dict[str, Any]:
        """Return what of the teachers determines the result of a run, as plain values."""
        files = {task: [file_sha256(file) for file in self.files_for(task, seed)] for task in tasks}
        return {"gold_weight": self.gold_weight, "teachers_sha256": content_sha256(files)}

    @property
    def settings(self) -> dict[str, Any]:
        """What all runs with these teachers share, as plain values."""
        return {"ensemble": self.ensemble, "gold_weight": self.gold_weight}
