"""Split the inputs in one pass: validation documents, a sample for the vocabulary, and the training text in files.

The split of a document depends only on its content and the seed, not on the number of processes.
"""

import contextlib
import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import say
from amos_fairseq.text import TEXT_COLUMN
from amos_fairseq.text.table_files import FOLDER, PARQUET, TSV, TableFile, files_of, is_table
from amos_fairseq.text.text_files import LARGEST_DOCUMENT_BYTES, InputFile, document_of

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


class TableDocuments:
    """The documents of a table, in one of its columns; the same methods as :class:`~amos_fairseq.text.text_files.InputFile`."""

    def __init__(
        self, path: Path, on_read: Callable[[int], object] = lambda size: None, csv_quotes: bool = False
    ) -> None:
        self._table = TableFile(path, csv_quotes=csv_quotes, on_read=on_read)

    @property
    def sha256(self) -> str:
        return self._table.sha256

    def check_column(self, column: str) -> None:
        """Raise :class:`UserError` if the table has no such column."""
        if column not in self._table.columns:
            found = ", ".join(map(repr, self._table.columns))
            raise UserError(
                f"{self._table.path}: no column {column!r:.60}, it has {found[:200]}: give the name of the one with the text "
                "as --text-column NAME, or rename a file that is plain text to .txt"
            )

    def documents(self, column: str) -> Iterator[bytes]:
        """Yield the document of each row in order, without rows whose text is empty or missing."""
        self.check_column(column)
        place, empty = "row" if self._table.kind in (PARQUET, FOLDER) else "line", True
        for number, row in self._table.rows():
            text = row[column]
            if not isinstance(text, str | None):
                raise UserError(f"{self._table.path}, {place} {number}: {column} is {text!r:.60}, not a text")
            document = document_of(text or "")
            if len(document) > LARGEST_DOCUMENT_BYTES:
                raise UserError(
                    f"{self._table.path}, {place} {number}: the document is larger than {LARGEST_DOCUMENT_BYTES >> 20} MiB: "
                    "divide it"
                )
            if document:
                empty = False
                yield document
        if empty:
            raise UserError(f"{self._table.path} contains no text in {column}: remove it from the inputs or fill it")
        if broken := self._table.broken_lines:
            say(
                f"{self._table.path}: {len(broken)} of its rows, the first in line {broken[0]}, do not have the "
                f"{len(self._table.columns)} columns of its first line and are left out"
                + (" (if a program wrote it as CSV, give --csv-quotes)" if self._table.kind == TSV else "")
            )


@dataclass
class Split:
    """The result of the pass, with what amos prepare needs of it later.

    Attributes:
        inputs: name, bytes, sha256 and number of documents of each.
        sample: documents, paragraphs and bytes of the text for the vocabulary.
        train: bytes of the files of training text, in groups: a shard consists of whole groups.
    """

    inputs: list[dict[str, Any]]
    sample: dict[str, Any]
    train: list[list[int]]


@dataclass
class SmallestHashes:
    """The documents with the smallest keys that fit into ``budget`` bytes: a random sample in constant memory.

    At least one is selected, whatever its size. Documents with equal keys (equal texts) are selected together.
    """

    budget: int
    size: int = 0
    _refused_from: bytes | None = None
    _heap: list[tuple[int, int, bytes, bytes]] = field(default_factory=list)
    _copies: dict[bytes, int] = field(default_factory=Counter)
    _added: int = 0

    def add(self, key: bytes, document: bytes) -> list[bytes]:
        """Add a document; return those that no longer fit, in order of arrival where keys are equal."""
        if self._refused_from is not None and key >= self._refused_from:
            return [document]
        self._added += 1
        heapq.heappush(self._heap, (-int.from_bytes(key, "big"), self._added, key, document))
        self.size += len(document)
        refused = []
        self._copies[key] += 1
        while self.size > self.budget and len(self._copies) > 1:
            self._refused_from = self._largest_key()
            while self._largest_key() == self._refused_from:
                refused.append(self._pop())
        return refused

    def in_order(self) -> list[tuple[bytes, bytes]]:
        """Return the selected (key, document) pairs, smallest key first."""
        return [(key, document) for _, _, key, document in sorted(self._heap, key=lambda entry: (entry[2], entry[1]))]

    def _largest_key(self) -> bytes:
        return self._heap[0][2]

    def _pop(self) -> bytes:
        _, _, key, document = heapq.heappop(self._heap)
        self.size -= len(document)
        self._copies[key] -= 1
        if not self._copies[key]:
            del self._copies[key]
        return document


def split_corpus(
    inputs: list[Path], directory: Path, settings: SplitSettings, on_read: Callable[[int], object]
) -> Split:
    """Write ``valid.txt``, ``sample.txt`` and ``00000.txt``, ``00001.txt``, ... into ``directory``.

    Each file has complete documents, with a blank line behind each. ``on_read`` is called with the number of bytes read from
    disk. The order of the training text is that of the inputs, but for documents that were among the smallest hashes for a
    while.
    """
    records: list[dict[str, Any]] = []
    valid, sample = SmallestHashes(settings.valid_bytes), SmallestHashes(settings.sample_bytes)
    total = 0
    with _TrainingText(directory, max(1, settings.shard_bytes // GROUPS_PER_SHARD)) as train:
        for path in inputs:
            source = TableDocuments(path, on_read, settings.csv_quotes) if is_table(path) else InputFile(path, on_read)
            documents = 0
            for document in source.documents(settings.text_column):
                documents += 1
                total += len(document)
                digest = document_hash(document, settings.seed)
                sample.add(digest[8:] + digest[:8], document)
                for refused in valid.add(digest[:8], document):
                    train.write(refused)
            records.append({"name": path.name, "bytes": size_of(path), "sha256": source.sha256, "documents": documents})
        chosen, others = _within(valid.in_order(), settings.valid_share * total)
        for _, document in others:
            train.write(document)
    if not train.groups:
        raise UserError(
            "the text is too small to leave a validation document: it needs at least two different documents "
            "(separated by a blank line, or one JSON object per line)"
        )
    held_out = {key for key, _ in chosen}
    learnable = [document for key, document in sample.in_order() if key[8:] not in held_out]
    if not learnable:
        raise UserError("--sample-megabytes leaves no document to learn the vocabulary from: give a larger sample")
    _write(directory / VALID, [document for _, document in chosen])
    _write(directory / SAMPLE, learnable)
    counts = {"documents": len(learnable), "paragraphs": sum(document.count(b"\n") for document in learnable)}
    counts["bytes"] = sum(map(len, learnable))
    return Split(records, {"name": SAMPLE, **counts}, train.groups)


def text_file(number: int) -> str:
    """Return the name of a file of training text; the numbers go on from group to group."""
    return f"{number:05d}.txt"


def size_of(path: Path) -> int:
    """Return the bytes of an input on disk, of all files where it is a folder."""
    return sum(file.stat().st_size for file in files_of(path))


def document_hash(document: bytes, seed: int) -> bytes:
    """Return 16 bytes: the first 8 select validation documents, the last 8 the vocabulary's sample."""
    return hashlib.blake2b(document, digest_size=16, key=str(seed).encode("ascii")).digest()


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


def _within(documents: list[tuple[bytes, bytes]], budget: float) -> tuple[list, list]:
    """Split into the first documents that fit into ``budget`` bytes (at least one, with its duplicates) and the rest."""
    size = number = 0
    for key, document in documents:
        size += len(document)
        if number and size > budget and key != documents[number - 1][0]:
            break
        number += 1
    return documents[:number], documents[number:]


def _write(path: Path, documents: list[bytes]) -> None:
    with open(path, "wb") as stream:
        stream.writelines(document + b"\n" for document in documents)
