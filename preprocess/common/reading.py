"""Read documents or lines of any input file in constant memory, and report the position of every error."""

import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator, List, Tuple

import zstandard

from amos_fairseq.errors import UserError

BUFFER_BYTES = 1 << 20
# A document is held in memory and belongs to one shard, so its size is limited.
LARGEST_DOCUMENT_BYTES = 1 << 27
COMPRESSIONS = (".gz", ".xz", ".zst")
# Without this list such a file would be reported as "not UTF-8", or an uncompressed archive would be read as text.
NOT_READ = frozenset(
    {".7z", ".arrow", ".bz2", ".lz4", ".parquet", ".rar", ".tar", ".tbz", ".tbz2", ".tgz", ".txz", ".zip"}
)
_JSON_LINES = (".jsonl", ".ndjson")
_UTF8_MARK = b"\xef\xbb\xbf"
_DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
_LINE_ENDS = re.compile(r"[\r\n]+")


def kind_and_compression(path: Path) -> Tuple[str, str]:
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


class InputFile:
    """One text file. ``documents()`` or ``lines()`` reads it once; ``sha256`` is then that of the file on disk.

    A document is ``bytes``: valid UTF-8, one non-empty stripped paragraph per line, each line ended by ``\\n``. In
    ``.jsonl`` every line is a document (its field ``text``); in other files blank lines separate them. NUL characters
    are removed, because tokenizers differ: one removes them, another encodes them as ``<unk>``.
    """

    def __init__(self, path: Path, on_read: Callable[[int], object] = lambda size: None) -> None:
        self.path = path
        self._on_read = on_read
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def documents(self) -> Iterator[bytes]:
        """Yield the documents in order.

        Raises:
            UserError: the file is damaged, not UTF-8, not JSON lines, contains no text, or a document that is too large.
        """
        kind, _ = kind_and_compression(self.path)
        parse = self._json_documents if kind in _JSON_LINES else self._text_documents
        empty = True
        for document in parse(self.lines()):
            empty = False
            yield document
        if empty:
            raise UserError(f"{self.path} contains no text: remove it from the inputs or fill it")

    def lines(self) -> Iterator[Tuple[int, bytes]]:
        """Yield numbered lines (from 1) that are valid UTF-8, with their line ends, without a byte-order mark.

        Raises:
            UserError: the file is damaged, not UTF-8, or has a line that is too large.
        """
        _, compression = kind_and_compression(self.path)
        with open(self.path, "rb", buffering=0) as raw:
            measured = _MeasuredFile(raw, self._digest, self._on_read)
            try:
                yield from self._checked_lines(_decompressed(measured, compression))
                while measured.read(BUFFER_BYTES):  # the hash includes what follows the compressed stream
                    pass
            except _DAMAGED as error:
                raise UserError(f"{self.path} is damaged ({error}): download or compress it again") from error

    def _text_documents(self, lines: Iterable[Tuple[int, bytes]]) -> Iterator[bytes]:
        paragraphs: List[bytes] = []
        size = start = 0
        for number, line in lines:
            paragraph = line.replace(b"\0", b"").strip()
            if not paragraph:
                if paragraphs:
                    yield b"\n".join(paragraphs) + b"\n"
                paragraphs, size = [], 0
                continue
            start = start if paragraphs else number
            size += len(paragraph)
            if size > LARGEST_DOCUMENT_BYTES:
                raise self._too_large(start)
            # A lone carriage return ends a line for fairseq, which reads with universal newlines.
            paragraphs += filter(None, map(bytes.strip, paragraph.split(b"\r")))
        if paragraphs:
            yield b"\n".join(paragraphs) + b"\n"

    def _json_documents(self, lines: Iterable[Tuple[int, bytes]]) -> Iterator[bytes]:
        for number, line in lines:
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                paragraphs = map(str.strip, _LINE_ENDS.split(text.replace("\0", "")))
                document = "".join(f"{paragraph}\n" for paragraph in paragraphs if paragraph).encode("utf-8")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise UserError(
                    f'{self.path}, line {number}: not a JSON object with a string "text": {line[:60]!r}'
                ) from None
            if document:
                yield document

    def _checked_lines(self, stream: BinaryIO) -> Iterator[Tuple[int, bytes]]:
        number = offset = 0
        while line := stream.readline(LARGEST_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > LARGEST_DOCUMENT_BYTES:
                raise self._too_large(number)
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"line {number}, byte {offset + error.start}"
                raise UserError(
                    f"{self.path}, {place}: not UTF-8 ({error.reason}): convert the file, for example with iconv"
                ) from None
            offset += len(line)
            yield number, line.removeprefix(_UTF8_MARK) if number == 1 else line

    def _too_large(self, number: int) -> UserError:
        return UserError(
            f"{self.path}: the document from line {number} on is larger than {LARGEST_DOCUMENT_BYTES >> 20} MiB: put a "
            "blank line between documents"
        )


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


class _ZstandardFile(io.RawIOBase):
    """All frames of a .zst file. The library's own reader accepts a truncated file as complete."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = None
        self._compressed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._plain:
            chunk = self._compressed or self._raw.read(BUFFER_BYTES)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstandard frame")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self._plain = self._frame.decompress(chunk)
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._plain))
        buffer[:size] = self._plain[:size]
        self._plain = self._plain[size:]
        return size


def _decompressed(measured: _MeasuredFile, suffix: str) -> BinaryIO:
    buffered = io.BufferedReader(measured, BUFFER_BYTES)
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=buffered), BUFFER_BYTES)
    if suffix == ".xz":
        return io.BufferedReader(lzma.LZMAFile(buffered), BUFFER_BYTES)
    if suffix == ".zst":
        return io.BufferedReader(_ZstandardFile(measured), BUFFER_BYTES)
    return buffered
