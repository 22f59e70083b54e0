"""Encode text to ids with all processes, in constant memory; the bytes do not depend on their number."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from amos_fairseq.text.binarizing import END_ID, NUM_FAIRSEQ_SYMBOLS, UNKNOWN_ID, BinarizedFile, encode_lines
from amos_fairseq.text.processes import InOrder
from amos_fairseq.text.tokenization import Tokenizer

RANGE_BYTES = 1 << 21  # work of one process at a time
_SEARCH_BYTES = 1 << 16
_DOCUMENT_END = b"\n\n"


@dataclass
class TextCounts:
    """``words``: separated by white space in the text; ``pieces``: without the ``</s>`` of each line; ``tokens``: with them
    and with the lines of ``</s>`` alone between documents; ``unknown``: pieces that are not in ``dict.txt``.
    """

    documents: int = 0
    paragraphs: int = 0
    words: int = 0
    bytes: int = 0
    pieces: int = 0
    tokens: int = 0
    unknown: int = 0

    def add(self, other: "TextCounts") -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def encode_files(
    files: list[Path], prefix: Path, tokenizer: Tokenizer, in_order: InOrder, on_done: Callable[[int], object]
) -> TextCounts:
    """Encode files of complete documents into ``prefix.bin`` and ``prefix.idx``.

    One paragraph per line, a line of ``</s>`` alone between documents. ``on_done`` is called with the number of bytes of text
    newly encoded.
    """
    ranges = (part for file in files for part in document_ranges(file))
    total = TextCounts()
    with BinarizedFile(prefix, len(tokenizer) + NUM_FAIRSEQ_SYMBOLS) as target:
        for ids, lengths, counts, size in in_order(encode_range, ranges):
            if lengths:
                if total.documents:
                    target.add_lines(np.array([END_ID]), [1])
                    total.tokens += 1
                target.add_lines(ids, lengths)
                total.add(counts)
            on_done(size)
    return total


def document_ranges(path: Path, size: int = RANGE_BYTES) -> Iterator[tuple[str, int, int]]:
    """Yield (path, start, end) of parts of about ``size`` bytes that end at the end of a document."""
    length = path.stat().st_size
    with open(path, "rb") as stream:
        start = 0
        while start < length:
            end = _next_document_end(stream, min(length, start + size), length)
            yield str(path), start, end
            start = end


def encode_range(part: tuple[str, int, int]) -> tuple[np.ndarray, list[int], TextCounts, int]:
    """Return the documents of a part as the ids [sum of lengths] and the lengths of lines; their counts; the bytes read."""
    path, start, end = part
    with open(path, "rb") as stream:
        stream.seek(start)
        text = stream.read(end - start)
    counts = TextCounts()
    ids: list[int] = []
    lengths: list[int] = []
    documents = [document.decode("utf-8").split("\n") for document in text.split(_DOCUMENT_END)]
    encoded = iter(encode_lines([paragraph for document in documents for paragraph in document]))
    for document in documents:
        lines = _encode_document(document, encoded, counts)
        if lines and lengths:
            lines.insert(0, [END_ID])
        for line in lines:
            ids += line
            lengths.append(len(line))
        counts.documents += bool(lines)
    counts.tokens = len(ids)
    return np.array(ids, dtype=np.int32), lengths, counts, len(text)


def _encode_document(paragraphs: list[str], encoded: Iterator[list[int]], counts: TextCounts) -> list[list[int]]:
    """Return lines of ids. A paragraph without pieces is dropped, because an empty line ends a document."""
    lines = []
    for paragraph, line in zip(paragraphs, encoded):  # noqa: B905, the next document takes the rest
        if not line:
            continue
        counts.paragraphs += 1
        counts.words += len(paragraph.split())
        counts.bytes += len(paragraph.encode("utf-8")) + 1
        counts.pieces += len(line)
        counts.unknown += line.count(UNKNOWN_ID)
        line.append(END_ID)
        lines.append(line)
    return lines


def _next_document_end(stream, position: int, length: int) -> int:
    """Return the first end of a document at or after ``position``."""
    position = max(0, position - len(_DOCUMENT_END))
    while position < length:
        stream.seek(position)
        block = stream.read(_SEARCH_BYTES)
        if (found := block.find(_DOCUMENT_END)) != -1:
            return position + found + len(_DOCUMENT_END)
        position += len(block) - 1
        if len(block) <= 1:
            break
    return length
