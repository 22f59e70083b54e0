"""Read documents or lines of any input file in constant memory, and report the position of every error."""

import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from amos_fairseq.errors import UserError

BUFFER_BYTES = 1 << 20
# A document is held in memory and belongs to one shard, so its size is limited.
LARGEST_DOCUMENT_BYTES = 1 << 27
# Parsed, an empty list of two bytes takes eighty, so that a line of a few kilobytes, compressed, would fill the memory.
LARGEST_NUMBER_OF_BRACKETS = 10_000_000
# What a compressed text may refer back to is in memory too. The program zstd has the same limit; xz -9 takes half of it.
_LARGEST_WINDOW_BYTES = 1 << 27
_COMPRESSED_PART_BYTES = 512  # at most 16 MiB of text
_STREAMS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    ".xz": lambda: lzma.LZMADecompressor(memlimit=_LARGEST_WINDOW_BYTES + (1 << 20)),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES).decompressobj(),
}
COMPRESSIONS = tuple(_STREAMS)
# Without this list such a file would be reported as "not UTF-8", or an uncompressed archive would be read as text.
NOT_READ = frozenset(
    {".7z", ".arrow", ".bz2", ".lz4", ".parquet", ".rar", ".tar", ".tbz", ".tbz2", ".tgz", ".txz", ".zip"}
)
JSON_LINES = (".jsonl", ".ndjson")
_UTF8_MARK = b"\xef\xbb\xbf"
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
_LINE_ENDS = re.compile(r"[\r\n]+")
_PARTS = re.compile(rb"[^\r]+")


def kind_and_compression(path: Path) -> tuple[str, str]:
    """Return ``(".jsonl", ".gz")`` for ``Text.jsonl.GZ``; an empty string for a missing suffix."""
    *before, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    return (before[-1], last) if last in COMPRESSIONS else (last, "")


def refuse_other_formats(path: Path) -> None:
    """Raise :class:`UserError` for unsupported archives, tables and compressions, recognized by their suffix."""
    kind, _ = kind_and_compression(path)
    if kind in NOT_READ:
        raise UserError(
            f"{path}: {kind} files are not supported: unpack it to plain text or .jsonl, or recompress that as .gz, .xz or .zst"
        )


def document_of(text: str) -> bytes:
    """Return the document of a text of JSON or of a table, as :class:`InputFile` describes it; empty if it has no paragraph."""
    paragraphs = map(str.strip, _LINE_ENDS.split(text.replace("\0", "")))
    return "".join(f"{paragraph}\n" for paragraph in paragraphs if paragraph).encode("utf-8")


def refuse_many_brackets(line: bytes, path: Path, number: int) -> None:
    """Raise :class:`UserError` for a line of JSON that could fill the memory when it is parsed."""
    if len(line) > LARGEST_NUMBER_OF_BRACKETS < line.count(b"[") + line.count(b"{"):
        raise UserError(
            f"{path}, line {number}: more than {LARGEST_NUMBER_OF_BRACKETS:,} brackets: divide the document"
        )


class InputFile:
    """One text file. ``documents()`` or ``lines()`` reads it once; ``sha256`` is then that of the file on disk.

    A document is ``bytes``: valid UTF-8, one non-empty stripped paragraph per line, each line ended by ``\\n``. In
    ``.jsonl`` every line is a document (one of its fields); in other files blank lines separate them. NUL characters
    are removed, because tokenizers differ: one removes them, another encodes them as ``<unk>``.
    """

    def __init__(self, path: Path, on_read: Callable[[int], object] = lambda size: None) -> None:
        self.path = path
        self._on_read = on_read
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def documents(self, column: str = "text") -> Iterator[bytes]:
        """Yield the documents in order; ``column`` is the field of JSON lines that has the text."""
        kind, _ = kind_and_compression(self.path)
        lines = self.lines()
        empty = True
        for document in self._json_documents(lines, column) if kind in JSON_LINES else self._text_documents(lines):
            empty = False
            yield document
        if empty:
            raise UserError(f"{self.path} contains no text: remove it from the inputs or fill it")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield numbered lines (from 1) that are valid UTF-8, with their line ends, without a byte-order mark."""
        with self._opened() as stream:
            yield from self._checked_lines(stream)

    def content(self, limit: int) -> bytes:
        """Return the whole content."""
        content = bytearray()
        with self._opened() as stream:
            while part := stream.read(BUFFER_BYTES):
                content += part
                if len(content) > limit:
                    raise UserError(f"{self.path} holds more than {_in_mib(limit)}: divide it into smaller files")
        return bytes(content)

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        _, compression = kind_and_compression(self.path)
        with open(self.path, "rb", buffering=0) as raw:
            measured = _MeasuredFile(raw, self._digest, self._on_read)
            try:
                yield io.BufferedReader(
                    _DecompressedFile(measured, compression) if compression else measured, BUFFER_BYTES
                )
            except _DAMAGED as error:
                if "memory" in str(error).lower():
                    raise UserError(
                        f"{self.path} was compressed with a window of more than {_in_mib(_LARGEST_WINDOW_BYTES)}: "
                        "compress it again without --long, --ultra or dict="
                    ) from error
                raise UserError(f"{self.path} is damaged ({error}): download or compress it again") from error

    def _text_documents(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
        document = bytearray()  # a list of many short paragraphs would take many times their size
        start = 0
        for number, line in lines:
            paragraph = line.replace(b"\0", b"").strip()
            if not paragraph:
                if document:
                    yield bytes(document)
                document = bytearray()
                continue
            start = start if document else number
            # A lone carriage return ends a line for fairseq, which reads with universal newlines.
            for part in _PARTS.finditer(paragraph):
                if stripped := part.group().strip():
                    document += stripped + b"\n"
            if len(document) > LARGEST_DOCUMENT_BYTES:
                raise UserError(
                    f"{self.path}: the document from line {start} on is larger than {_in_mib(LARGEST_DOCUMENT_BYTES)}: "
                    "put a blank line between documents"
                )
        if document:
            yield bytes(document)

    def _json_documents(self, lines: Iterable[tuple[int, bytes]], column: str) -> Iterator[bytes]:
        for number, line in lines:
            if not line.strip():
                continue
            refuse_many_brackets(line, self.path, number)
            try:
                document = document_of(json.loads(line)[column])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UserError(
                    f'{self.path}, line {number}: not a JSON object with a string "{column}": {line[:60]!r}'
                ) from None
            if document:
                yield document

    def _checked_lines(self, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
        number = offset = 0
        while line := stream.readline(LARGEST_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > LARGEST_DOCUMENT_BYTES:
                raise UserError(
                    f"{self.path}, line {number}: longer than {_in_mib(LARGEST_DOCUMENT_BYTES)}: divide it into shorter "
                    "lines, with a blank line between documents"
                )
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"line {number}, byte {offset + error.start}"
                raise UserError(
                    f"{self.path}, {place}: not UTF-8 ({error.reason}): convert the file, for example with iconv"
                ) from None
            offset += len(line)
            yield number, line.removeprefix(_UTF8_MARK) if number == 1 else line


def _in_mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB"


class _MeasuredFile(io.RawIOBase):
    """Hash the bytes and report progress while they are read, so that a corpus is read only once."""

    def __init__(self, raw: BinaryIO, digest: "hashlib._Hash", on_read: Callable[[int], object]) -> None:
        self._raw, self._digest, self._on_read = raw, digest, on_read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        size = self._raw.readinto(buffer)
        self._digest.update(buffer[:size])
        self._on_read(size)
        return size


class _DecompressedFile(io.RawIOBase):
    """The content of all frames, streams or members of a compressed file, with a bound on memory.

    The libraries' own readers set no limit on the window, and that of zstandard accepts a truncated file as complete. Its
    decompressor returns all that a part of the input holds, 128 KiB for each 4 bytes at most: so the parts are small.
    """

    def __init__(self, raw: BinaryIO, suffix: str) -> None:
        self._raw, self._new_stream = raw, _STREAMS[suffix]
        self._is_padded = suffix != ".zst"  # zeros may follow the streams of the others
        self._stream = None
        self._compressed, self._position = b"", 0
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._plain:
            if self._position == len(self._compressed):
                self._compressed, self._position = self._raw.read(BUFFER_BYTES), 0
                if not self._compressed:
                    if self._stream is not None:
                        raise EOFError("the file ends inside of the compressed text")
                    return 0
            self._decompress_part()
        size = min(len(buffer), len(self._plain))
        buffer[:size] = self._plain[:size]
        self._plain = self._plain[size:]
        return size

    def _decompress_part(self) -> None:
        part = self._compressed[self._position : self._position + _COMPRESSED_PART_BYTES]
        self._position += len(part)
        if self._stream is None:
            part = part.lstrip(b"\0") if self._is_padded else part
            if not part:
                return
            self._stream = self._new_stream()
        self._plain = memoryview(self._stream.decompress(part))
        if self._stream.eof:
            self._position -= len(self._stream.unused_data)
            self._stream = None
