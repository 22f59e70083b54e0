"""Rows of any table, read in constant memory; every error names the file and the line."""

import csv
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import FORMS
from amos_fairseq.inputs.arrow_files import arrow_rows, open_arrow, plain
from amos_fairseq.inputs.files import (
    CSV,
    JSONL,
    LARGEST_DOCUMENT_BYTES,
    TEXT,
    TSV,
    OnRead,
    files_of,
    ignore,
    is_blank,
    kind_of,
    read_lines,
)
from amos_fairseq.untrusted import parse_json

OBJECTS_WITH_KEYS = 100
# What the rows of a table may take in memory. A few bytes, compressed or repeated in Parquet, can be a billion rows.
_ALWAYS_READ, _LARGEST_EXPANSION, _BYTES_OF_A_ROW = 1 << 28, 200, 100
csv.field_size_limit(LARGEST_DOCUMENT_BYTES)  # of the process: 131,072 is a short text


class TableFile:
    """One table, whose columns have names. ``rows()`` reads it once. NUL is removed from all texts.

    - TSV and CSV: the first line has the names of the columns. A tab or a comma separates. A field that contains the separator,
      a quote or a line end is in quotes, with quotes inside it doubled, as Python's ``csv``, pandas and this package write it.
      Without ``quotes`` a row of TSV is a line, in which quotes are ordinary characters: GLUE's files. Values: ``str``.
    - JSON lines: an object on each line. The columns are the keys of the first ``OBJECTS_WITH_KEYS``, or with ``all_keys`` of
      all; a key that is missing is None, as NaN is, and others are ignored. Values: those of JSON.
    - Parquet, and folders of ``Dataset.save_to_disk``: values as in JSON (:func:`~amos_fairseq.inputs.arrow_files.plain`). The
      number of a class of a ``ClassLabel``, alone or in a list, is replaced by the name of the class, and -1 by None.

    Attributes:
        columns: the names of the columns; 1, 2, ... of TSV and CSV without a ``header``.
        broken_lines: line numbers (from 1) where rows of TSV and CSV begin that have another number of columns. They are
            left out, and so are blank lines, but for those of a table of one column.
        num_long_rows: rows of TSV and CSV that take several lines, because a line end is between quotes.
    """

    def __init__(
        self,
        path: Path,
        header: bool = True,
        quotes: bool = True,
        on_read: OnRead = ignore,
        all_keys: bool = False,
    ) -> None:
        self.path, self.kind, self.header = path, kind_of(path), header
        self._quotes, self._on_read = quotes, on_read
        self.broken_lines: list[int] = []
        self.num_long_rows = 0
        if self.kind == TEXT:
            raise UserError(f"{path} is no table by its name; {FORMS}")
        if self.kind in (TSV, CSV):
            _, first = next(self._records(ignore), (1, []))
            self.columns = tuple(first) if header else tuple(str(number + 1) for number in range(len(first)))
        elif self.kind == JSONL:
            rows = islice(self._objects(ignore), None if all_keys else OBJECTS_WITH_KEYS)
            self.columns = tuple(dict.fromkeys(name for _, row in rows for name in row))
        else:
            with open_arrow(path) as (schema, *_):
                self.columns = tuple(schema.names)
        if not any(self.columns) or len(set(self.columns)) < len(self.columns):
            named = f"{', '.join(self.columns):.200}"
            raise UserError(f"{path}: its columns ({named}) need different names, in the first line of TSV and CSV")

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the values of each row by column, with the number of its first line, or of the row where there are no lines;
        both start at 1. ``columns``: the only ones that are needed, which saves reading the others of Parquet."""
        if self.kind in (TSV, CSV):
            rows = self._separated_rows()
        elif self.kind == JSONL:
            rows = (
                (line, {name: row.get(name) for name in self.columns}) for line, row in self._objects(self._on_read)
            )
        else:
            rows = arrow_rows(self.path, columns, self._on_read)
        most_bytes = max(_ALWAYS_READ, _LARGEST_EXPANSION * sum(file.stat().st_size for file in files_of(self.path)))
        size = 0
        for number, row in rows:
            size += _BYTES_OF_A_ROW + sum(len(value) for value in row.values() if isinstance(value, str))
            if size > most_bytes:
                raise UserError(
                    f"{self.path}: its rows take more than {_LARGEST_EXPANSION} times the size of the file, so that a small "
                    "file could fill memory and disk: if they are right, write them as JSON lines, without compression"
                )
            yield number, row
        if not size:
            broken = f", and {len(self.broken_lines):,} with another number of columns" if self.broken_lines else ""
            raise UserError(f"{self.path} has no row of the columns {', '.join(self.columns):.200}{broken}")

    @property
    def left_out(self) -> dict[str, int]:
        """Why rows were left out -> how many, after they were read."""
        return {"with another number of columns than the first line": len(self.broken_lines)}

    def counted(self, what: str) -> str:
        """Return ``what`` is counted, and how many rows are more than a line, which quotes that belong to a text can join."""
        return f"{what} ({self.num_long_rows:,} rows of several lines, between quotes)" if self.num_long_rows else what

    def _objects(self, on_read: OnRead) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in read_lines(self.path, on_read):
            if is_blank(line):
                continue
            try:
                row = parse_json(line, parse_constant=lambda constant: None)
                row = plain(row) if "\\u" in line else row
            except ValueError as error:
                raise UserError(f"{self.path}, line {number} {error}: each line has to be an object; {FORMS}") from None
            yield number, row

    def _separated_rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        for number, fields in islice(self._records(self._on_read), int(self.header), None):
            if len(fields) == len(self.columns):
                self.num_long_rows += any("\n" in field for field in fields)
                yield number, dict(zip(self.columns, fields, strict=True))
            elif len(fields) > 1 or not is_blank(fields[0]):
                self.broken_lines.append(number)

    def _records(self, on_read: OnRead) -> Iterator[tuple[int, list[str]]]:
        """Yield the fields of each row, with the number of its first line. An empty line has one empty field."""
        lines = ((number, line.replace("\0", "")) for number, line in read_lines(self.path, on_read))
        if self.kind == TSV and not self._quotes:
            yield from ((number, line.rstrip("\r\n").split("\t")) for number, line in lines)
            return
        reader = csv.reader((line for _, line in lines), delimiter="\t" if self.kind == TSV else ",", strict=True)
        while True:
            start = reader.line_num + 1
            try:
                fields = next(reader, None)
            except csv.Error as error:
                raise UserError(
                    f"{self.path}, line {start}: the row that begins there is not quoted as CSV ({error}); {FORMS}"
                ) from None
            if fields is None:
                return
            yield start, fields or [""]


def require_columns(table: TableFile, *names: str) -> None:
    """Refuse a table that lacks one of these columns."""
    for name in names:
        if name not in table.columns:
            raise UserError(
                f"{table.path} has no column {name!r:.60}, it has {', '.join(table.columns):.300}: give one of them"
            )
