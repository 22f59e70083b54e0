"""Lines and rows of any input file, read in constant memory; every error names the file and the line.

NUL characters are removed from all texts, because tokenizers differ: one removes them, another encodes them as ``<unk>``.
"""

import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.arrow_files import arrow_rows, folder_files, open_arrow, plain
from amos_fairseq.inputs.file_kinds import (
    CSV,
    FOLDER,
    JSON,
    JSONL,
    LARGEST_DOCUMENT_BYTES,
    PARQUET,
    TEXT,
    TSV,
    OnRead,
    ignore,
    in_mib,
    look_at,
    opened,
    refuse_json,
    refuse_many_brackets,
)
from amos_fairseq.strangers import parse_json, unique_keys

# A share of lost or strange text above this is a reason to warn, but not a handful of places: a tiny file has any share.
LARGEST_SHARE, HANDFUL = 0.001, 5
# What databases, pandas and Excel write for a missing value.
MISSING_WORDS = {"\\N", "NULL", "null", "NaN", "nan", "-nan", "<NA>", "#N/A", "#NA"}
MISSING_WORDS |= {"#REF!", "#VALUE!", "#DIV/0!", "#NAME?", "#NUM!", "#NULL!"}  # errors of Excel
# Missing as a whole document and in a column of numbers. In other columns they can be names, such as NA for Namibia.
OFTEN_MISSING_WORDS = {"NA", "N/A", "n/a", "None", "none"}
MOST_COLUMNS = 10_000
OBJECTS_WITH_KEYS = 100
# What the rows of a table may take in memory. A few bytes, compressed or repeated in Parquet, can be a billion rows.
_ALWAYS_READ, _LARGEST_EXPANSION, _BYTES_OF_A_ROW = 1 << 28, 200, 100
# Python writes these for floats, and JSON has none of them.
_CONSTANTS = {"NaN": None, "Infinity": math.inf, "-Infinity": -math.inf}
# Characters of which an editor shows nothing: spaces, controls, and what has no width or no ink.
_INVISIBLE = re.compile(
    r"[\s\x00-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]*"
)


def is_blank(text: str) -> bool:
    """Return whether an editor shows nothing of a text, such as of a no-break space, U+3000, U+200B or U+FEFF."""
    return _INVISIBLE.fullmatch(text) is not None


def clean_lines(text: str) -> list[str]:
    """Return the lines of a text without NUL and without spaces around them, "" for those that are blank.

    CR, LF and CR LF end a line. Other line separators of Unicode (VT, FF, U+0085, U+2028, U+2029, ...) count as spaces, because
    tokenizers would remove some and join the words.
    """
    if text.splitlines() == [text] and "\0" not in text:  # the usual case, in half of the time
        return ["" if is_blank(text) else text.strip()]
    lines = text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return ["" if is_blank(line) else " ".join(line.splitlines()).strip() for line in lines]


def files_of(path: Path) -> list[Path]:
    """Return the files of an input in order: the file itself, or those of a folder, which must be whole."""
    return folder_files(path) if path.is_dir() else [path]


def read_content(path: Path, limit: int) -> bytes:
    with opened(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path} holds more than {in_mib(limit)}: divide it into smaller files")
    return content


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines (from 1) of a text of UTF-8, with their line ends, without a byte-order mark."""
    kind, first = look_at(path)
    if kind == JSON:
        refuse_json(path, first)
    if kind in (PARQUET, FOLDER):
        raise UserError(f"{path} has no lines of text: it is a {'folder' if kind == FOLDER else 'Parquet file'}")
    return lines_of(path)


def lines_of(path: Path, on_read: OnRead = ignore) -> Iterator[tuple[int, str]]:
    with opened(path, on_read) as stream:
        yield from decoded_lines(stream, path)


def decoded_lines(stream: BinaryIO, name: str | Path) -> Iterator[tuple[int, str]]:
    number = offset = 0
    while line := stream.readline(LARGEST_DOCUMENT_BYTES + 1):
        number += 1
        if len(line) > LARGEST_DOCUMENT_BYTES:
            raise UserError(
                f"{name}, line {number}: longer than {in_mib(LARGEST_DOCUMENT_BYTES)}: divide it into shorter lines, "
                "with a blank line between documents"
            )
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            place = f"line {number}, byte {offset + error.start}"
            advice = "convert the file, for example with iconv -f CP1252 -t UTF-8 FILE > NEW (Russian: CP1251)"
            raise UserError(f"{name}, {place}: not UTF-8 ({error.reason}): {advice}") from None
        offset += len(line)
        yield number, text.removeprefix("\ufeff") if number == 1 else text


def is_much(number: int, share: float) -> bool:
    """Return whether so many places, with this share of the text, are a reason to warn."""
    return number > HANDFUL and share > LARGEST_SHARE


def refuse_large(document: bytes | bytearray, path: Path, unit: str, start: int) -> None:
    if len(document) > LARGEST_DOCUMENT_BYTES:
        raise UserError(
            f"{path}: the document from {unit} {start} on is larger than {in_mib(LARGEST_DOCUMENT_BYTES)}: put a blank line "
            "between documents"
        )


class TableFile:
    """One table, whose columns have names. ``rows()`` reads it once.

    - ``tsv``: a row is a line. Tabs always separate and quotes are ordinary characters, as in GLUE's files; with
      ``csv_quotes`` it is CSV with tabs, as pandas and ``csv`` write it. Values: ``str``.
    - ``csv``: as Python's ``csv`` reads it, strictly; a quoted field may have line ends. ``,`` or ``;`` separates: the one
      that gives the first line more columns, ``,`` if they are equal; a tab or ``|`` where both give one. Values: ``str``.
    - ``jsonl``: an object on each line. The columns are the keys of the first ``OBJECTS_WITH_KEYS``, or with ``all_keys`` of
      all; a key that is missing is None, and others are ignored. Values: those of JSON; None for NaN.
    - ``parquet``, and ``folder`` of ``Dataset.save_to_disk``: values as in JSON
      (:func:`~amos_fairseq.inputs.arrow_files.plain`).
      The number of a class of a ``ClassLabel``, alone or in a list, is replaced by the name of the class, and -1 by None.

    A text with half of a surrogate pair, which is no character, is None: tokenizers cannot read it.

    Attributes:
        columns: the first line of TSV and CSV; 1, 2, ... without a ``header``.
        broken_lines: line numbers (from 1) where rows of TSV and CSV begin that have another number of columns. They are
            left out.
        num_blank_lines: of TSV and CSV with several columns; they are left out too.
    """

    def __init__(
        self,
        path: Path,
        header: bool = True,
        csv_quotes: bool = False,
        on_read: OnRead = ignore,
        all_keys: bool = False,
    ) -> None:
        self.kind, self.first_lines = look_at(path)
        self.path, self.header, self._on_read = path, header, on_read
        self.broken_lines: list[int] = []
        self.num_blank_lines = 0
        self._most_bytes = max(_ALWAYS_READ, _LARGEST_EXPANSION * sum(file.stat().st_size for file in files_of(path)))
        if self.kind == TEXT:
            raise UserError(
                f"{path} is no table: give JSON lines, Parquet, a folder of save_to_disk of datasets, or text whose name "
                "ends in .tsv or .csv (compressed, in .tsv.gz and so on); a text on each line: rename it to NAME.tsv, and "
                "add --no-header --text 1"
            )
        if self.kind == JSON:
            refuse_json(path, self.first_lines)
        if not header and self.kind not in (TSV, CSV):
            raise UserError(f"{path}: its columns have names already: remove --no-header")
        if self.kind in (TSV, CSV):
            self._quotes = csv_quotes or self.kind == CSV
            if header and not self._quotes and "\r" in next(lines_of(path), (1, ""))[1].rstrip("\r\n"):
                raise _ends_with_cr(path)
            self._separator = "\t" if self.kind == TSV else self._separator_of_csv()
            first = self._first_fields(self._separator)
            self.columns = tuple(first) if header else tuple(str(number + 1) for number in range(len(first)))
        elif self.kind == JSONL:
            objects = islice(self._objects(ignore, dict), None if all_keys else OBJECTS_WITH_KEYS)
            names: dict[str, None] = {}
            for _, row in objects:
                names |= dict.fromkeys(row)
                if len(names) > MOST_COLUMNS:
                    break
            self.columns = tuple(names)
        else:
            with open_arrow(path) as (schema, num_rows, size, _):
                self.columns = tuple(schema.names)
                self._check_size(max(size, _BYTES_OF_A_ROW * num_rows))
        if not any(self.columns):
            raise UserError(f"{path} is empty, or its first line has no names of columns: fill it")
        if len(self.columns) > MOST_COLUMNS:
            raise UserError(f"{path} has {len(self.columns):,} columns: remove some, at most {MOST_COLUMNS:,} are read")
        if len(set(self.columns)) < len(self.columns):
            twice = next(name for name in self.columns if self.columns.count(name) > 1)
            advice = "rename one of them" if twice else "remove what is above the names of the columns"
            raise UserError(f"{path}: two columns have the name {twice[:60]!r}: {advice}")

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the values of each row by column, with the number of its first line, or of the row where there are no lines;
        both start at 1. ``columns``: the only ones that are needed, which saves reading the others of Parquet; a key that an
        object of JSON has twice matters in these."""
        if self.kind in (TSV, CSV):
            rows = self._separated_rows()
        elif self.kind == JSONL:
            objects = self._objects(self._on_read, unique_keys if columns is None else partial(_object_of, columns))
            rows = ((number, {name: row.get(name) for name in self.columns}) for number, row in objects)
        else:
            rows = arrow_rows(self.path, columns, self._on_read)
        size = num_rows = 0
        for number, row in rows:
            num_rows += 1
            size += _BYTES_OF_A_ROW + sum(len(value) for value in row.values() if isinstance(value, str))
            self._check_size(size)
            yield number, row
        num_lines = num_rows + len(self.broken_lines)
        if 2 * num_rows < num_lines:
            found = (
                f"only {num_rows:,} of its {num_lines:,} lines have"
                if num_rows
                else f"none of its {num_lines:,} lines has"
            )
            raise UserError(
                f"{self.path}: {found} the {len(self.columns)} "
                f"{'tab-separated ' if self.kind == TSV else ''}columns of the first line "
                f"({', '.join(self.columns)[:200]}), the last one has {self._last_width}: name all columns there (an index in "
                "front, or a separator at the end of lines, makes one more), or give --csv-quotes for quotes in a .tsv"
            )
        if not num_rows:
            raise UserError(f"{self.path} is empty, but for the names of its columns: fill it")

    def _check_size(self, size: int) -> None:
        if size > self._most_bytes:
            raise UserError(
                f"{self.path}: its rows take more than {_LARGEST_EXPANSION} times the size of the file, so that a small file "
                "could fill memory and disk: if they are right, write them as JSON lines, without compression"
            )

    def _objects(
        self, on_read: OnRead, as_object: Callable[[list[tuple[str, Any]]], dict[str, Any]]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in lines_of(self.path, on_read):
            refuse_many_brackets(line, self.path, number)
            if is_blank(line):
                continue
            try:
                row = parse_json(line.lstrip("\ufeff\x1e"), parse_constant=_CONSTANTS.get, object_pairs_hook=as_object)
                row = plain(row) if "\\u" in line else row
            except ValueError as error:
                raise UserError(
                    f'{self.path}, line {number} {error}: each line has to be an object, such as {{"text": "..."}}'
                ) from None
            yield number, row

    def _separated_rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        records = self._records(self._separator, self._on_read)
        for number, fields in islice(records, int(self.header), None):
            if len(fields) == len(self.columns):
                yield number, dict(zip(self.columns, fields, strict=True))
            elif len(fields) == 1 and is_blank(fields[0]):
                self.num_blank_lines += 1
            else:
                self.broken_lines.append(number)
                self._last_width = len(fields)

    def _records(self, separator: str, on_read: OnRead = ignore) -> Iterator[tuple[int, list[str]]]:
        """Yield the fields of each row, with the number of its first line. An empty line has one empty field."""
        lines = ((number, line.replace("\0", "")) for number, line in lines_of(self.path, on_read))
        if self._quotes:
            yield from _csv_records(self.path, (line for _, line in lines), separator)
            return
        for number, line in lines:
            yield number, line.rstrip("\r\n").split("\t", MOST_COLUMNS)  # a broken line may have very many more

    def _separator_of_csv(self) -> str:
        def width(separator: str) -> int:
            try:
                return len(self._first_fields(separator))
            except UserError:  # raised again when the table is read
                return 0

        likely, others = max(",;", key=width), max("\t|", key=width)
        return others if width(likely) == 1 < width(others) else likely

    def _first_fields(self, separator: str) -> list[str]:
        return next(self._records(separator), (1, []))[1]


def _ends_with_cr(path: Path) -> UserError:
    return UserError(f"{path}: its lines end with CR: convert it, for example with tr '\\r' '\\n' < FILE > NEW")


def _object_of(columns: Sequence[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique_keys([pair for pair in pairs if pair[0] in columns])
    return dict(pairs)


def _csv_records(path: Path, lines: Iterator[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        start = reader.line_num + 1
        usual_limit = csv.field_size_limit(LARGEST_DOCUMENT_BYTES)  # of the process: 131,072 is a short text
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if "new-line" in str(error):
                raise _ends_with_cr(path) from None
            raise UserError(
                f"{path}, line {start}: the row that begins there is not CSV ({error}): put a field with a separator, a quote "
                "or a line end into quotes, close them, and write quotes inside of it twice"
            ) from None
        finally:
            csv.field_size_limit(usual_limit)
        if fields is None:
            return
        yield start, fields or [""]
