"""Rows of one or two texts with a label: ``<s> A </s>`` or ``<s> A </s> B </s>``, cut to the model's length.

With ``--separator-token 2`` a second ``</s>`` precedes B: ``<s> A </s> </s> B </s>``.

``amos prepare glue`` and ``amos classify`` write a directory for each task, which fairseq's ``sentence_prediction`` reads, too:

task.json                                       its name, kind of label, labels, scores, sources, counts
tokenizer/                                      of all texts
input0/SPLIT.{bin,idx}  input1/...              the first and, for pairs, the second text of each row; ``dict.txt``
label/SPLIT.{bin,idx}                           classes: one class a line; labels: any number of labels a line; ``dict.txt``
label/SPLIT.label                               number: as text, one a line
SPLIT.ids                                       what the table calls each row, one a line, where that is needed
SPLIT.texts.jsonl                               the texts of each row as they were read, for files of predictions
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, ConcatSentencesDataset, Dictionary, FairseqDataset, PrependTokenDataset
from torch import Tensor

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.data.corpus import check_prepared, open_lines, require_split
from amos_fairseq.downstream.labeled_task import LabeledSequences
from amos_fairseq.errors import UserError
from amos_fairseq.inputs.rows import TASK_FILE
from amos_fairseq.text.prepared_data import PREPARE_AGAIN, read_manifest
from amos_fairseq.text.tokenization.standalone import kept_lengths
from amos_fairseq.untrusted import read_text

# A class of the dev set that the training set lacks. It is no class of a model, so that every prediction is wrong.
UNKNOWN_CLASS = -1


def read_task_record(directory: Path) -> dict[str, Any]:
    return read_manifest(directory / TASK_FILE)


def head_outputs(record: dict[str, Any]) -> HeadOutputs:
    """Return what the head of a task predicts, and how its table was read; ``record``: content of ``task.json``."""
    reading = {name: record[name] for name in ("text_columns", "header") if name in record}
    return HeadOutputs(record["kind"], record["labels"], record.get("label_column", record["task"]), **reading)


def read_targets(directory: Path, split: str, record: dict[str, Any]) -> np.ndarray:
    """Return the labels of a split: classes [N] int64, ``UNKNOWN_CLASS`` where the training set lacks the class; labels
    [N, num_labels] bool; numbers [N] float64."""
    path, num_labels = directory / "label" / split, len(record["labels"])
    if record["kind"] == "number":
        return np.array([float(line) for line in read_text(path.with_suffix(".label"), PREPARE_AGAIN).split()])
    lines = open_lines(str(path), PREPARE_AGAIN)
    # Each line ends with </s>.
    flat, sizes = np.frombuffer(lines._bin_buffer, dtype=lines._index.dtype), lines.sizes.astype(np.int64)
    ids = np.delete(flat.astype(np.int64), np.cumsum(sizes) - 1) - Dictionary().nspecial
    if record["kind"] == "classes":
        return ids
    targets, known = np.zeros((len(lines), num_labels), dtype=bool), ids != UNKNOWN_CLASS
    targets[np.repeat(np.arange(len(lines)), sizes - 1)[known], ids[known]] = True
    return targets


def join_texts(texts: list[FairseqDataset], bos: int, separator: int | None) -> FairseqDataset:
    """Join one or two texts of each row, which end in ``</s>``, as ``sentence_prediction`` does with ``--init-token`` and
    ``--separator-token``."""
    first, *second = texts
    first = PrependTokenDataset(first, bos)
    if not second:
        return first
    return ConcatSentencesDataset(first, second[0] if separator is None else PrependTokenDataset(second[0], separator))


def open_texts(directory: Path, split: str, max_tokens: int, separator: int | None) -> "ShortenedTexts":
    """Return the texts of a split as training reads them, in the order of the file: LongTensors [L] of at most ``max_tokens``.
    ``separator``: value of ``--separator-token``."""
    inputs = [directory / name for name in ("input0", "input1") if (directory / name).is_dir()]
    texts = [open_lines(str(path / split), PREPARE_AGAIN) for path in inputs]
    return ShortenedTexts(join_texts(texts, Dictionary().bos(), separator), max_tokens)


class ShortenedTexts(BaseWrapperDataset):
    """Rows of one or two texts, as ``join_texts`` or the task itself joins them, cut to ``max_tokens``, the longest input
    of the model, by ``kept_lengths``; all special tokens remain."""

    def __init__(self, rows: FairseqDataset, max_tokens: int) -> None:
        super().__init__(rows)
        self._texts = rows.datasets if isinstance(rows, ConcatSentencesDataset) else [rows]
        self._starts = [int(isinstance(text, PrependTokenDataset)) for text in self._texts]
        self._room = max_tokens - sum(self._starts) - len(self._texts)
        if self._room < len(self._texts):
            raise UserError(f"--max-positions {max_tokens} leaves no room for text beside the special tokens: raise it")
        self.max_tokens = max_tokens

    @property
    def num_cut(self) -> int:
        """The number of rows that are longer than ``max_tokens``."""
        return int(np.count_nonzero(self.dataset.sizes > self.max_tokens))

    @property
    def sizes(self) -> np.ndarray:
        return np.minimum(self.dataset.sizes, self.max_tokens)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Tensor:
        texts = [text[index] for text in self._texts]
        lengths = [len(text) - start - 1 for text, start in zip(texts, self._starts, strict=True)]
        kept = kept_lengths(lengths, self._room)
        shortened = [
            torch.cat([text[: start + length], text[-1:]])
            for text, start, length in zip(texts, self._starts, kept, strict=True)
        ]
        return torch.cat(shortened)


class LabeledTexts(LabeledSequences):
    """The rows of a split with their labels, cut to ``max_tokens``.

    Args:
        record: content of ``task.json``.
        separator: value of ``--separator-token``.
        teacher: predictions of another model for these rows, [N, outputs]: probabilities of the classes or labels, or a
            number in the unit of the label.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        record: dict[str, Any],
        max_tokens: int,
        separator: int | None = None,
        seed: int = 0,
        training: bool = False,
        teacher: np.ndarray | None = None,
    ) -> None:
        super().__init__(directory, split, seed, training)
        check_prepared(directory, TASK_FILE, split)
        for path in sorted(directory.glob(f"*/{split}.idx")):
            require_split(str(path.with_suffix("")))
        self._rows = open_texts(directory, split, max_tokens, separator)
        self.sizes, self.targets = self._rows.sizes, read_targets(directory, split, record)
        self.num_cut = self._rows.num_cut
        self._teacher = None if teacher is None else torch.from_numpy(teacher)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = int(index)
        return {"id": index, "tokens": self._rows[index]}

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add ``labels_of`` the rows, and ``num_rows``, a Python int."""
        batch |= self.labels_of(batch["id"]) | {"num_rows": len(self)}

    def labels_of(self, rows: Tensor) -> dict[str, Tensor]:
        """Return ``target``: classes [B] int64, labels [B, num_labels] bool, or numbers [B] float64; with a teacher also
        ``teacher``, [B, outputs] float64. ``rows``: [B] int64.

        With ``--fp16`` or ``--bf16`` fairseq converts every float32 tensor of a batch.
        """
        labels = {"target": torch.from_numpy(self.targets)[rows]}
        return labels if self._teacher is None else labels | {"teacher": self._teacher[rows].double()}
