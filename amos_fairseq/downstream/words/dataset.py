"""Prepared sentences, and batches of ``<s> sentence </s>`` with one label a word, on its first piece, or with trees.

The files are those of ``amos_fairseq.downstream.words.prepare``.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.data.corpus import check_prepared, open_lines
from amos_fairseq.downstream.labeled_task import LabeledSequences, MixedTasks
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import content_sha256
from amos_fairseq.inputs.schemes import OUTSIDE, count, main_score
from amos_fairseq.inputs.word_files import HELD_OUT, MANIFEST, RAW_TEXT, SEEN, UNDIVIDED, UNLABELED, WORD_ARRAYS
from amos_fairseq.text.prepared_data import read_manifest
from amos_fairseq.untrusted import read_json_lines

CUT = "<cut>"  # in predictions: a word that the model did not read; CoNLL-U has the label "_"
NUM_SPECIAL = 2  # <s> and </s>
# Target of a padded slot: cross_entropy ignores it.
NO_LABEL = -100
HEAD = "head"  # the array of the heads of words, of trees
_HINT = "give the directory that amos prepare tagging wrote"


@dataclass(frozen=True)
class Column:
    """Prepared labels of words. ``sha256``: of the manifest; ``seen``: number of dev sentences that train too; ``held_out``:
    the training file if the dev sentences were chosen from it; ``raw_text``, ``undivided``: see ``HeadOutputs``.
    """

    directory: Path
    name: str
    labels: list[str]
    has_spans: bool
    sha256: str = ""
    seen: int = 0
    held_out: str = ""
    raw_text: bool = False
    undivided: tuple[str, list[str]] = "", []

    @classmethod
    def of(cls, directory: Path) -> "Column":
        manifest = read_manifest(directory / MANIFEST)
        values = (manifest[name] for name in ("column", "labels", "has_spans"))
        more = (content_sha256(manifest), manifest[SEEN], manifest.get(HELD_OUT, ""), RAW_TEXT in manifest)
        return cls(directory, *values, *more, tuple(manifest.get(UNDIVIDED, ("", []))))

    @property
    def head(self) -> str:
        return word_head_name(self.name)

    @property
    def outputs(self) -> HeadOutputs:
        """What the outputs of its head mean."""
        kind, words = "spans" if self.has_spans else "words", dict(zip(("signs", "whole"), self.undivided, strict=True))
        return HeadOutputs(kind, self.labels, self.name, raw_text=self.raw_text, **words)

    @property
    def main_score(self) -> str:
        return main_score(self.has_spans)

    def spell(self, predicted: Sequence[int], num_words: int) -> list[str]:
        """Return the label of each word of a sentence, also of those at its end that are cut."""
        cut_label = OUTSIDE if self.has_spans else CUT
        return [*(self.labels[label] for label in predicted), *[cut_label] * (num_words - len(predicted))]

    def count(self, gold: Sequence[int], predicted: Sequence[int]) -> Counter[str]:
        """Count what is right of the labels of a sentence: ``amos_fairseq.inputs.schemes.count``."""
        return count([self.labels[i] for i in gold], [self.labels[i] for i in predicted], self.has_spans)

    def read_words(self, split: str) -> list[list[str]]:
        return read_json_lines(self.directory / f"{split}.words.jsonl", _HINT, json.loads)


def has_unlabeled(directory: Path) -> bool:
    """Return whether prepared data have sentences without labels."""
    return (directory / f"{UNLABELED}.tokens.idx").exists()


def columns_by_head(
    directories: Iterable[Path], head_name: Callable[[Column], str] = lambda column: column.head
) -> dict[str, Column]:
    """Return the columns of prepared directories; refuse two of one head."""
    columns: dict[str, Column] = {}
    for column in map(Column.of, directories):
        head = head_name(column)
        if head in columns:
            both = f"{column.directory} is another folder of the column {columns[head].name}, as {columns[head].directory} is"
            raise UserError(f"{both}, or their names differ in signs alone: give one of them")
        columns[head] = column
    return columns


def word_head_name(column: str) -> str:
    """Return the name of the head for a column: a key of ``nn.ModuleDict``, which has no dot and is no attribute's name."""
    return re.sub(r"\W", "_", column) + "_labels"


def words_that_fit(ends: Sequence[int] | torch.Tensor, num_pieces: int, room: int) -> tuple[int, int]:
    """Return how many words of a sentence are read, and how many of its pieces; ``ends``: of the words, in pieces. If no word
    is cut, these are all that fit: a tokenizer may add pieces that are of no word behind the last one."""
    kept = int(np.searchsorted(np.asarray(ends), room, side="right"))
    if kept == len(ends):
        return kept, min(num_pieces, room)
    return kept, int(ends[kept - 1]) if kept else 0


class WordSequences(LabeledSequences):
    """The words of the sentences of a split, cut at a word boundary where they have more than ``max_tokens`` with ``<s>`` and
    ``</s>``; in training without the sentences whose first word does not fit.

    ``cut_words``: number of words that are cut, also in sentences left out; ``cut_sentences``: of sentences that lose words.
    """

    def __init__(self, directory: Path, split: str, max_tokens: int, seed: int = 0, training: bool = False) -> None:
        super().__init__(directory, split, seed, training)
        check_prepared(directory, MANIFEST, split)
        self._tokens, self._starts, self._ends = (open_lines(f"{self.source}.{name}", _HINT) for name in WORD_ARRAYS)
        num_words = self._starts.sizes.astype(np.int64)
        self._room = max_tokens - NUM_SPECIAL
        lengths = zip(self._ends, self._tokens.sizes, strict=True)
        fits = [words_that_fit(ends, int(num_pieces), self._room) for ends, num_pieces in lengths]
        self._kept, self._num_pieces = np.array(fits, dtype=np.int64).reshape(-1, 2).T
        self.cut_words = int((num_words - self._kept).sum())
        self.cut_sentences = int((num_words > self._kept).sum())
        self.num_words = int(num_words.sum())
        self._rows = np.flatnonzero(self._kept > 0) if training else np.arange(len(fits))
        if not len(self._rows):
            raise UserError(f"{self.source}.*: all first words are longer than {self._room} pieces: split the words")
        self.sizes = NUM_SPECIAL + self._num_pieces[self._rows]

    @property
    def words_per_sentence(self) -> float:
        return float(self._kept[self._rows].mean())

    def describe(self) -> str:
        """Return the numbers of sentences and words, and of the words that are cut."""
        sizes = f"{len(self):,} sentences, {self.num_words:,} words"
        if not self.cut_words:
            return sizes
        return f"{sizes}; {self.cut_words:,} words at the ends of {self.cut_sentences:,} sentences are cut"

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return ``id`` int, ``tokens`` [L], and ``positions`` and ``last_positions`` of the first and the last pieces of the
        words that are not cut, int64."""
        row = int(self._rows[index])
        kept, pieces = int(self._kept[row]), self._tokens[row][: int(self._num_pieces[row])].long()
        return {
            "id": int(index),
            "tokens": torch.cat([torch.tensor([self.bos]), pieces, torch.tensor([self.eos])]),
            "positions": self._starts[row][:kept].long() + 1,
            "last_positions": self._ends[row][:kept].long(),
        }

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add to ``net_input`` ``word_positions`` and ``last_positions``, [B,W] int64, 0 in padded slots."""
        for name, key in (("word_positions", "positions"), ("last_positions", "last_positions")):
            batch["net_input"][name] = pad_words([sample[key] for sample in samples], 0)


def pad_words(rows: Sequence[torch.Tensor], value: int) -> torch.Tensor:
    """Return LongTensors of different lengths as [B,W], W at least 1, with ``value`` in padded slots."""
    padded = pad_sequence(rows, batch_first=True, padding_value=value)
    return padded if padded.size(1) else padded.new_full((len(rows), 1), value)


class TaggedSentences(WordSequences):
    def __init__(self, directory: Path, split: str, num_labels: int, max_tokens: int, **options: Any) -> None:
        super().__init__(directory, split, max_tokens, **options)
        self._labels = open_lines(f"{self.source}.label", _HINT)

    def labels(self, index: int) -> list[int]:
        """Return the labels of all words of a sentence, also of those that are cut."""
        return self._labels[int(self._rows[index])].tolist()

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the words of a sentence, and ``labels``, a list of ints for all words, also for those that are cut."""
        return super().__getitem__(index) | {"labels": self.labels(index)}

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add ``nwords`` (not cut), a Python int; ``target`` [B,W] int64, ``NO_LABEL`` in padded slots; ``labels`` of all
        words, lists of ints; and to ``net_input`` ``word_positions`` [B,W] int64, 0 in padded slots."""
        super().add_labels(batch, samples)
        del batch["net_input"]["last_positions"]
        target = [torch.tensor(sample["labels"][: len(sample["positions"])], dtype=torch.long) for sample in samples]
        batch |= {"nwords": sum(map(len, target)), "target": pad_words(target, NO_LABEL)}
        batch["labels"] = [sample["labels"] for sample in samples]


class MixedSentences(MixedTasks):
    """The same for sentences with labels of words, each with the labels of one task."""

    tasks: dict[str, TaggedSentences]

    @property
    def words_per_sentence(self) -> float:
        """Mean number of words, not cut, of a sentence in an epoch."""
        means = [rows.words_per_sentence for rows in self.tasks.values()]
        return float(np.average(means, weights=self.rows_of_tasks))

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add what ``TaggedSentences`` adds, ``rows_of_heads`` to ``net_input``, and ``parts``, for each task the
        ``target`` [b,W] and ``labels`` of its rows."""
        next(iter(self.tasks.values())).add_labels(batch, samples)
        places = batch["net_input"]["rows_of_heads"] = self.rows_of_heads(batch)
        batch["parts"] = {
            name: {"target": batch["target"][rows], "labels": [batch["labels"][row] for row in rows.tolist()]}
            for name, rows in places.items()
        }


class ParsedSentences(TaggedSentences):
    """The sentences of a split with their trees. Words whose head is cut are not trained on."""

    def __init__(self, directory: Path, split: str, num_relations: int, max_tokens: int, **options: Any) -> None:
        super().__init__(directory, split, num_relations, max_tokens, **options)
        self.num_relations = num_relations
        self._heads = open_lines(f"{self.source}.{HEAD}", "give OUT/data/parsing-HASH of amos parse")

    def heads(self, index: int) -> list[int]:
        """Return the head of each word of a sentence, also of those that are cut: 0 for the root."""
        return self._heads[int(self._rows[index])].tolist()

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add what the data set of tagging adds, and ``all_words``, a Python int, with those that are cut. ``target``
        LongTensor [B,W] is head * number of relations + relation, ``NO_LABEL`` in padded slots and for words whose head is cut.
        """
        super().add_labels(batch, samples)
        relations, target = batch["target"], torch.full_like(batch["target"], NO_LABEL)
        for row, sample in enumerate(samples):
            num_kept = len(sample["positions"])
            heads = torch.tensor(self.heads(sample["id"])[:num_kept], dtype=torch.long)
            pairs = heads * self.num_relations + relations[row, :num_kept]
            target[row, :num_kept] = pairs.where(heads <= num_kept, NO_LABEL)
        all_words = sum(len(sample["labels"]) for sample in samples)
        batch |= {"target": target, "nwords": int(target.ne(NO_LABEL).sum()), "all_words": all_words}
