"""Read tables: TSV, CSV, JSON lines, Parquet, and folders that ``save_to_disk`` of Hugging Face's ``datasets`` wrote."""

import csv
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import parse_json
from amos_fairseq.text import arrow_tables
from amos_fairseq.text.text_files import (
    COMPRESSIONS,
    JSON_LINES,
    LARGEST_DOCUMENT_BYTES,
    InputFile,
    kind_and_compression,
    refuse_many_brackets,
)

TSV, CSV, JSONL, PARQUET, FOLDER = "tsv", "csv", "jsonl", "parquet", "folder"
_KINDS = {".tsv": TSV, ".csv": CSV, **dict.fromkeys(JSON_LINES, JSONL), ".parquet": PARQUET}
EXPECTED = (
    f".tsv, .csv and .jsonl (also with {', '.join(COMPRESSIONS)}), .parquet, and folders of save_to_disk of datasets"
)
MOST_COLUMNS = 10_000
OBJECTS_WITH_KEYS = 100
# A row of a CSV file is a list of its fields before they are counted. A text has fewer commas than this.
_MOST_SEPARATORS = 10_000_000

Row = tuple[int, list[str]]


class TableFile:
    """One table, whose columns have names. ``rows()`` reads it once; ``sha256`` is then that of what is on disk.

    - ``tsv`` (``.tsv``): a row is a line, and the first line has the names. Tabs always separate and quotes are ordinary
      characters, as in GLUE's files, unless the whole file is what a writer of CSV makes with tabs (below). Values: ``str``.
    - ``csv`` (``.csv``): as Python's ``csv`` reads it, strictly; a quoted field may have line ends. ``,`` or ``;`` separates:
      the one that gives the first line more columns, ``,`` if they are equal. Values: ``str``.
    - ``jsonl`` (``.jsonl``, ``.ndjson``): an object on each line. The columns are the keys of
      the first ``OBJECTS_WITH_KEYS``; a key that is missing is None, and others are ignored.
      Values: those of JSON.
    - ``parquet`` (``.parquet``) and ``folder`` (of ``Dataset.save_to_disk``): Python values. The number of a class of a
      ``ClassLabel``, alone or in a list, is replaced by the name of the class, and -1 by None.

    TSV, CSV and JSON lines may be compressed (``.gz``, ``.xz``, ``.zst``) and are UTF-8. NUL characters are removed
    from texts, as in :class:`~amos_fairseq.text.text_files.InputFile`.

    A TSV file has the quotes of CSV (pandas writes such files) if it has quotes, every field with a quote is quoted and
    quotes inside of it are doubled, every row has the same number of columns, and one of these is true:

    - a quoted field has a tab or a line end, so that splitting the lines at tabs gives some another number of columns
      (a table of one column: a quoted field has a line end);
    - no quoted field has a tab or a line end, and one has a doubled quote, or the first name in the first line is quoted.

    To find this, a TSV file is read to the first quote that is not of this form before its first row is returned.

    Args:
        columns: names of the columns of a TSV or CSV file whose first line is a row already.
        on_read: called with the number of bytes read from disk, of all parts together the size of the table.
        ordinary_quotes: quotes of a TSV file are ordinary, whatever it contains.

    Attributes:
        kind: ``tsv``, ``csv``, ``jsonl``, ``parquet`` or ``folder``.
        broken_lines: line numbers (from 1) where rows begin that have another number of columns than the names, in TSV and
            CSV. They are not returned.

    Raises:
        UserError: there is no such table, it is empty or damaged, or two columns have the same name.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str] = (),
        on_read: Callable[[int], object] = lambda size: None,
        *,
        ordinary_quotes: bool = False,
    ) -> None:
        self.path, self.kind = path, kind_of(path)
        self.broken_lines: list[int] = []
        if columns and self.kind not in (TSV, CSV):
            raise UserError(f"{path}: its columns have names already: remove --no-header")
        self._reader: _SeparatedLines | _JsonLines | arrow_tables.ArrowTable
        if self.kind in (TSV, CSV):
            self._reader = _SeparatedLines(path, columns, on_read, ordinary_quotes, self.broken_lines)
        elif self.kind == JSONL:
            self._reader = _JsonLines(path, on_read)
        else:
            self._reader = arrow_tables.ArrowTable(path, self.kind == FOLDER, on_read)
        names = self.columns
        if len(names) > MOST_COLUMNS:
            raise UserError(f"{path} has {len(names):,} columns: remove some, at most {MOST_COLUMNS:,} are read")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"{path}: two columns have the name {twice[:60]!r}: rename one of them")

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return self._reader.columns

    @property
    def sha256(self) -> str:
        """The sha256 of the file, or of all files of a folder one after the other, once all rows were read."""
        return self._reader.sha256

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the values of each row by column, with the number of its first line, or of the row where there are no lines.

        Both numbers start at 1.

        Raises:
            UserError: the table is damaged, has no row, or a row is too large or of another form; the message has its number.
        """
        empty = True
        for number, row in self._reader.rows():
            empty = False
            yield number, row
        if not empty:
            return
        if self.broken_lines:
            raise UserError(
                f"{self.path}: none of its {len(self.broken_lines)} lines has the {len(self.columns)} "
                f"{'tab-separated ' if self.kind == TSV else ''}columns that were expected "
                f"({', '.join(self.columns)[:200]}): is it the right file?"
            )
        raise UserError(f"{self.path} is empty, but for the names of its columns: fill it")


def is_table(path: Path) -> bool:
    """Return whether a path is that of a table with columns, by its name. JSON lines are read as text, too, and count as none.

    A folder is one if ``datasets`` wrote it, also of several splits, which :class:`TableFile` refuses.
    """
    if path.is_dir():
        return arrow_tables.is_written_by_datasets(path)
    return _KINDS.get(kind_and_compression(path)[0], JSONL) != JSONL


def kind_of(path: Path) -> str:
    """Return the kind of a table, by its suffix.

    Raises:
        UserError: there is no such file, or it is none of the kinds.
    """
    if path.is_dir():
        return FOLDER
    if not path.exists():
        raise UserError(f"{path}: no such file")
    suffix, compression = kind_and_compression(path)
    kind = _KINDS.get(suffix)
    if kind is None:
        raise UserError(f"{path}: {suffix or 'a file without suffix'} is no table that can be read: {EXPECTED} are")
    if kind == PARQUET and compression:
        raise UserError(f"{path}: Parquet is compressed inside: unpack {compression} first")
    if not path.is_file():
        raise UserError(f"{path} is not a file")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty: fill it")
    return kind


def number_columns(path: Path) -> int:
    """Return the number of columns of the first row of a TSV or CSV file, for names of a file without a header.

    Raises:
        UserError: it is another file, is empty or damaged.
    """
    if kind_of(path) not in (TSV, CSV):
        raise UserError(f"{path}: its columns have names already: remove --no-header")
    return len(_SeparatedLines(path, (), lambda size: None, False, []).columns)


class _SeparatedLines:
    """Rows of a TSV or CSV file."""

    def __init__(
        self,
        path: Path,
        columns: Sequence[str],
        on_read: Callable[[int], object],
        ordinary_quotes: bool,
        broken_lines: list[int],
    ) -> None:
        self._path, self._broken = path, broken_lines
        self._file = InputFile(path, on_read)
        self._has_header = not columns
        if _KINDS[kind_and_compression(path)[0]] == TSV:
            self._separator = "\t"
            self._is_quoted = not ordinary_quotes and has_csv_quotes(path, len(columns))
        else:
            self._separator, self._is_quoted = _separator(path, len(columns)), True
        self.columns = tuple(columns)
        if not columns:
            self.columns = tuple(next(self._records(InputFile(path), MOST_COLUMNS), (1, []))[1])
        if not self.columns:
            raise UserError(f"{path} is empty: fill it")

    @property
    def sha256(self) -> str:
        return self._file.sha256

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        width = len(self.columns)
        for number, fields in islice(self._records(self._file, width), int(self._has_header), None):
            if len(fields) == width:
                yield number, dict(zip(self.columns, fields, strict=True))
            else:
                self._broken.append(number)

    def _records(self, file: InputFile, width: int) -> Iterator[Row]:
        lines = file.lines()
        return _quoted_rows(self._path, lines, self._separator) if self._is_quoted else _plain_rows(lines, width)


def _plain_rows(lines: Iterator[tuple[int, bytes]], width: int) -> Iterator[Row]:
    """Split lines at tabs, those with more than ``width`` columns not to the end: such a list could be very long."""
    for number, line in lines:
        yield number, line.decode("utf-8").replace("\0", "").rstrip("\r\n").split("\t", width)


def _quoted_rows(
    path: Path, lines: Iterator[tuple[int, bytes]], separator: str, source: list[str] | None = None
) -> Iterator[Row]:
    """Yield rows as Python's ``csv`` reads them, strictly. An empty line has one empty field, as in a TSV file.

    Args:
        source: gets the lines of the row that is yielded.
    """
    if csv.field_size_limit() < LARGEST_DOCUMENT_BYTES:
        csv.field_size_limit(LARGEST_DOCUMENT_BYTES)  # of the process; its value of 2^17 is a short text
    start = size = separators = 0

    def decoded() -> Iterator[str]:
        nonlocal size, separators
        for _, line in lines:
            size += len(line)
            separators += line.count(separator.encode("ascii"))
            if size > LARGEST_DOCUMENT_BYTES or separators > _MOST_SEPARATORS:
                raise UserError(
                    f"{path}, line {start}: the row that begins there is larger than {LARGEST_DOCUMENT_BYTES >> 20} MiB or "
                    f"has more than {_MOST_SEPARATORS:,} separators: is a quote not closed?"
                )
            text = line.decode("utf-8").replace("\0", "")  # Python 3.10 refuses NUL
            if source is not None:
                source.append(text)
            yield text

    reader = csv.reader(decoded(), delimiter=separator, strict=True)
    while True:
        start, size, separators = reader.line_num + 1, 0, 0
        if source is not None:
            source.clear()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise UserError(
                    f"{path}, line {start}: the file ends inside of a quoted field of the row that begins there: close it"
                ) from None
            raise UserError(
                f"{path}, line {start}: the row that begins there is not CSV ({error}): put a field with a separator, a quote "
                "or a line end into quotes, and write quotes inside of it twice"
            ) from None
        yield start, fields or [""]


def has_csv_quotes(path: Path, width: int = 0) -> bool:
    """Return whether the quotes of a TSV file are those of CSV, by the rule of :class:`TableFile`.

    Args:
        width: number of columns of a file without a header; 0: that of the first line, which is a header.
    """
    has_header = not width
    is_plain = True  # splitting at tabs gives every line the same number of columns
    has_quotes = has_separators = has_doubled = names_are_quoted = False
    plain_width, lines = width, InputFile(path).lines()
    for number, line in lines:
        source = [line.decode("utf-8")]
        fields: list[str] = []
        if b'"' in line:
            source.clear()
            try:
                fields = next(_quoted_rows(path, chain([(number, line)], lines), "\t", source))[1]
            except UserError:  # if it is not about quotes, reading the lines raises it again
                return False
        columns = len(fields) or line.count(b"\t") + 1
        width = width or columns
        plain_width = plain_width or source[0].count("\t") + 1
        is_plain = is_plain and all(text.count("\t") + 1 == plain_width for text in source)
        if columns != width:
            return False
        if not fields:
            if b"\r" in line.removesuffix(b"\n").removesuffix(b"\r"):  # ends a line of CSV
                return False
            continue
        text = "".join(source)
        if not _has_only_quoted_quotes(text, fields):
            return False
        has_quotes = True
        has_separators = has_separators or len(source) > 1 or text.count("\t") >= len(fields)
        has_doubled = has_doubled or any('"' in field for field in fields)
        names_are_quoted = names_are_quoted or (number == 1 and has_header and text.startswith('"'))
    if has_separators:
        return not is_plain or width == 1
    return has_quotes and (has_doubled or names_are_quoted)


def _has_only_quoted_quotes(text: str, fields: list[str]) -> bool:
    """Return whether every field of a row that has a quote is quoted. ``csv`` reads ``5" long``, too, but does not write it."""
    position = 0
    for field in fields:
        quoted = '"' + field.replace('"', '""') + '"'
        is_quoted = text.startswith(quoted, position)
        if '"' in field and not is_quoted:
            return False
        position += len(quoted if is_quoted else field) + 1
    return True


def _separator(path: Path, width: int) -> str:
    """Return ``,`` or ``;``: the one that gives the first row of a CSV file ``width`` columns, or more than the other one."""

    def columns(separator: str) -> int:
        try:
            return len(next(_quoted_rows(path, InputFile(path).lines(), separator), (1, []))[1])
        except UserError:
            return 0

    numbers = {separator: columns(separator) for separator in (",", ";")}
    for separator, number in numbers.items():
        if number == width > 0:
            return separator
    if max(numbers.values()) == 1:
        first = next(InputFile(path).lines())[1]
        if b"\t" in first:
            raise UserError(f"{path}: its first line has tabs and neither , nor ; between columns: rename it to .tsv")
    return max(numbers, key=numbers.get)


class _JsonLines:
    """Objects of a file of JSON lines."""

    def __init__(self, path: Path, on_read: Callable[[int], object]) -> None:
        self._path, self._file = path, InputFile(path, on_read)
        first = islice(self._objects(InputFile(path)), OBJECTS_WITH_KEYS)
        self.columns = tuple(dict.fromkeys(key for _, row in first for key in row))
        if not self.columns:
            raise UserError(f'{path} has no values: it needs an object on each line, such as {{"text": "..."}}')

    @property
    def sha256(self) -> str:
        return self._file.sha256

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, row in self._objects(self._file):
            yield number, {name: row.get(name) for name in self.columns}

    def _objects(self, file: InputFile) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in file.lines():
            if not line.strip():
                continue
            refuse_many_brackets(line, self._path, number)
            try:
                row = parse_json(line)
                yield number, _without_nul(row) if b"\\u" in line else row
            except ValueError as error:
                raise UserError(
                    f'{self._path}, line {number} {error}: each line has to be an object, such as {{"text": "..."}}'
                ) from None


def _without_nul(value: Any) -> Any:
    """Remove NUL from all texts in a value of JSON; raise ``ValueError`` if one has half of a surrogate pair."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("has half of a surrogate pair, which is no character") from None
        return value.replace("\0", "")
    if isinstance(value, list):
        return [_without_nul(part) for part in value]
    return {_without_nul(key): _without_nul(part) for key, part in value.items()} if isinstance(value, dict) else value
