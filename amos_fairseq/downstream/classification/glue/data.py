"""Prepared GLUE data for evaluation: the files that ``amos prepare glue`` wrote, in their order."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from amos_fairseq.downstream.benchmark import BenchmarkTask
from amos_fairseq.downstream.classification.dataset import (
    PREPARE_AGAIN,
    TASK_FILE,
    ShortenedTexts,
    check_texts,
    chosen_rows,
    open_texts,
    read_targets,
    read_task_record,
)
from amos_fairseq.downstream.classification.glue.tasks import DIAGNOSTIC, TASKS
from amos_fairseq.downstream.classification.scores import main_score
from amos_fairseq.downstream.recipes import Hyperparameters
from amos_fairseq.downstream.results import content_sha256
from amos_fairseq.errors import UserError
from amos_fairseq.strangers import read_text

# Readers of QQP count its broken lines differently; a rebuilt or truncated file differs by more.
ROWS_TOLERANCE = 0.001
# The fields of task.json that, with the source files, determine the data.
IDENTITY_FIELDS = ("task", "kind", "labels", "tokenizer_sha256", "max_train_rows", "seed")


@dataclass(frozen=True)
class GlueData:
    """The data of one task.

    Attributes:
        directory: ``OUT/TASK`` with ``input0``, ``label`` and, for pairs, ``input1``.
        record: content of ``task.json``.
        max_rows: number of training rows, if there are more.
    """

    directory: Path
    record: dict[str, Any]
    max_rows: int | None = None

    @property
    def name(self) -> str:
        return self.record["task"]

    @property
    def main_score(self) -> str:
        return main_score(self.name, self.record["kind"])

    @property
    def dev_splits(self) -> dict[str, str]:
        """Dev split -> suffix of its scores."""
        splits = TASKS[self.name].dev_splits if self.name in TASKS else {"valid": ""}
        return {split: suffix for split, suffix in splits.items() if self.has(split)}

    @property
    def num_train(self) -> int:
        rows = self.record["splits"]["train"]["rows"]
        return rows if self.max_rows is None else min(rows, self.max_rows)

    @property
    def is_regression(self) -> bool:
        return self.record["kind"] == "number"

    @property
    def label_names(self) -> list[str]:
        """Names in the order of the classes; empty for a regression."""
        return self.record["labels"]

    def has(self, split: str) -> bool:
        return split in self.record["splits"]

    def as_task(self, max_positions: int, trials: tuple[Hyperparameters, ...]) -> BenchmarkTask:
        """Return the task for a model of ``max_positions`` and the recipe's trials."""
        notes = (*self.notes(), *self.notes_on_cut_rows(max_positions, {trial.separator for trial in trials}))
        return BenchmarkTask(self.name, self.num_train, self.main_score, self.sha256(), trials, notes)

    def sha256(self) -> str:
        """Return a fingerprint of the data that runs are trained and scored on. Test files do not change it."""
        fields = {name: self.record.get(name) for name in IDENTITY_FIELDS}
        splits = {
            split: [facts.get("sha256"), facts["rows"]]
            for split, facts in self.record["splits"].items()
            if not split.startswith("test")
        }
        return content_sha256(fields | {"splits": splits})

    def rows_identity(self) -> dict[str, Any]:
        """Return what says which training rows these are, for any tokenizer: source, number, choice and labels."""
        facts = self.record["splits"]["train"]
        chosen = {"source_sha256": facts.get("sha256"), "rows": self.num_train, "of_rows": facts["rows"]}
        chosen |= {name: self.record.get(name) for name in ("max_train_rows", "seed")}
        return {"task": self.name, "kind": self.record["kind"], "labels": self.label_names} | chosen

    def notes(self) -> Iterator[str]:
        name = self.name
        official_rows = TASKS[name].official_rows if name in TASKS else {}
        for split, facts in self.record["splits"].items():
            official, source = official_rows.get(split), facts.get("source_rows", facts["rows"])
            if official and abs(source - official) > ROWS_TOLERANCE * official and not split.startswith("test"):
                yield (
                    f"{name}: the {split} file ({facts.get('source', split)}) has {source:,} rows, the official one "
                    f"{official:,}; the scores are not comparable with published ones"
                )
            if split == "train" and self.num_train < source:
                yield f"{name}: trained on {self.num_train:,} of {source:,} rows"
        yield from (f"{name}: {note}" for note in self.record.get("notes", ()))

    def notes_on_cut_rows(self, max_positions: int, separators: Collection[int | None]) -> Iterator[str]:
        """Yield a footnote if rows of training or dev sets are longer than the model reads."""
        counts = []
        for split, facts in self.record["splits"].items():
            if not split.startswith("test"):
                num_cut = max(self.inputs(split, max_positions, separator).num_cut for separator in separators)
                counts += [f"{num_cut:,} of {facts['rows']:,} in {split}"] if num_cut else []
        if counts:
            yield (
                f"{self.record['task']}: rows of more than {max_positions} tokens are cut, of a pair the longer text first: "
                + ", ".join(counts)
            )

    def inputs(self, split: str, max_positions: int, separator: int | None) -> ShortenedTexts:
        """Return the inputs as training reads them, in the order of the file: LongTensors [L] of at most
        ``max_positions`` tokens; ``separator``: value of ``--separator-token``."""
        return open_texts(self.directory, split, max_positions, separator)

    def train_inputs(self, max_positions: int, separator: int | None) -> list[Tensor]:
        """Return the inputs of the rows to train on; see :meth:`inputs`."""
        rows = self.inputs("train", max_positions, separator)
        return [rows[index] for index in chosen_rows(len(rows), self.max_rows)]

    def labels(self, split: str) -> np.ndarray:
        """Return class indices [N] int64, or the values of a regression [N] float64."""
        return read_targets(self.directory, split, self.record)

    def ids(self, split: str) -> list[str]:
        """Return the leaderboard's ids; row numbers if the file has no ids."""
        file = self.directory / f"{split}.ids"
        if file.is_file():
            return read_text(file, PREPARE_AGAIN).split("\n")[:-1]  # an id can contain other characters that end a line
        return [str(i) for i in range(self.record["splits"][split]["rows"])]


def read_glue_data(data: Path, task: str, max_rows: int | None = None) -> GlueData:
    """Read the record of a task that ``amos prepare glue`` wrote into ``data``, and check its files."""
    hint = (
        f"give the folder that contains the task folders of GLUE, or run amos prepare glue GLUE_DIR {task} TOKENIZER_DIR "
        f"--out {data}"
    )
    return read_task_data(data / task, task, hint, max_rows)


def read_task_data(directory: Path, task: str, hint: str, max_rows: int | None = None) -> GlueData:
    """Read the record of a task in its own directory, and check its files; ``hint``: how to write the directory."""
    record = read_task_record(directory, hint)
    if record["task"] != task:
        raise UserError(f"{directory} holds {record['task']}, not {task}: {PREPARE_AGAIN}")
    if task != DIAGNOSTIC and not {"train", "valid"} <= record["splits"].keys():
        raise UserError(f"{directory / TASK_FILE} lacks train or valid: {PREPARE_AGAIN}")
    for split in record["splits"]:
        check_texts(directory, split)
    return GlueData(directory, record, max_rows)
