"""Prepared GLUE data as the evaluation reads them: what ``preprocess/glue/prepare.sh`` wrote, in the order of the files."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.benchmark import Stopped, Task
from amos_fairseq.finetuning.glue_tasks import TASKS
from amos_fairseq.finetuning.plan import content_sha256, read_json

TOKENS_PER_BATCH = 8192
# Broken lines are counted differently by different readers of QQP; a rebuilt or cut file differs by more.
ROWS_TOLERANCE = 0.001
# Parts of task.json that decide, with the source files, what the rows are.
SHAPING_FACTS = ("task", "kind", "labels", "tokenizer_sha256", "max_train_rows", "seed")

_FACTS = {"task": str, "kind": str, "labels": list, "splits": dict}


@dataclass(frozen=True)
class GlueData:
    """The data of one task.

    Attributes:
        directory: ``OUT/TASK`` with ``input0``, ``label`` and, for pairs, ``input1``.
        record: content of ``task.json``.
    """

    directory: Path
    record: dict[str, Any]

    @property
    def is_regression(self) -> bool:
        return self.record["kind"] == "regression"

    @property
    def label_names(self) -> list[str]:
        """In the order of the classes; empty for a regression."""
        return self.record["labels"]

    def has(self, split: str) -> bool:
        return split in self.record["splits"]

    def as_task(self) -> Task:
        """What the runner has to know."""
        name = self.record["task"]
        rows = self.record["splits"]["train"]["rows"]
        return Task(name, rows, TASKS[name].main_score, self.sha256(), tuple(self.notes()))

    def sha256(self) -> str:
        """Fingerprint of what runs are trained and scored on; test files may come later and change nothing of it."""
        facts = {name: self.record.get(name) for name in SHAPING_FACTS}
        splits = {
            split: [described.get("sha256"), described["rows"]]
            for split, described in self.record["splits"].items()
            if not split.startswith("test")
        }
        return content_sha256(facts | {"splits": splits})

    def notes(self) -> Iterator[str]:
        """What a reader of the scores must know: rows left out, files that are not the official ones."""
        name = self.record["task"]
        for split, facts in self.record["splits"].items():
            official, source = TASKS[name].official_rows.get(split), facts.get("source_rows", facts["rows"])
            if official and abs(source - official) > ROWS_TOLERANCE * official and not split.startswith("test"):
                yield (
                    f"{name}: the {split} file ({facts['source']}) has {source:,} rows, the official one {official:,}; "
                    "the scores do not compare with published ones"
                )
            if split == "train" and facts["rows"] < source:
                yield f"{name}: trained on {facts['rows']:,} of {source:,} rows"
        yield from self.record.get("notes", ())

    def texts(self, split: str, max_positions: int) -> list[Tensor]:
        """Rows of tokens as fairseq's ``sentence_prediction`` makes them: ``<s> A </s>`` or ``<s> A </s> B </s>``, cut at
        ``max_positions``; LongTensors, in the order of the file."""
        inputs = [self._input(name, split) for name in ("input0", "input1")]
        parts = [part for part in inputs if part is not None]
        start = torch.tensor([Dictionary().bos()])
        return [torch.cat([start, *row])[:max_positions] for row in zip(*parts, strict=True)]

    def _input(self, name: str, split: str) -> Any:
        if name == "input1" and not (self.directory / name).is_dir():
            return None
        dictionary = Dictionary.load(str(self.directory / name / "dict.txt"))
        rows = data_utils.load_indexed_dataset(str(self.directory / name / split), dictionary)
        if rows is None:
            raise UserError(f"{self.directory / name}/{split}.idx is missing: prepare the data again")
        return rows

    def labels(self, split: str) -> np.ndarray:
        """[N] class numbers (int64), or values of a regression (float64)."""
        if self.is_regression:
            file = self.directory / "label" / f"{split}.label"
            return np.array([float(line) for line in file.read_text(encoding="utf-8").split()])
        dictionary = Dictionary.load(str(self.directory / "label" / "dict.txt"))
        rows = data_utils.load_indexed_dataset(str(self.directory / "label" / split), dictionary)
        return np.array([int(row[0]) - dictionary.nspecial for row in rows])

    def ids(self, split: str) -> list[str]:
        """Ids of the leaderboard; row numbers where the file has none."""
        file = self.directory / f"{split}.ids"
        if file.is_file():
            return file.read_text(encoding="utf-8").splitlines()
        return [str(i) for i in range(self.record["splits"][split]["rows"])]


def read_glue_data(data: Path, task: str) -> GlueData:
    """Raises :class:`UserError` where the task has not been prepared in ``data``."""
    record = read_json(data / task / "task.json")
    if record is None:
        raise UserError(
            f"{data / task} holds no prepared data: preprocess/glue/prepare.sh GLUE_DIR {task} TOKENIZER_DIR {data}"
        )
    if not isinstance(record, dict) or any(not isinstance(record.get(part), kind) for part, kind in _FACTS.items()):
        raise UserError(f"{data / task / 'task.json'} was not written by prepare.sh: prepare the data again")
    if record["task"] != task:
        raise UserError(f"{data / task} holds {record['task']}, not {task}: prepare the data again")
    if task in TASKS and not {"train", "valid"} <= record["splits"].keys():
        raise UserError(f"{data / task / 'task.json'} lacks train or valid: prepare the data again")
    return GlueData(data / task, record)


def batches(texts: list[Tensor], pad: int, stop: threading.Event) -> Iterator[tuple[list[int], Tensor]]:
    """Rows of similar length together: (their numbers, tokens [B,T] int64); always the same batches.

    Raises:
        Stopped: ``stop`` is set.
    """
    order = sorted(range(len(texts)), key=lambda row: (-len(texts[row]), row))
    first = 0
    while first < len(order):
        if stop.is_set():
            raise Stopped
        size = max(1, TOKENS_PER_BATCH // len(texts[order[first]]))
        rows = order[first : first + size]
        yield rows, torch.nn.utils.rnn.pad_sequence([texts[row] for row in rows], batch_first=True, padding_value=pad)
        first += size
