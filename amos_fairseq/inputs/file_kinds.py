"""What a file is, by its content: how it is compressed, a table, JSON, or something that is not read.

The name decides only what the content cannot: the separator of a table of text.
"""

import io
import itertools
import json
import lzma
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from amos_fairseq.errors import UserError

TEXT, TSV, CSV, JSONL, JSON, PARQUET, FOLDER = "text", "tsv", "csv", "jsonl", "json", "parquet", "folder"
_KINDS_OF_NAMES = {".tsv": TSV, ".csv": CSV, ".jsonl": JSONL, ".ndjson": JSONL, ".json": JSONL, ".parquet": PARQUET}

BUFFER_BYTES = 1 << 20
# A document is held in memory and belongs to one shard, so its size is limited.
LARGEST_DOCUMENT_BYTES = 1 << 27
# Parsed, an empty list of two bytes takes eighty, so that a line of a few kilobytes, compressed, would fill the memory.
LARGEST_NUMBER_OF_BRACKETS = 10_000_000
UTF8_MARK = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n\v\f\x1e"  # the last one begins the objects of a JSON text sequence
# What decides on the kind of a file: this many lines that are not blank, or as many as begin in this many bytes.
FIRST_LINES, _FIRST_BYTES = 20, 1 << 18

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

_FROM_UTF16 = "convert it to UTF-8, for example with iconv -f UTF-16 -t UTF-8 FILE > NEW"
_PARQUET = re.compile(rb"PAR1[\x00-\x08\x0e-\x1f]")  # a page follows, whose header begins with a small number
# The first bytes of compressed files; zstd may begin with a frame that is skipped.
_MAGIC = {
    ".gz": re.compile(rb"\x1f\x8b"),
    ".xz": re.compile(rb"\xfd7zXZ\0"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
}
# Files that are not read, by their first bytes: what they are, and what to do. Some are valid UTF-8 and would be read as text.
_NOT_READ = [
    (re.compile(pattern, re.DOTALL), what, advice)
    for pattern, what, advice in (
        (rb"PK(\x03\x04|\x05\x06)", "a zip archive (as .xlsx and .docx are)", "unpack it, or save it as CSV or text"),
        (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
        (rb"Rar!\x1a\x07", "a rar archive", "unpack it"),
        (rb".{257}ustar(\0|  \0)", "a tar archive", "unpack it with tar -xf"),
        (rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38)", "compressed with bzip2", "unpack it with bunzip2"),
        (rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18", "compressed with lz4", "unpack it with unlz4"),
        (rb"\x5d\0\0[\0-\xff]{2}\xff", "compressed with lzma", "unpack it with unlzma"),
        (rb"WARC/1\.", "a WARC file of Common Crawl", "take the texts of its records, for example with warcio"),
        (rb"ARROW1|FEA1|\xff\xff\xff\xff", "a file of Arrow or Feather", "write it as Parquet"),
        (rb"%PDF-", "a PDF", "take its text, for example with pdftotext"),
        (rb"\{\\rtf", "a document of RTF", "save it as plain text"),
        (rb"\xd0\xcf\x11\xe0", "an old file of Word or Excel", "save it as plain text or CSV"),
        (rb"SQLite format 3\0", "a SQLite database", "write a table of it as CSV"),
        (rb"version https://git-lfs", "a pointer of Git LFS, not the file itself", "download it with git lfs pull"),
        (rb"\xff\xfe\0\0|\0\0\xfe\xff", "UTF-32", _FROM_UTF16.replace("16", "32")),
        (rb"\xff\xfe|\xfe\xff", "UTF-16", _FROM_UTF16),
    )
]
_ARRAY_START = re.compile(r'\[\s*(\{\s*"|(\[\s*([\d.]+\s*,\s*)*)?"[^"\n]*"\s*[,\]\n])')
_OBJECT_START = re.compile(r"""\{\s*("[^"\n]*"|'[^'\n]*')\s*:""")
# How files of JSON that are no lines of objects begin, and what makes these.
_CONVERSIONS = [
    (re.compile(pattern), command)
    for pattern, command in (
        (r"\{[^\n]*\},\s*\n", "sed 's/, *$//'"),
        (r"\{[^\r\n]*\}\r+\{", r"tr '\r' '\n' <"),
        (r"\{", "jq -c ."),
        (r"\[\s*\{", "jq -c '.[]'"),
        (r"\[\s*\[", "jq -c '.[] | {text: .[1]}'"),
        (r"\[[^\n]*\]\s*\n\[|\[\s*[-\d]", "jq -c '{text: .[1]}'"),  # a row on each line
        (r"\[", "jq -c '.[] | {text: .}'"),
    )
]
# A tag, and what certainly begins a page of HTML, a file of XML, or the articles of a Wikipedia extractor.
_TAG = re.compile(r"<[!/?]?[A-Za-z][^<>\n]*>")
# What the tags of markup have, and the names of speakers in a chat do not: ends, attributes, names of HTML.
_NO_SPEAKER = re.compile(r"</|/>|=[\"']|^<([!?]|(p|br|div|h[1-6]|li|td|tr|text)\b)", re.IGNORECASE)
_MARKUP_START = re.compile(r"<(!doctype|html|\?xml|mediawiki|doc\s+id=)", re.IGNORECASE)

OnRead = Callable[[int], object]  # called with numbers of bytes that were read from disk


def ignore(size: int) -> None:
    pass


def kind_and_compression(path: Path) -> tuple[str, str]:
    """Return the suffixes of a name: ``(".jsonl", ".gz")`` for ``Text.jsonl.GZ``, an empty string for a missing one."""
    *before, last = ["", *(suffix.lower() for suffix in path.suffixes)]
    return (before[-1], last) if last in COMPRESSIONS else (last, "")


def kind_of(path: Path) -> str:
    return look_at(path)[0]


def look_at(path: Path) -> tuple[str, list[str]]:
    """Return what an input is, and its first lines that are not blank; refuse what is no file, is empty or cannot be read.

    - FOLDER, which only ``save_to_disk`` of ``datasets`` can have written
    - PARQUET
    - JSONL: most of the first lines are objects of JSON, whatever the name of the file is
    - JSON: it begins with an array, or with an object of several lines, or most of the first lines are arrays
    - by the name: TSV, CSV; JSONL and PARQUET, whose readers then say what is wrong; else TEXT
    """
    if path.is_dir():
        return FOLDER, []
    problem = None
    if not path.exists():
        problem = "no such file"
    elif not path.is_file():  # opening a pipe would wait for its writer
        problem = "is not a file: save its content to one, because it is read more than once"
    elif not os.access(path, os.R_OK):
        problem = "cannot be read: permission denied"
    elif path.stat().st_size == 0:
        problem = "is empty: fill it, or leave it out"
    if problem:
        raise UserError(f"{path}: {problem}")
    lines = _first_lines(path)
    start, values = "".join(lines), list(map(_json_value, lines))
    num_arrays = sum(isinstance(value, list) and len(value) > 1 for value in values)  # [1] is a reference
    if _PARQUET.match(start.encode("utf-8")):
        kind = PARQUET
    elif (_ARRAY_START.match(start) and not _has_prose_behind_json(lines[0])) or 2 * num_arrays > len(lines):
        kind = JSON
    elif lines and 2 * sum(isinstance(value, dict) for value in values) >= len(lines):
        kind = JSONL
    elif _OBJECT_START.match(start) and values[0] is None and not _has_prose_behind_json(lines[0]):
        kind = JSON
    else:
        kind = _KINDS_OF_NAMES.get(kind_and_compression(path)[0], TEXT)
    return kind, lines


def _first_lines(path: Path) -> list[str]:
    """Return the first lines that are not blank: the first one is complete if it can be an object, the others always."""
    lines: list[str] = []
    number = size = 0
    with opened(path) as stream:
        while size < _FIRST_BYTES and len(lines) < FIRST_LINES and (line := stream.readline(_FIRST_BYTES)):
            number += 1
            line = (line.removeprefix(UTF8_MARK) if number == 1 else line).lstrip(_BLANKS)
            if not lines and line.startswith(b"{") and not line.endswith(b"\n"):
                line += stream.readline(LARGEST_DOCUMENT_BYTES)
            size += len(line)
            text = line.decode("utf-8", "replace")
            if text and (size < _FIRST_BYTES or not lines):
                refuse_many_brackets(text, path, number)
                lines.append(text)
    return lines


def _json_value(line: str) -> dict[str, Any] | list[Any] | None:
    try:
        return json.loads(line) if line.startswith(("{", "[")) else None
    except (ValueError, RecursionError):
        return None


def is_object(line: str) -> bool:
    return isinstance(_json_value(line), dict)


def _has_prose_behind_json(line: str) -> bool:
    try:
        _, end = json.JSONDecoder().raw_decode(line)
    except (ValueError, RecursionError):
        return False
    return line[end:].lstrip()[:1] not in ("", ",", "{", "[", "]")


def refuse_json(path: Path, lines: list[str]) -> None:
    """Refuse a file of the kind JSON, which has these first lines, with the command that converts it."""
    start = "".join(lines)
    if re.match(r"\{\s*'", start):
        raise UserError(
            f"{path} has dictionaries as Python prints them, which are not JSON: write them with json.dumps"
        )
    command = next(command for pattern, command in _CONVERSIONS if pattern.match(start))
    name = path.name.removesuffix(kind_and_compression(path)[1])
    converted = shlex.quote(f"{Path(name).stem}.lines.jsonl")  # never the input itself, which the shell would empty
    raise UserError(
        f"{path} is JSON, but not one object on each line (in double quotes, without commas between them): convert it, for "
        f"example with {command} {shlex.quote(name)} > {converted}"
    )


def refuse_markup(path: Path, lines: list[str]) -> None:
    """Refuse a text with these first lines if it begins as HTML or XML, or if most of them begin with a tag."""
    tags = [match.group() for line in lines if (match := _TAG.match(line) or _MARKUP_START.match(line))]
    are_tags = len(tags) > 2 and 2 * len(tags) >= len(lines) and any(map(_NO_SPEAKER.search, lines))
    if any(map(_MARKUP_START.match, lines[:3])) or are_tags:
        raise UserError(
            f"{path} is no plain text: its first lines begin with tags such as {tags[0][:60]}: extract the text (HTML: "
            "trafilatura; Wikipedia: WikiExtractor --json), or remove the tags, for example with sed; to train on them too, "
            "give JSON lines"
        )


def refuse_many_brackets(line: str, path: Path, number: int) -> None:
    """Refuse a line of JSON that could fill the memory when it is parsed."""
    if len(line) > LARGEST_NUMBER_OF_BRACKETS < line.count("[") + line.count("{"):
        raise UserError(
            f"{path}, line {number}: more than {LARGEST_NUMBER_OF_BRACKETS:,} brackets: divide the document"
        )


@contextmanager
def opened(path: Path, on_read: OnRead = ignore) -> Iterator[io.BufferedReader]:
    """Open the decompressed content of a file; refuse what is neither text of UTF-8 nor Parquet."""
    with open(path, "rb", buffering=0) as raw:
        chunks = _read_chunks(raw, on_read)
        first = next(chunks, b"")
        chunks = itertools.chain([first], chunks)
        compression = next((suffix for suffix, magic in _MAGIC.items() if magic.match(first)), None)
        if compression is not None:
            chunks = _decompressed(chunks, compression)
        stream = io.BufferedReader(_Stream(chunks), BUFFER_BYTES)
        try:
            first = stream.peek()
            for magic, what, advice in _NOT_READ:
                if magic.match(first):
                    raise UserError(f"{path} is {what}: {advice}")
            is_parquet = _PARQUET.match(first)
            if not is_parquet and _is_utf16(first[:4096]):
                raise UserError(f"{path} is UTF-16 or UTF-32, or no text at all: {_FROM_UTF16}")
            if compression is not None and (is_parquet or any(magic.match(first) for magic in _MAGIC.values())):
                raise UserError(f"{path}: Parquet or another compressed file is inside: unpack {compression} first")
            yield stream
        except _DAMAGED as error:
            if "memory" in str(error).lower():
                raise UserError(
                    f"{path} was compressed with a window of more than {in_mib(_LARGEST_WINDOW_BYTES)}: compress it again "
                    "without --long, --ultra or dict="
                ) from error
            raise UserError(f"{path} is damaged ({error}): download or compress it again") from error


def _is_utf16(content: bytes) -> bool:
    """Return whether every second byte is below 9, no character of a text: the upper half of Latin, Greek, Cyrillic, ..."""
    halves = (content[0::2], content[1::2])
    return len(content) >= 4 and any(sum(byte < 9 for byte in half) > 0.8 * len(half) for half in halves)


def _read_chunks(raw: BinaryIO, on_read: OnRead) -> Iterator[bytes]:
    for chunk in iter(partial(raw.read, BUFFER_BYTES), b""):
        on_read(len(chunk))
        yield chunk


def _decompressed(chunks: Iterator[bytes], suffix: str) -> Iterator[bytes]:
    """Yield the content of all frames, streams or members, in constant memory: the libraries' readers set no limit on the
    window, and that of zstandard accepts a cut file. Its decompressor returns all that a part holds, so parts are small."""
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


def in_mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB"
