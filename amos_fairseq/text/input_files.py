"""Lines and rows of any input file, read in constant memory; every error names the file and the line.

NUL characters are removed from all texts, because tokenizers differ: one removes them, another encodes them as ``<unk>``.
"""

import csv
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import parse_json
from amos_fairseq.text.arrow_files import arrow_rows, folder_files, open_arrow, without_nul

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
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
# Without this list such a file would be reported as "not UTF-8", or an uncompressed archive would be read as text.
_NOT_READ = {".7z", ".arrow", ".bz2", ".lz4", ".parquet", ".rar", ".tar", ".tbz", ".tbz2", ".tgz", ".txz", ".zip"}
_UTF8_MARK = b"\xef\xbb\xbf"

TEXT, TSV, CSV, JSONL, PARQUET, FOLDER = "text", "tsv", "csv", "jsonl", "parquet", "folder"
_TABLES = {".tsv": TSV, ".csv": CSV, ".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
MOST_COLUMNS = 10_000
OBJECTS_WITH_KEYS = 100

OnRead = Callable[[int], object]  # called with numbers of bytes that were read from disk


def ignore(size: int) -> None:
    pass


def kind_and_compression(path: Path) -> tuple[str, str]:
    """Return ``(".jsonl", ".gz")`` for ``Text.jsonl.GZ``; an empty string for a missing suffix."""
    *before, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    return (before[-1], last) if last in COMPRESSIONS else (last, "")


def kind_of(path: Path) -> str:
    """Return the kind of an input by its suffix, TEXT for others; refuse what is no file, is empty or cannot be read."""
    if path.is_dir():
        return FOLDER
    suffix, compression = kind_and_compression(path)
    problem = None
    if not path.exists():
        problem = "no such file"
    elif not path.is_file():  # opening a pipe would wait for its writer
        problem = "is not a file"
    elif not os.access(path, os.R_OK):
        problem = "cannot be read: permission denied"
    elif path.stat().st_size == 0:
        problem = "is empty: fill it, or leave it out"
    elif suffix == ".parquet" and compression:
        problem = f"Parquet is compressed inside: unpack {compression} first"
    if problem:
        raise UserError(f"{path}: {problem}")
    return _TABLES.get(suffix, TEXT)


def files_of(path: Path) -> list[Path]:
    """Return the files of an input in order: the file itself, or those of a folder, which must be whole."""
    return folder_files(path) if path.is_dir() else [path]


def read_content(path: Path, limit: int) -> bytes:
    """Return the whole content, of at most ``limit`` bytes."""
    with _opened(path, ignore) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path} holds more than {_in_mib(limit)}: divide it into smaller files")
    return content


def read_lines(path: Path, on_read: OnRead = ignore) -> Iterator[tuple[int, bytes]]:
    """Yield numbered lines (from 1) that are valid UTF-8, with their line ends, without a byte-order mark."""
    kind, _ = kind_and_compression(path)
    if kind in _NOT_READ:
        raise UserError(
            f"{path}: {kind} files are not supported: unpack it; text can be compressed as .gz, .xz or .zst"
        )
    number = offset = 0
    with _opened(path, on_read) as stream:
        while line := stream.readline(LARGEST_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > LARGEST_DOCUMENT_BYTES:
                raise UserError(
                    f"{path}, line {number}: longer than {_in_mib(LARGEST_DOCUMENT_BYTES)}: divide it into shorter lines, "
                    "with a blank line between documents"
                )
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                place = f"line {number}, byte {offset + error.start}"
                raise UserError(
                    f"{path}, {place}: not UTF-8 ({error.reason}): convert the file, for example with iconv"
                ) from None
            offset += len(line)
            yield number, line.removeprefix(_UTF8_MARK) if number == 1 else line


def refuse_large(document: bytes | bytearray, what: str) -> None:
    if len(document) > LARGEST_DOCUMENT_BYTES:
        raise UserError(f"{what} is larger than {_in_mib(LARGEST_DOCUMENT_BYTES)}: put a blank line between documents")


class TableFile:
    """One table, whose columns have names. ``rows()`` reads it once.

    - ``tsv``: a row is a line. Tabs always separate and quotes are ordinary characters, as in GLUE's files; with
      ``csv_quotes`` it is CSV with tabs, as pandas and ``csv`` write it. Values: ``str``.
    - ``csv``: as Python's ``csv`` reads it, strictly; a quoted field may have line ends. ``,`` or ``;`` separates: the one
      that gives the first line more columns, ``,`` if they are equal. Values: ``str``.
    - ``jsonl`` (also ``.ndjson``): an object on each line. The columns are the keys of the first ``OBJECTS_WITH_KEYS``; a key
      that is missing is None, and others are ignored. Values: those of JSON.
    - ``parquet``, and ``folder`` of ``Dataset.save_to_disk``: Python values. The number of a class of a ``ClassLabel``, alone
      or in a list, is replaced by the name of the class, and -1 by None.

    Attributes:
        columns: the first line of TSV and CSV; 1, 2, ... without a ``header``.
        broken_lines: line numbers (from 1) where rows of TSV and CSV begin that have another number of columns. They are
            left out.
    """

    def __init__(self, path: Path, header: bool = True, csv_quotes: bool = False, on_read: OnRead = ignore) -> None:
        self.path, self.kind, self.header, self._on_read = path, kind_of(path), header, on_read
        self.broken_lines: list[int] = []
        if self.kind == TEXT:
            raise UserError(
                f"{path}: by its name, it is no table: give .tsv, .csv or .jsonl (also with "
                f"{', '.join(COMPRESSIONS)}), .parquet, or a folder of save_to_disk of datasets"
            )
        if not header and self.kind not in (TSV, CSV):
            raise UserError(f"{path}: its columns have names already: remove --no-header")
        if self.kind in (TSV, CSV):
            self._quotes = csv_quotes or self.kind == CSV
            self._separator = "\t" if self.kind == TSV else self._separator_of_csv()
            first = self._first_fields(self._separator)
            self.columns = tuple(first) if header else tuple(str(number + 1) for number in range(len(first)))
        elif self.kind == JSONL:
            objects = islice(_json_objects(path, ignore), OBJECTS_WITH_KEYS)
            self.columns = tuple(dict.fromkeys(key for _, row in objects for key in row))
        else:
            with open_arrow(path) as (schema, _, _):
                self.columns = tuple(schema.names)
        if not self.columns:
            raise UserError(f"{path} is empty, or its first line has no names of columns: fill it")
        if len(self.columns) > MOST_COLUMNS:
            raise UserError(f"{path} has {len(self.columns):,} columns: remove some, at most {MOST_COLUMNS:,} are read")
        if len(set(self.columns)) < len(self.columns):
            twice = next(name for name in self.columns if self.columns.count(name) > 1)
            raise UserError(f"{path}: two columns have the name {twice[:60]!r}: rename one of them")

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the values of each row by column, with the number of its first line, or of the row where there are no lines;
        both start at 1."""
        if self.kind in (TSV, CSV):
            rows = self._separated_rows()
        elif self.kind == JSONL:
            objects = _json_objects(self.path, self._on_read)
            rows = ((number, {name: row.get(name) for name in self.columns}) for number, row in objects)
        else:
            rows = arrow_rows(self.path, self._on_read)
        is_empty = True
        for number, row in rows:
            is_empty = False
            yield number, row
        if is_empty and self.broken_lines:
            raise UserError(
                f"{self.path}: none of its {len(self.broken_lines)} lines has the {len(self.columns)} "
                f"{'tab-separated ' if self.kind == TSV else ''}columns that were expected "
                f"({', '.join(self.columns)[:200]}): is it the right file?"
            )
        if is_empty:
            raise UserError(f"{self.path} is empty, but for the names of its columns: fill it")

    def _separated_rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        records = self._records(self._separator, self._on_read)
        for number, fields in islice(records, 1 if self.header else 0, None):
            if len(fields) == len(self.columns):
                yield number, dict(zip(self.columns, fields, strict=True))
            else:
                self.broken_lines.append(number)

    def _records(self, separator: str, on_read: OnRead = ignore) -> Iterator[tuple[int, list[str]]]:
        """Yield the fields of each row, with the number of its first line. An empty line has one empty field."""
        lines = ((number, line.decode("utf-8").replace("\0", "")) for number, line in read_lines(self.path, on_read))
        if self._quotes:
            yield from _csv_records(self.path, (line for _, line in lines), separator)
            return
        for number, line in lines:
            yield number, line.rstrip("\r\n").split("\t", MOST_COLUMNS)  # a broken line may have very many more

    def _separator_of_csv(self) -> str:
        widths: dict[str, int] = {}
        for separator in (",", ";"):
            try:
                widths[separator] = len(self._first_fields(separator))
            except UserError:  # raised again when the table is read
                widths[separator] = 0
        if max(widths.values()) == 1 and b"\t" in next(read_lines(self.path))[1]:
            raise UserError(
                f"{self.path}: its first line has tabs and neither , nor ; between columns: rename it to .tsv"
            )
        return max(widths, key=widths.get)

    def _first_fields(self, separator: str) -> list[str]:
        _, fields = next(self._records(separator), (1, []))
        return fields


def _csv_records(path: Path, lines: Iterator[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        start = reader.line_num + 1
        usual_limit = csv.field_size_limit(LARGEST_DOCUMENT_BYTES)  # of the process: 131,072 is a short text
        try:
            fields = next(reader, None)
        except csv.Error as error:
            raise UserError(
                f"{path}, line {start}: the row that begins there is not CSV ({error}): put a field with a separator, a quote "
                "or a line end into quotes, close them, and write quotes inside of it twice"
            ) from None
        finally:
            csv.field_size_limit(usual_limit)
        if fields is None:
            return
        yield start, fields or [""]


def _json_objects(path: Path, on_read: OnRead) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in json_lines(path, on_read):
        try:
            row = parse_json(line)
            row = without_nul(row) if b"\\u" in line else row
        except ValueError as error:
            raise UserError(
                f'{path}, line {number} {error}: each line has to be an object, such as {{"text": "..."}}'
            ) from None
        yield number, row


def json_lines(path: Path, on_read: OnRead) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank and can be parsed."""
    for number, line in read_lines(path, on_read):
        refuse_many_brackets(line, path, number)
        if line.strip():
            yield number, line


def refuse_many_brackets(line: bytes, path: Path, number: int) -> None:
    """Refuse a line of JSON that could fill the memory when it is parsed."""
    if len(line) > LARGEST_NUMBER_OF_BRACKETS < line.count(b"[") + line.count(b"{"):
        raise UserError(
            f"{path}, line {number}: more than {LARGEST_NUMBER_OF_BRACKETS:,} brackets: divide the document"
        )


@contextmanager
def _opened(path: Path, on_read: OnRead) -> Iterator[BinaryIO]:
    """Open the decompressed content of a file."""
    _, compression = kind_and_compression(path)
    with open(path, "rb", buffering=0) as raw:
        chunks = _read_chunks(raw, on_read)
        try:
            yield io.BufferedReader(
                _Stream(_decompressed(chunks, compression) if compression else chunks), BUFFER_BYTES
            )
        except _DAMAGED as error:
            if "memory" in str(error).lower():
                raise UserError(
                    f"{path} was compressed with a window of more than {_in_mib(_LARGEST_WINDOW_BYTES)}: compress it again "
                    "without --long, --ultra or dict="
                ) from error
            raise UserError(f"{path} is damaged ({error}): download or compress it again") from error


def _read_chunks(raw: BinaryIO, on_read: OnRead) -> Iterator[bytes]:
    for chunk in iter(partial(raw.read, BUFFER_BYTES), b""):
        on_read(len(chunk))
        yield chunk


def _decompressed(chunks: Iterator[bytes], suffix: str) -> Iterator[bytes]:
    """Yield the content of all frames, streams or members of a compressed file, with a bound on memory.

    The libraries' own readers set no limit on the window, and that of zstandard accepts a truncated file as complete. Its
    decompressor returns all that a part of the input holds, 128 KiB for each 4 bytes at most: so the parts are small.
    """
    stream = None
    for chunk in chunks:
        position = 0
        while position < len(chunk):
            part = chunk[position : position + _COMPRESSED_PART_BYTES]
            position += len(part)
            if stream is None:
                part = part if suffix == ".zst" else part.lstrip(b"\0")  # zeros may follow the streams of the others
                if not part:
                    continue
                stream = _STREAMS[suffix]()
            yield stream.decompress(part)
            if stream.eof:
                position -= len(stream.unused_data)
                stream = None
    if stream is not None:
        raise EOFError("the file ends inside of the compressed text")


class _Stream(io.RawIOBase):
    """A readable stream of the bytes that an iterator yields."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _in_mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB"
