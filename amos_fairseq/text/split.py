"""Read the documents of the inputs in one pass: some for validation, a sample for the vocabulary, training text in files.

A document is ``bytes``: valid UTF-8, one non-empty stripped paragraph per line, each line ended by ``\\n``.

The split of a document depends only on its content and the seed, not on the number of processes.
"""

import contextlib
import hashlib
import heapq
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import say
from amos_fairseq.text import TEXT_COLUMN
from amos_fairseq.text.file_kinds import FOLDER, JSONL, PARQUET, TEXT, TSV, OnRead, ignore, kind_of
from amos_fairseq.text.input_files import TableFile, json_lines, read_lines, refuse_large
from amos_fairseq.text.tokenization import Tokenizer

VALID, SAMPLE = "valid.txt", "sample.txt"
GROUPS_PER_SHARD = 16  # small enough to form shards of nearly equal size
FILE_BYTES = 1 << 22  # of text: what a process encodes at a time, and an interrupted run at most repeats

_LINE_ENDS = re.compile(r"[\r\n]+")
_PARTS = re.compile(rb"[^\r]+")


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """The settings that determine the content of a corpus. ``tokenizer`` None: one of the type ``bpe`` is learned."""

    bpe: str | None = None
    vocab_size: int | None = None
    tokenizer: Tokenizer | None = None
    cased: bool = False
    seed: int
    shard_bytes: int
    valid_share: float
    valid_bytes: int
    sample_bytes: int
    text_column: str = TEXT_COLUMN
    csv_quotes: bool = False  # in .tsv

    def describe(self) -> dict[str, Any]:
        """Return the settings for ``corpus.json``; two runs with equal settings and inputs write the same bytes."""
        return vars(self) | {"tokenizer": None if self.tokenizer is None else self.tokenizer.sha256}


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


def read_documents(
    path: Path, column: str = TEXT_COLUMN, csv_quotes: bool = False, on_read: OnRead = ignore
) -> Iterator[bytes]:
    """Yield the documents of an input in order.

    Each row of a table and each line of JSON is one, in the field ``column``; in other files blank lines separate them.
    """
    kind = kind_of(path)
    if kind == TEXT:
        documents = _documents_of_text(path, on_read)
    elif kind == JSONL:
        documents = _documents_of_json(path, column, on_read)
    else:
        documents = _documents_of_table(TableFile(path, csv_quotes=csv_quotes, on_read=on_read), column)
    empty = True
    for document in documents:
        if document:
            empty = False
            yield document
    if empty:
        place = "" if kind == TEXT else f" in {column}"
        raise UserError(f"{path} contains no text{place}: remove it from the inputs or fill it")


def _documents_of_text(path: Path, on_read: OnRead) -> Iterator[bytes]:
    document, start = bytearray(), 0  # a list of many short paragraphs would take many times their size
    for number, line in read_lines(path, on_read):
        paragraph = line.replace(b"\0", b"").strip()
        if not paragraph:
            yield bytes(document)
            document = bytearray()
            continue
        start = start if document else number
        # A lone carriage return ends a line for fairseq, which reads with universal newlines.
        for part in _PARTS.finditer(paragraph):
            if stripped := part.group().strip():
                document += stripped + b"\n"
        refuse_large(document, f"{path}: the document from line {start} on")
    yield bytes(document)


def _documents_of_json(path: Path, column: str, on_read: OnRead) -> Iterator[bytes]:
    for number, line in json_lines(path, on_read):
        try:
            document = _document_of(json.loads(line)[column])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(
                f'{path}, line {number}: not a JSON object with a string "{column}": {line[:60]!r}'
            ) from None
        yield document


def _documents_of_table(table: TableFile, column: str) -> Iterator[bytes]:
    if column not in table.columns:
        names = ", ".join(map(repr, table.columns))
        raise UserError(
            f"{table.path}: no column {column!r:.60}, it has {names[:200]}: give the name of the one with the text as "
            "--text-column NAME, or rename a file that is plain text to .txt"
        )
    for number, row in table.rows():
        place = f"{table.path}, {'row' if table.kind in (PARQUET, FOLDER) else 'line'} {number}"
        text = row[column]
        if not isinstance(text, str | None):
            raise UserError(f"{place}: {column} is {text!r:.60}, not a text")
        document = _document_of(text or "")
        refuse_large(document, f"{place}: the document")
        yield document
    if broken := table.broken_lines:
        say(
            f"{table.path}: {len(broken)} of its rows, the first in line {broken[0]}, do not have the {len(table.columns)} "
            "columns of its first line and are left out"
            + (" (if a program wrote it as CSV, give --csv-quotes)" if table.kind == TSV else "")
        )


def _document_of(text: str) -> bytes:
    paragraphs = map(str.strip, _LINE_ENDS.split(text.replace("\0", "")))
    return "".join(f"{paragraph}\n" for paragraph in paragraphs if paragraph).encode("utf-8")


def split_corpus(inputs: list[Path], directory: Path, settings: CorpusSettings, on_read: OnRead) -> Split:
    """Write ``valid.txt``, ``sample.txt`` and ``00000.txt``, ``00001.txt``, ... into ``directory``.

    Each file has complete documents, with a blank line behind each. ``on_read`` is called with the number of bytes read from
    disk. The order of the training text is that of the inputs, but for documents that were among the smallest hashes for a
    while.
    """
    documents, total, seed = [0] * len(inputs), 0, str(settings.seed).encode("ascii")
    valid, sample = SmallestHashes(settings.valid_bytes), SmallestHashes(settings.sample_bytes)
    with _TrainingText(directory, max(1, settings.shard_bytes // GROUPS_PER_SHARD)) as train:
        for index, path in enumerate(inputs):
            for document in read_documents(path, settings.text_column, settings.csv_quotes, on_read):
                documents[index] += 1
                total += len(document)
                digest = hashlib.blake2b(document, digest_size=16, key=seed).digest()
                sample.add(int.from_bytes(digest[8:] + digest[:8], "big"), document)
                for refused in valid.add(int.from_bytes(digest[:8], "big"), document):
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
