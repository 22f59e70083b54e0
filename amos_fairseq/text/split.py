"""Read the documents of the inputs in one pass: some for validation, a sample for the vocabulary, training text in files.

A document is ``bytes``: valid UTF-8, one non-empty stripped paragraph per line, each line ended by ``\\n``.

The split of a document depends only on its content and the seed, not on the number of processes.
"""

import contextlib
import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import BLANK, TEXT_COLUMN
from amos_fairseq.inputs.documents import DocumentFile
from amos_fairseq.inputs.files import OnRead
from amos_fairseq.output.terminal import say
from amos_fairseq.text.tokenization.tokenizer import Tokenizer

VALID, SAMPLE = "valid.txt", "sample.txt"
GROUPS_PER_SHARD = 16  # small enough to form shards of nearly equal size
FILE_BYTES = 1 << 22  # of text: what a process encodes at a time, and an interrupted run at most repeats


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """The settings that determine the content of a corpus. ``tokenizer`` None: one is learned."""

    vocab_size: int | None = None
    tokenizer: Tokenizer | None = None
    cased: bool = False
    seed: int
    shard_bytes: int
    valid_share: float
    valid_bytes: int
    sample_bytes: int
    text_column: str = TEXT_COLUMN
    document: str = BLANK  # what ends a document of plain text
    protected: Sequence[str] = ()  # tokens of a learned vocabulary; a given tokenizer has its own

    def describe(self) -> dict[str, Any]:
        """Return the settings for ``corpus.json``; two runs with equal settings and inputs write the same bytes."""
        return vars(self) | {"tokenizer": None if self.tokenizer is None else self.tokenizer.sha256}


@dataclass
class Split:
    inputs: list[dict[str, Any]]  # documents of each, and rows without text
    sample: dict[str, str | int]  # name, documents, paragraphs and bytes of the text for the vocabulary
    train: list[list[int]]  # bytes of the files of training text, in groups: a shard consists of whole groups


class SmallestHashes:
    """The documents with the smallest keys that fit into ``budget`` bytes: a random sample in constant memory.

    At least one is selected, whatever its size. Copies have equal keys: they are held once, and selected together.
    """

    def __init__(self, budget: int) -> None:
        self._budget, self._size = budget, 0
        self._documents: dict[int, bytes] = {}
        self._copies: dict[int, int] = {}  # how often a document was added
        self._largest_first: list[int] = []  # a heap of the keys, negated
        self._refused_from = math.inf

    def add(self, key: int, document: bytes) -> list[tuple[bytes, int]]:
        """Add a document; return those that no longer fit, with the number of their copies."""
        if key >= self._refused_from:
            return [(document, 1)]
        if key not in self._documents:
            self._documents[key], self._copies[key] = document, 0
            heapq.heappush(self._largest_first, -key)
        self._copies[key] += 1
        self._size += len(document)
        refused = []
        while self._size > self._budget and len(self._documents) > 1:
            self._refused_from = -heapq.heappop(self._largest_first)
            refused.append((self._documents.pop(self._refused_from), self._copies.pop(self._refused_from)))
            self._size -= len(refused[-1][0]) * refused[-1][1]
        return refused

    def in_order(self) -> dict[bytes, int]:
        """Return the selected documents and the numbers of their copies, smallest key first."""
        return {self._documents[key]: self._copies[key] for key in sorted(self._documents)}


def split_corpus(
    inputs: list[Path], directory: Path, settings: CorpusSettings, on_read: OnRead, markers: Sequence[str] = ()
) -> Split:
    """Write ``valid.txt``, ``sample.txt`` and ``00000.txt``, ... into ``directory``, with a blank line behind each document.

    The order is that of the inputs, but for documents that were among the smallest hashes for a while. ``markers`` that
    do not occur are named.
    """
    unseen = {marker.encode("utf-8") for marker in markers}
    seed = str(settings.seed).encode("ascii")
    files = [DocumentFile(path, settings.text_column, settings.document) for path in inputs]
    total = paragraphs = 0
    valid, sample = SmallestHashes(settings.valid_bytes), SmallestHashes(settings.sample_bytes)
    with _TrainingText(directory, max(1, settings.shard_bytes // GROUPS_PER_SHARD)) as train:
        for document in (document for file in files for document in file.read(on_read)):
            total += len(document)
            paragraphs += document.count(b"\n")
            unseen = {marker for marker in unseen if marker not in document}
            digest = hashlib.blake2b(document, digest_size=16, key=seed).digest()
            sample.add(int.from_bytes(digest[8:] + digest[:8], "big"), document)
            for refused, number in valid.add(int.from_bytes(digest, "big"), document):
                train.write(refused, number)
        candidates = valid.in_order()
        heads = held_out(candidates, min(settings.valid_share * total, settings.valid_bytes))

        def rests_of(documents: dict[bytes, int]) -> list[tuple[bytes, int]]:
            rests = ((document[len(heads.get(document, b"")) :], number) for document, number in documents.items())
            return [(rest, number) for rest, number in rests if rest]

        for document, number in rests_of(candidates):
            train.write(document, number)
    documents = sum(file.num_documents for file in files)
    say(f"{documents:,} documents of {paragraphs:,} paragraphs, {total:,} bytes of text")
    if unseen:
        names = " ".join(sorted(marker.decode("utf-8") for marker in unseen))
        say(f"WARNING: --protect: the text never has {names}: compare case and Unicode form (NFC, NFD) with the text")
    learnable = rests_of(sample.in_order())
    if not train.groups or not learnable:
        raise UserError(
            "nothing would be left to train on beside the validation text: give at least two different paragraphs or documents "
            "(one JSON object per line, blank lines, or --document line), or to amos prepare a larger --sample-megabytes"
        )
    held = [(heads[document], number) for document, number in candidates.items() if document in heads]
    size = _count(held)["bytes"]
    say(
        f"held out for validation: {size:,} bytes, {size / total:.2%} of the text "
        f"(asked for: {settings.valid_share:.2%}, at most {settings.valid_bytes:,} bytes)"
    )
    _write(directory / VALID, held)
    _write(directory / SAMPLE, learnable)
    counts = [{"documents": file.num_documents, "without_text": file.without_text} for file in files]
    return Split(counts, {"name": SAMPLE, **_count(learnable)}, train.groups)


def _count(documents: list[tuple[bytes, int]]) -> dict[str, int]:
    return {
        "documents": sum(number for _, number in documents),
        "paragraphs": sum(number * document.count(b"\n") for document, number in documents),
        "bytes": sum(number * len(document) for document, number in documents),
    }


def held_out(candidates: dict[bytes, int], budget: float) -> dict[bytes, bytes]:
    """Return what is held out of ``candidates``, which has their numbers: all of a document, or its first paragraphs.

    These are the first that fit into ``budget`` bytes, at least one, with its copies. Of one that has more than twice the
    budget, its first paragraphs are. Copies of more than that, and a paragraph of ten times the budget, are passed over.
    """
    heads, size = {}, 0
    for document, number in candidates.items():
        is_large = number == 1 and len(document) > 2 * budget
        head = _first_paragraphs(document, budget - size) if is_large else document
        if size >= budget or (heads and head == document and size + len(document) > budget):
            break
        held = number * len(head)
        if size + held <= (10 if number == 1 else 2) * budget:
            heads[document] = head
            size += held
    if not heads:
        first, number = next(iter(candidates.items()))
        heads[first] = _first_paragraphs(first, budget / number)
    return heads


def _first_paragraphs(document: bytes, budget: float) -> bytes:
    """Return the first paragraphs, of about ``budget`` bytes: at least one, and not all of several."""
    end = document.find(b"\n", max(0, math.ceil(budget) - 1)) + 1
    if end in (0, len(document)):
        end = document.rfind(b"\n", 0, -1) + 1
    return document[:end] if end else document


def text_file(number: int) -> str:
    """Return the name of a file of training text; the numbers go on from group to group."""
    return f"{number:05d}.txt"


def group_into_shards(sizes: list[int], limit: int) -> list[list[int]]:
    """Return the groups of each shard: consecutive, of nearly equal size, at most ``limit`` bytes or one group."""
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

    def write(self, document: bytes, number: int) -> None:
        size = len(document)
        for _ in range(number):
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


def _write(path: Path, documents: list[tuple[bytes, int]]) -> None:
    with open(path, "wb") as stream:
        for document, number in documents:
            for _ in range(number):
                stream.write(document + b"\n")
