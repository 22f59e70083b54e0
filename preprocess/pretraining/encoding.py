"""Encode text to pieces with all processes, in constant memory; the bytes do not depend on their number."""

import dataclasses
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Tuple

from amos_fairseq.tokenization import Tokenizer, load_tokenizer
from preprocess.common.processes import ordered_results, use_threads

RANGE_BYTES = 1 << 21  # work of one process at a time
_SEARCH_BYTES = 1 << 16
_DOCUMENT_END = b"\n\n"

_tokenizer: Optional[Tokenizer] = None
_symbols: frozenset = frozenset()


@dataclass
class Counts:
    """``pieces``: without the ``</s>`` of each line; ``unknown``: those of them that are not in ``dict.txt``;
    ``lines``: paragraphs, and the empty lines between documents; ``words``: separated by white space in the text.
    """

    documents: int = 0
    paragraphs: int = 0
    words: int = 0
    bytes: int = 0
    lines: int = 0
    pieces: int = 0
    unknown: int = 0

    def add(self, other: "Counts") -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def start_encoding_process(tokenizer_directory: str) -> None:
    """Initialize a process of the pool, with one tokenizer and one thread."""
    global _tokenizer, _symbols
    use_threads(1)
    _tokenizer = load_tokenizer(tokenizer_directory)
    _symbols = frozenset(_tokenizer.dictionary_symbols)


def encode_files(
    files: List[Path], target: Path, pool: Executor, processes: int, on_done: Callable[[int], object]
) -> Counts:
    """Encode files of complete documents into one file for ``fairseq-preprocess``.

    One paragraph per line, pieces separated by spaces, an empty line between documents. ``on_done`` is called with the
    number of bytes of text newly encoded.
    """
    ranges = (part for file in files for part in document_ranges(file))
    total = Counts()
    with open(target, "wb") as stream:
        for encoded, counts, size in ordered_results(pool, processes, encode_range, ranges):
            if encoded:
                if total.documents:
                    stream.write(b"\n")
                    total.lines += 1
                stream.write(encoded)
                total.add(counts)
            on_done(size)
    return total


def document_ranges(path: Path, size: int = RANGE_BYTES) -> Iterator[Tuple[str, int, int]]:
    """Yield (path, start, end) of parts of about ``size`` bytes that end at the end of a document."""
    length = path.stat().st_size
    with open(path, "rb") as stream:
        start = 0
        while start < length:
            end = _next_document_end(stream, min(length, start + size), length)
            yield str(path), start, end
            start = end


def encode_range(part: Tuple[str, int, int]) -> Tuple[bytes, Counts, int]:
    """Return the encoded documents of a part, with an empty line between them; their counts; the bytes read."""
    path, start, end = part
    with open(path, "rb") as stream:
        stream.seek(start)
        text = stream.read(end - start)
    counts = Counts()
    documents = [_encode_document(document, counts) for document in text.split(_DOCUMENT_END)]
    documents = [document for document in documents if document]
    counts.documents = len(documents)
    counts.lines += max(0, len(documents) - 1)
    return "\n".join(documents).encode("utf-8"), counts, len(text)


def _encode_document(document: bytes, counts: Counts) -> str:
    """Return lines of pieces. A paragraph without pieces is dropped, because an empty line ends a document."""
    paragraphs = document.decode("utf-8").split("\n")
    lines = []
    for paragraph, pieces in zip(paragraphs, _tokenizer.encode_lines(paragraphs), strict=True):
        if not pieces:
            continue
        lines.append(" ".join(pieces) + "\n")
        counts.paragraphs += 1
        counts.words += len(paragraph.split())
        counts.bytes += len(paragraph.encode("utf-8")) + 1
        counts.pieces += len(pieces)
        counts.unknown += sum(piece not in _symbols for piece in pieces)
    counts.lines += len(lines)
    return "".join(lines)


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
