"""Read tables: TSV, CSV, JSON lines, Parquet, and folders that ``save_to_disk`` of Hugging Face's ``datasets`` wrote."""

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.fingerprint import joined_sha256
from amos_fairseq.strangers import field, parse_json, read_json
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
# Rows of Arrow that are Python values at the same time: a small file may repeat a large text in every row.
_ROWS_AT_ONCE = 100
_OLDEST_PYARROW = (14, 0, 1)  # older ones unpickle what the schema of a file contains (CVE-2023-47248)
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"  # files of save_to_disk


class TableFile:
    """One table, whose columns have names. ``rows()`` reads it once; ``sha256`` is then that of what is on disk.

    - ``tsv`` (``.tsv``): a row is a line, and the first line has the names. Tabs always separate and quotes are ordinary
      characters, as in GLUE's files; with ``csv_quotes`` it is CSV with tabs, as pandas and ``csv`` write it. Values: ``str``.
    - ``csv`` (``.csv``): as Python's ``csv`` reads it, strictly; a quoted field may have line ends. ``,`` or ``;`` separates:
      the one that gives the first line more columns, ``,`` if they are equal. Values: ``str``.
    - ``jsonl`` (``.jsonl``, ``.ndjson``): an object on each line. The columns are the keys of the first
      ``OBJECTS_WITH_KEYS``; a key that is missing is None, and others are ignored. Values: those of JSON.
    - ``parquet`` (``.parquet``) and ``folder`` (of ``Dataset.save_to_disk``): Python values. The number of a class of a
      ``ClassLabel``, alone or in a list, is replaced by the name of the class, and -1 by None.

    TSV, CSV and JSON lines may be compressed (``.gz``, ``.xz``, ``.zst``) and are UTF-8. NUL characters are removed
    from texts, as in :class:`~amos_fairseq.text.text_files.InputFile`.

    Args:
        header: whether the first line of a TSV or CSV file names the columns; otherwise they are called 1, 2, ...
        csv_quotes: quotes in a TSV file are those of CSV.
        on_read: called with the number of bytes read from disk, of all parts together the size of the table.

    Attributes:
        columns: the names of the columns, in order.
        kind: ``tsv``, ``csv``, ``jsonl``, ``parquet`` or ``folder``.
        broken_lines: line numbers (from 1) where rows begin that have another number of columns than the names, in TSV and
            CSV. They are not returned.

    Raises:
        UserError: there is no such table, it is empty or damaged, or two columns have the same name; :meth:`rows`, too.
    """

    def __init__(
        self,
        path: Path,
        header: bool = True,
        csv_quotes: bool = False,
        on_read: Callable[[int], object] = lambda size: None,
    ) -> None:
        self.path, self.kind, self.header = path, _kind_of(path), header
        self.broken_lines: list[int] = []
        self._file, self._on_read = InputFile(path, on_read), on_read
        if not header and self.kind not in (TSV, CSV):
            raise UserError(f"{path}: its columns have names already: remove --no-header")
        if self.kind in (TSV, CSV):
            self._separator = "\t" if self.kind == TSV else _separator(path)
            self._is_csv = csv_quotes or self.kind == CSV
            _, first = next(self._records(InputFile(path), MOST_COLUMNS), (1, []))
            if not first:
                raise UserError(f"{path} is empty: fill it")
            self.columns = tuple(first) if header else tuple(str(number + 1) for number in range(len(first)))
        elif self.kind == JSONL:
            first = islice(_json_objects(InputFile(path)), OBJECTS_WITH_KEYS)
            self.columns = tuple(dict.fromkeys(key for _, row in first for key in row))
            if not self.columns:
                raise UserError(f'{path} has no values: it needs an object on each line, such as {{"text": "..."}}')
        else:
            with open_arrow(path) as (schema, _, _):
                self.columns = tuple(schema.names)
        if len(self.columns) > MOST_COLUMNS:
            raise UserError(f"{path} has {len(self.columns):,} columns: remove some, at most {MOST_COLUMNS:,} are read")
        if len(set(self.columns)) < len(self.columns):
            twice = next(name for name in self.columns if self.columns.count(name) > 1)
            raise UserError(f"{path}: two columns have the name {twice[:60]!r}: rename one of them")

    @property
    def sha256(self) -> str:
        """The sha256 of the file, or of all files of a folder one after the other, once all rows were read."""
        return joined_sha256(files_of(self.path)) if self.kind in (PARQUET, FOLDER) else self._file.sha256

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the values of each row by column, with the number of its first line, or of the row where there are no lines;
        both start at 1."""
        is_empty = True
        if self.kind in (TSV, CSV):
            rows = self._separated_rows()
        elif self.kind == JSONL:
            objects = _json_objects(self._file)
            rows = ((number, {name: row.get(name) for name in self.columns}) for number, row in objects)
        else:
            rows = _arrow_rows(self.path, self._on_read)
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
        width = len(self.columns)
        for number, fields in islice(self._records(self._file, width), 1 if self.header else 0, None):
            if len(fields) == width:
                yield number, dict(zip(self.columns, fields, strict=True))
            else:
                self.broken_lines.append(number)

    def _records(self, file: InputFile, width: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the fields of each row, with the number of its first line. An empty line has one empty field."""
        lines = ((number, line.decode("utf-8").replace("\0", "")) for number, line in file.lines())
        if self._is_csv:
            yield from _csv_records(self.path, (line for _, line in lines), self._separator)
            return
        for number, line in lines:
            yield number, line.rstrip("\r\n").split("\t", width)  # a broken line may have very many more


def is_table(path: Path) -> bool:
    """Return whether a path is that of a table with columns, by its name. JSON lines are read as text, too, and count as none.

    A folder is one if ``datasets`` wrote it, also of several splits, which :class:`TableFile` refuses.
    """
    if path.is_dir():
        return (path / _STATE).is_file() or (path / _SPLITS).is_file()
    return _KINDS.get(kind_and_compression(path)[0], JSONL) != JSONL


def files_of(path: Path) -> list[Path]:
    """Return the files of a table in order: the file itself, or those of a folder of ``save_to_disk``, which must be whole."""
    if not path.is_dir():
        return [path]
    if (path / _SPLITS).is_file():
        raise UserError(f"{path} has several splits: give the folder of one of them, such as {path / 'train'}")
    if not (path / _STATE).is_file():
        raise UserError(f"{path} is a folder, but not of save_to_disk of datasets ({_STATE} is missing): give a file")
    state, files = read_json(path / _STATE, "save the data set again"), sorted(path.glob("*.arrow"))
    try:
        named = [field(each, "filename", str) for each in field(state, "_data_files", list)]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / _STATE} is damaged ({error}): save the data set again") from error
    if not named or not set(named) <= {file.name for file in files} or not (path / _INFO).is_file():
        raise UserError(f"{path}: {_INFO} or files that {_STATE} names are missing: copy the whole folder")
    return [path / _STATE, path / _INFO, *files]


def _kind_of(path: Path) -> str:
    """Return the kind of a table, by its suffix."""
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


def _separator(path: Path) -> str:
    """Return ``,`` or ``;``: the one that gives the first row of a CSV file more columns."""

    def number_of_columns(separator: str) -> int:
        lines = (line.decode("utf-8") for _, line in InputFile(path).lines())
        try:
            return len(next(_csv_records(path, lines, separator), (1, []))[1])
        except UserError:  # reading the table will raise it again
            return 0

    numbers = {separator: number_of_columns(separator) for separator in (",", ";")}
    if max(numbers.values()) == 1 and b"\t" in next(InputFile(path).lines())[1]:
        raise UserError(f"{path}: its first line has tabs and neither , nor ; between columns: rename it to .tsv")
    return max(numbers, key=numbers.get)


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


def _json_objects(file: InputFile) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in file.lines():
        if not line.strip():
            continue
        refuse_many_brackets(line, file.path, number)
        try:
            row = parse_json(line)
            row = _without_nul(row) if b"\\u" in line else row
        except ValueError as error:
            raise UserError(
                f'{file.path}, line {number} {error}: each line has to be an object, such as {{"text": "..."}}'
            ) from None
        yield number, row


def _without_nul(value: Any) -> Any:
    """Remove NUL from all texts in a value; raise ``ValueError`` if one has half of a surrogate pair."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("has half of a surrogate pair, which is no character") from None
        return value.replace("\0", "")
    if isinstance(value, list):
        return [_without_nul(each) for each in value]
    return {_without_nul(key): _without_nul(each) for key, each in value.items()} if isinstance(value, dict) else value


@contextmanager
def open_arrow(path: Path) -> Iterator[tuple[Any, int, Iterator[Any]]]:
    """Yield the schema, the number of rows, and batches of rows of a Parquet file or a folder of ``save_to_disk``.

    What cannot be read raises :class:`UserError`, also during the body.
    """
    files_of(path)  # refuses a folder that lacks some
    try:
        import pyarrow
        import pyarrow.parquet

        if path.is_dir():
            import datasets
    except ImportError as error:
        raise UserError(
            f"{path} is read with pyarrow and datasets, which do not import ({error}): pip install 'amos_fairseq[data]'"
        ) from error
    if tuple(int(number) for number in pyarrow.__version__.split(".")[:3] if number.isdigit()) < _OLDEST_PYARROW:
        raise UserError(
            f"{path}: pyarrow {pyarrow.__version__} may run code of the file: pip install 'amos_fairseq[data]'"
        )
    try:
        if path.is_dir():
            # In this format nothing is decoded: not the pictures or sounds of a stranger, nor the files that a row names.
            table = datasets.load_from_disk(str(path)).with_format("arrow")
            yield table.features.arrow_schema, len(table), table.iter(_ROWS_AT_ONCE)
        else:
            # Without pre_buffer, which reads a whole row group; with a buffer_size the chunk of a column is read in parts.
            with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
                yield file.schema_arrow, file.metadata.num_rows, file.iter_batches(_ROWS_AT_ONCE, use_threads=False)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = "folder of datasets" if path.is_dir() else "Parquet file"
        raise UserError(f"{path} is damaged or no {what} ({error!s:.200}): download or write it again") from error


def _arrow_rows(path: Path, on_read: Callable[[int], object]) -> Iterator[tuple[int, dict[str, Any]]]:
    size, reported, number = sum(file.stat().st_size for file in files_of(path)), 0, 0
    with open_arrow(path) as (schema, num_rows, batches):
        metadata = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
        classes = {name: _class_names(features.get(name)) for name in schema.names}
        for batch in batches:
            batch.validate(full=True)  # offsets that lead out of a damaged file would end the process
            for row in batch.to_pylist():
                number += 1
                for name, names in classes.items():
                    if names is not None:
                        row[name] = _with_names(row[name], names, f"{path}, row {number}: {name}")
                yield number, _without_nul(row)
            on_read(size * number // num_rows - reported)
            reported = size * number // num_rows


def _class_names(feature: Any) -> list[str] | None:
    """Return the names of a ``ClassLabel`` of datasets, or of a list of them; None for other features."""
    while isinstance(feature, list) and len(feature) == 1:  # how older versions write lists
        feature = feature[0]
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") in ("Sequence", "List", "LargeList"):
        return _class_names(feature.get("feature"))
    return [str(name) for name in feature["names"]] if feature.get("_type") == "ClassLabel" else None


def _with_names(value: Any, names: list[str], where: str) -> Any:
    if isinstance(value, list):
        return [_with_names(each, names, where) for each in value]
    if value is None or value == -1:  # what datasets writes where there is no label
        return None
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise UserError(f"{where} is {value!r:.60}, not the number of one of its {len(names)} classes")
    return names[value]
