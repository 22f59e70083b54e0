"""Rows of any table, read in constant memory; every error names the file and the line."""

import contextlib
import csv
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import FORMS
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
from amos_fairseq.untrusted import is_unicode, parse_json, unique_keys

OBJECTS_WITH_KEYS = 100
# What the rows of a table may take in memory. A few bytes, compressed or repeated in Parquet, can be a billion rows.
_ALWAYS_READ, _LARGEST_EXPANSION, _BYTES_OF_A_ROW = 1 << 28, 200, 100
_ROWS_AT_ONCE = 16  # all of them are in memory, and a small file may repeat a large text in every row
_OLDEST_PYARROW = (14, 0, 1)  # older ones unpickle what the schema of a file contains (CVE-2023-47248)
FEW_DEV, SPLIT_SEED = 50, 1
csv.field_size_limit(LARGEST_DOCUMENT_BYTES)  # of the process: 131,072 is a short text


class TableFile:
    """One table, whose columns have names. ``rows()`` reads it once. NUL is removed from all texts.

    - CSV: the first line has the names of the columns. A field that contains a comma, a quote or a line end is in quotes, with
      quotes inside it doubled, as Python's ``csv`` and pandas write it. Values: ``str``.
    - TSV: as CSV with tabs, where the whole file is written so (``has_quotes_of_csv``). Otherwise, and always without
      ``quotes``, a row is a line that is split at its tabs, and quotes are ordinary characters: GLUE's files.
    - JSON lines: an object on each line. The columns are the keys of the first ``OBJECTS_WITH_KEYS``, or with ``all_keys`` of
      all; a key that is missing is None, as NaN is, and others are ignored. Values: those of JSON.
    - Parquet, and folders of ``Dataset.save_to_disk``: values as in JSON (``plain``). The
      number of a class of a ``ClassLabel``, also in a list or object, is replaced by the name of the class, and -1 by None.

    Attributes:
        form: the kind, for people: also that the quotes of TSV are ordinary characters, where that was found.
        columns: the names of the columns; 1, 2, ... of TSV and CSV without a ``header``.
        broken_lines: line numbers (from 1) where rows of TSV and CSV begin that have another number of columns, or repeat the
            header. They are left out, and so are blank lines, but for those of a table of one column.
        num_long_rows: rows of TSV and CSV that take several lines, because a line end is between quotes.
    """

    def __init__(
        self, path: Path, header: bool = True, quotes: bool = True, on_read: OnRead = ignore, all_keys: bool = False
    ) -> None:
        self.path, self.kind, self.header = path, kind_of(path), header
        self._on_read, self.form = on_read, self.kind
        self.broken_lines: list[int] = []
        self.num_long_rows = 0
        if self.kind == TEXT:
            raise UserError(f"{path} is no table by its name: .tsv, .csv, .jsonl and .parquet are (docs/converting.md)")
        if self.kind in (TSV, CSV):
            self._quotes = self.kind == CSV or (quotes and has_quotes_of_csv(path))
            if quotes and not self._quotes:
                self.form += ' whose " are ordinary characters'
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
        both start at 1. ``columns``: the only ones that are needed, which saves reading the others of Parquet. One of them that
        is no column, such as meta.body, is the value of body in the object meta, or None."""
        inside = [name for name in columns or () if name not in self.columns]
        if self.kind in (TSV, CSV):
            rows = self._separated_rows()
        elif self.kind == JSONL:
            rows = (
                (line, {name: row.get(name) for name in self.columns}) for line, row in self._objects(self._on_read)
            )
        else:
            outer = [name.partition(".")[0] if name in inside else name for name in columns or self.columns]
            rows = arrow_rows(self.path, list(dict.fromkeys(outer)), self._on_read)
        most_bytes = max(_ALWAYS_READ, _LARGEST_EXPANSION * sum(file.stat().st_size for file in files_of(self.path)))
        size = 0
        for number, row in rows:
            row |= {name: value_inside(row, name) for name in inside}
            size += _BYTES_OF_A_ROW + sum(len(value) for value in row.values() if isinstance(value, str))
            if size > most_bytes:
                raise UserError(
                    f"{self.path}: its rows take more than {_LARGEST_EXPANSION} times the size of the file, so that a small "
                    "file could fill memory and disk: if they are right, write them as JSON lines, without compression"
                )
            yield number, row
        if not size:
            broken = f", and {len(self.broken_lines):,} with another number of columns" if self.broken_lines else ""
            broken += ": if R added row names, write the table with row.names=FALSE" if broken else ""
            raise UserError(f"{self.path} has no row of the columns {', '.join(self.columns):.200}{broken}")

    def has(self, name: str) -> bool:
        """Return whether the table has a column, or a value inside of the objects of one, as ``rows`` names it."""
        is_inside = self.kind not in (TSV, CSV) and "." in name and name.partition(".")[0] in self.columns
        return name in self.columns or (is_inside and any(row[name] is not None for _, row in self.rows([name])))

    @property
    def left_out(self) -> dict[str, int]:
        """Why rows were left out -> how many, after they were read."""
        return {"with another number of columns than the first line, or equal to it": len(self.broken_lines)}

    def counted(self, what: str) -> str:
        """Return ``what`` is counted, and how many rows are more than a line, which quotes that belong to a text can join."""
        return f"{what} ({self.num_long_rows:,} of several lines, between quotes)" if self.num_long_rows else what

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
            if len(fields) == len(self.columns) and not (self.header and tuple(fields) == self.columns):
                self.num_long_rows += any("\n" in field for field in fields)
                yield number, dict(zip(self.columns, fields, strict=True))
            elif len(fields) > 1 or not is_blank(fields[0]):
                self.broken_lines.append(number)

    def _records(self, on_read: OnRead) -> Iterator[tuple[int, list[str]]]:
        """Yield the fields of each row, with the number of its first line. An empty line has one empty field."""
        lines = ((number, line.replace("\0", "")) for number, line in read_lines(self.path, on_read))
        if not self._quotes:
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


def has_quotes_of_csv(path: Path) -> bool:
    """Return whether quotes around the fields of a TSV file are not a part of its texts: a decision for the whole file.

    They are not if every line can be read as CSV, or else if the file can and its lines have different numbers of tabs, so that
    some fields have several lines, or its first row has quotes around every field, as ``amos classify --predict`` writes the
    names of columns. A quote of a text, as in ``"Yes," he said``, is never followed by a tab or the line's end.
    """
    tabs, each_line = set(), True

    def lines() -> Iterator[str]:
        nonlocal each_line
        for _, line in read_lines(path, ignore):
            if not is_blank(line):
                tabs.add(line.count("\t"))
            each_line = each_line and ('"' not in line or is_csv([line]))
            yield line

    return is_csv(lines()) and (each_line or len(tabs) > 1 or _begins_with_quoted_fields(path))


def _begins_with_quoted_fields(path: Path) -> bool:
    lines = (line.replace("\0", "") for _, line in read_lines(path, ignore))
    try:  # what is without quotes becomes a number, or fails
        first = next(csv.reader(lines, delimiter="\t", strict=True, quoting=csv.QUOTE_NONNUMERIC), [])
    except (csv.Error, ValueError):
        return False
    return bool(first) and all(isinstance(field, str) for field in first)


def is_csv(lines: Iterable[str]) -> bool:
    """Return whether lines can be read as CSV with tabs."""
    try:
        for _ in csv.reader((line.replace("\0", "") for line in lines), delimiter="\t", strict=True):
            pass
    except csv.Error:
        return False
    return True


def value_inside(row: Any, name: str) -> Any:
    for key in name.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row


def require_columns(table: TableFile, names: Sequence[str], choose: str = "give a file that has it") -> None:
    """Refuse a table that lacks one of these columns; ``choose``: how others are chosen, the end of the message."""
    if len(table.columns) == 1 and (separator := re.search("[;|\t]", table.columns[0])):
        choose = f"its columns are separated by {separator[0]!r}: convert it (docs/converting.md, Tables)"
    if table.columns[0].startswith("#"):
        choose += "; where its first line is a comment, remove it"
    for name in names:
        if not table.has(name):
            raise UserError(
                f"{table.path} has no column {name!r:.60}, it has {', '.join(table.columns):.300}: {choose}"
            )


@contextlib.contextmanager
def open_arrow(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[Any, int, Iterator[Any]]]:
    """Yield the schema, the number of rows (0 where a file does not state it), and batches of rows with only these ``columns``.

    What cannot be read raises ``UserError``, also during the body. No code of a file runs, and the pictures, sounds and
    files that a row names are not opened.
    """
    try:
        import pyarrow.parquet

        version = tuple(int(number) for number in pyarrow.__version__.split(".")[:3] if number.isdigit())
    except ImportError:
        version = ()
    if version < _OLDEST_PYARROW:
        raise UserError(f"{path} is read with pyarrow 14.0.1 or newer: pip install 'amos_fairseq[data]'")
    try:
        with contextlib.ExitStack() as stack:
            if path.is_dir():
                readers = [
                    stack.enter_context(pyarrow.ipc.open_stream(stack.enter_context(pyarrow.memory_map(str(file)))))
                    for file in files_of(path)[2:]
                ]
                yield readers[0].schema, 0, _small_batches(readers, columns)
            else:
                # Without pre_buffer, which reads a whole row group; with a buffer_size the chunk of a column is read in parts.
                file = stack.enter_context(pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20))
                batches = file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False)
                yield file.schema_arrow, file.metadata.num_rows, batches
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged or not what its name says ({error!s:.200}): write it again") from error


def _small_batches(readers: Sequence[Any], columns: Sequence[str] | None) -> Iterator[Any]:
    for batch in (batch for reader in readers for batch in reader):
        chosen = batch if columns is None else batch.select(list(columns))
        for start in range(0, len(batch), _ROWS_AT_ONCE):
            yield chosen.slice(start, _ROWS_AT_ONCE)


def arrow_rows(
    path: Path, columns: Sequence[str] | None, on_read: OnRead = ignore
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbered rows (from 1), of ``plain`` values, with the names of classes. ``on_read`` gets equal shares of the
    size of the file where it states the number of rows, else all of it at the end."""
    size, reported, number = sum(file.stat().st_size for file in files_of(path)), 0, 0
    with open_arrow(path, columns) as (schema, num_rows, batches):
        metadata = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
        for batch in batches:
            batch.validate(full=True)  # offsets that lead out of a damaged file would end the process
            for row in _plain_rows(batch, features):
                number += 1
                yield number, row
            done = size * number // num_rows if num_rows else 0
            on_read(done - reported)
            reported = done
    on_read(size - reported)


def _plain_rows(batch: Any, features: dict[str, Any]) -> Iterator[dict[str, Any]]:
    import pyarrow

    values = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = column.type
        if pyarrow.types.is_timestamp(kind) and kind.tz is not None:
            column = column.cast(pyarrow.timestamp(kind.unit, "UTC"))  # any machine knows this zone
        if pyarrow.types.is_timestamp(kind) or pyarrow.types.is_date(kind) or pyarrow.types.is_time(kind):
            column = column.cast(pyarrow.string())  # Python has no nanoseconds, and few years
        values.append([_with_names(cell, features.get(name)) for cell in column.to_pylist()])
    for cells in zip(*values, strict=True):
        yield dict(zip(batch.schema.names, cells, strict=True))


def _with_names(value: Any, feature: Any) -> Any:
    """Return a cell as ``plain`` does; ``feature``: what datasets says of it, such as the names of a ``ClassLabel``, also
    inside of lists and objects."""
    while isinstance(feature, list) and len(feature) == 1:  # how older versions write lists
        feature = feature[0]
    kind = feature.get("_type") if isinstance(feature, dict) else None
    if kind in ("Sequence", "List", "LargeList"):
        return _with_names(value, feature.get("feature"))
    if isinstance(value, list):
        return [_with_names(each, feature) for each in value]
    if isinstance(value, dict) and isinstance(feature, dict):
        return plain({key: _with_names(each, feature.get(key)) for key, each in value.items()})
    if kind != "ClassLabel":
        return plain(value)
    if value is None or value == -1:  # what datasets writes where there is no label
        return None
    names = feature["names"]
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise ValueError(f"{value!r:.60} is not the number of one of its {len(names)} classes")
    return str(names[value])


def plain(value: Any) -> Any:
    """Return a cell of Parquet or JSON as text, bool, int, float or None, or as a list or dict of these.

    Bytes are UTF-8; what JSON has no type for becomes text. NUL is removed from all texts; a text with half of a surrogate pair
    is None, and such a key is left out.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8")
    if isinstance(value, str):
        return value.replace("\0", "") if is_unicode(value) else None
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        named = [(plain(key), plain(each)) for key, each in value.items()]
        return unique_keys([pair for pair in named if pair[0] is not None])
    return value if isinstance(value, bool | int | float | None) else str(value)


def held_out(
    examples: Sequence[Hashable], source: str | Path, what: str, classes: Sequence[Hashable] | None = None
) -> list[int]:
    """Return the indices of a fifth of the examples, 50 at most, or a tenth where that is more, chosen at random, to
    score on. Equal ones are on the same side. With ``classes``, one for each example, dev has nearly their shares, and one of
    each where there is room."""
    indices: dict[Hashable, list[int]] = {}
    for index, example in enumerate(examples):
        indices.setdefault(example, []).append(index)
    groups, total = list(indices.values()), len(examples)
    wanted = round(max(total / 10, min(total / 5, FEW_DEV)))
    order = np.random.default_rng(SPLIT_SEED).permutation(len(groups)).tolist()
    if classes is not None:
        sizes = Counter(classes)  # of equal texts the rarest class counts, so that each class keeps some of its rows
        rarest = [min((classes[index] for index in group), key=sizes.get) for group in groups]
        order = _by_class(order, rarest, wanted / total)
    dev: list[int] = []
    for group in order:
        if len(dev) + len(groups[group]) <= wanted:
            dev += groups[group]
    if len(groups) < 10 or not dev:
        of_classes = "" if classes is None else f" of {len(sizes):,} classes"
        advice = "give --dev"
        if classes and len(groups) >= 10 and len(sizes) == len(groups):  # identifiers
            advice = "give another --label"
        elif classes and len(sizes) > len(groups):
            advice = "exchange --text and --label"
        raise UserError(
            f"{source} has {len(groups)} different {what}{of_classes}, too few to choose dev {what}: {advice}"
        )
    return sorted(dev)


def _by_class(order: Sequence[int], classes: Sequence[Hashable], share: float) -> list[int]:
    """Return the groups in the order in which dev takes them: those of each class at equal distances between 0 and 1, the first
    one as if its class were not rare. The last group of each class is left out: it trains."""
    members: dict[Hashable, list[int]] = {}
    for group in order:
        members.setdefault(classes[group], []).append(group)
    places = {own[0]: min(0.5 / len(own), share / 2) for own in members.values() if len(own) > 1}
    places |= {own[k]: (k + 0.5) / len(own) for own in members.values() for k in range(1, len(own) - 1)}
    return sorted(places, key=places.get)


def held_out_note(num_dev: int, num_train: int, what: str, source: str) -> str:
    return f"dev: {num_dev:,} {what} of {source}, chosen at random (seed {SPLIT_SEED}); {num_train:,} {what} train"


def num_seen(trained: Iterable[Sequence[str]], sentences: Iterable[Sequence[str]]) -> int:
    """Return how many sentences, in words, train too; those of 3 words or fewer repeat in any text and are not counted."""
    known = set(map(tuple, trained))
    return sum(len(words) > 3 and tuple(words) in known for words in sentences)


def seen_note(seen: int, total: int, what: str, split: str = "dev") -> str:
    return f"{seen:,} of {total:,} {split} {what} train too: the scores may be too high"
