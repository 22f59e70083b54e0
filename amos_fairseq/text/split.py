"""Split the inputs in one pass: validation documents, a sample for the vocabulary, and the training text in files.

The split of a document depends only on its content and the seed, not on the number of processes.
"""

import contextlib
import hashlib
import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from amos_fairseq.errors import UserError
from amos_fairseq.text import TEXT_COLUMN
from amos_fairseq.text.input_files import read_documents

VALID, SAMPLE = "valid.txt", "sample.txt"
GROUPS_PER_SHARD = 16  # small enough to form shards of nearly equal size
FILE_BYTES = 1 << 22  # of text: what a process encodes at a time, and an interrupted run at most repeats


@dataclass(frozen=True)
class SplitSettings:
    seed: int
    shard_bytes: int
    valid_share: float
    valid_bytes: int
    sample_bytes: int
    text_column: str = TEXT_COLUMN
    csv_quotes: bool = False  # in .tsv


@dataclass
class Split:
    """The result of the pass, with what amos prepare needs of it later.

    Attributes:
        documents: number of documents of each input.
        sample: name, documents, paragraphs and bytes of the text for the vocabulary.
        train: bytes of the files of training text, in groups: a shard consists of whole groups.
    """

    documents: list[int]
    sample: dict[str, str | int]
    train: list[list[int]]


class SmallestHashes:
    """The documents with the smallest keys that fit into ``budget`` bytes: a random sample in constant memory.

    At least one is selected, whatever its size. Documents with equal keys (equal texts) are selected together.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._size = budget, 0
        self._documents: dict[int, list[bytes]] = {}
        self._largest_first: list[int] = []  # a heap of the keys, negated
        self._refused_from = math.inf

    def add(self, key: int, document: bytes) -> list[bytes]:
        """Add a document; return those that no longer fit, in order of arrival where keys are equal."""
        if key >= self._refused_from:
            return [document]
        if key not in self._documents:
            self._documents[key] = []
            heapq.heappush(self._largest_first, -key)
        self._documents[key].append(document)
        self._size += len(document)
        refused: list[bytes] = []
        while self._size > self._budget and len(self._documents) > 1:
            self._refused_from = -heapq.heappop(self._largest_first)
            no_longer_fit = self._documents.pop(self._refused_from)
            self._size -= sum(map(len, no_longer_fit))
            refused += no_longer_fit
        return refused

    def in_order(self) -> list[tuple[int, bytes]]:
        """Return the selected (key, document) pairs, smallest key first."""
        return [(key, document) for key in sorted(self._documents) for document in self._documents[key]]


def split_corpus(
    inputs: list[Path], directory: Path, settings: SplitSettings, on_read: Callable[[int], object]
) -> Split:
    """Write ``valid.txt``, ``sample.txt`` and ``00000.txt``, ``00001.txt``, ... into ``directory``.

    Each file has complete documents, with a blank line behind each. ``on_read`` is called with the number of bytes read from
    disk. The order of the training text is that of the inputs, but for documents that were among the smallest hashes for a
    while.
    """
    documents = [0] * len(inputs)
    valid, sample = SmallestHashes(settings.valid_bytes), SmallestHashes(settings.sample_bytes)
    total = 0
    with _TrainingText(directory, max(1, settings.shard_bytes // GROUPS_PER_SHARD)) as train:
        for index, path in enumerate(inputs):
            for document in read_documents(path, settings.text_column, settings.csv_quotes, on_read):
                documents[index] += 1
                total += len(document)
                valid_key, sample_key = document_hashes(document, settings.seed)
                sample.add(sample_key, document)
                for refused in valid.add(valid_key, document):
                    train.write(refused)
        chosen, others = _within(valid.in_order(), settings.valid_share * total)
        for _, document in others:
            train.write(document)
    if not train.groups:
        raise UserError(
            "the text is too small to leave a validation document: it needs at least two different documents "
            "(separated by a blank line, or one JSON object per line)"
        )
    held_out = {document for _, document in chosen}
    learnable = [document for _, document in sample.in_order() if document not in held_out]
    if not learnable:
        raise UserError("--sample-megabytes leaves no document to learn the vocabulary from: give a larger sample")
    _write(directory / VALID, (document for _, document in chosen))
    _write(directory / SAMPLE, learnable)
    counts = {"documents": len(learnable), "paragraphs": sum(document.count(b"\n") for document in learnable)}
    counts["bytes"] = sum(map(len, learnable))
    return Split(documents, {"name": SAMPLE, **counts}, train.groups)


def text_file(number: int) -> str:
    """Return the name of a file of training text; the numbers go on from group to group."""
    return f"{number:05d}.txt"


def document_hashes(document: bytes, seed: int) -> tuple[int, int]:
    """Return the key that selects validation documents, and the one that selects the vocabulary's sample."""
    digest = hashlib.blake2b(document, digest_size=16, key=str(seed).encode("ascii")).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:] + digest[:8], "big")


def group_into_shards(sizes: list[int], limit: int) -> list[list[int]]:
    """Return the indices of the groups of each shard: consecutive, of nearly equal size, at most ``limit`` bytes.

    A single group that is larger forms a shard.
    """
    total = sum(sizes)
    for number in range(max(1, math.ceil(total / limit)), len(sizes) + 1):
        groups: list[list[int]] = [[] for _ in range(number)]
        before = 0
        for index, size in enumerate(sizes):
            groups[min(number - 1, (2 * before + size) * number // (2 * total))].append(index)
            before += size
        if all(groups) and all(sum(sizes[i] for i in group) <= limit for group in groups):
            return groups
    return [[index] for index in range(len(sizes))]


class _TrainingText(contextlib.AbstractContextManager):
    """Write documents into files of at most ``FILE_BYTES``, in groups of at most ``limit`` (or of one larger document)."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.groups: list[list[int]] = []
        self._directory, self._limit, self._files = directory, limit, 0
        self._stream: BinaryIO | None = None

    def __exit__(self, *exception: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def write(self, document: bytes) -> None:
        size = len(document)
        if not self.groups or sum(self.groups[-1]) + size > self._limit:
            self.groups.append([])
        group = self.groups[-1]
        if not group or group[-1] + size > FILE_BYTES:
            self.__exit__()
            self._stream = open(self._directory / text_file(self._files), "wb")  # noqa: SIM115
            self._files += 1
            group.append(0)
        self._stream.write(document + b"\n")
        group[-1] += size


def _within(documents: list[tuple[int, bytes]], budget: float) -> tuple[list, list]:
    """Split into the first documents that fit into ``budget`` bytes (at least one, with its duplicates) and the rest."""
    size = number = 0
    for key, document in documents:
        size += len(document)
        if number and size > budget and key != documents[number - 1][0]:
            break
        number += 1
    return documents[:number], documents[number:]


def _write(path: Path, documents: Iterable[bytes]) -> None:
    with open(path, "wb") as stream:
        stream.writelines(document + b"\n" for document in documents)
