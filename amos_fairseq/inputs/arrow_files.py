"""Tables that ``pyarrow`` and ``datasets`` read: Parquet files, and folders that ``Dataset.save_to_disk`` wrote."""

import datetime
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import field, parse_json, read_json, unique_keys

# A small file may repeat a large text in every row, and all rows of a batch are in memory.
_MOST_ROWS_AT_ONCE, _FEWEST_ROWS_AT_ONCE, _BATCH_BYTES = 100, 10, 1 << 28
_OLDEST_PYARROW = (14, 0, 1)  # older ones unpickle what the schema of a file contains (CVE-2023-47248)
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"  # files of save_to_disk
_UNREADABLE = (ValueError, OverflowError, NotImplementedError)  # of pyarrow for a value, and of :func:`plain`


def folder_files(path: Path) -> list[Path]:
    """Return the files of a folder of ``save_to_disk``, which must be whole, in order."""
    if (path / _SPLITS).is_file():
        raise UserError(f"{path} has several splits: give the folder of one of them, such as {path / 'train'}")
    if not (path / _STATE).is_file():
        raise UserError(f"{path} is a folder, but not of save_to_disk of datasets ({_STATE} is missing): give a file")
    state, files = read_json(path / _STATE, "save the data set again"), sorted(path.glob("*.arrow"))
    try:
        named = [field(each, "filename", str) for each in field(state, "_data_files", list)]
        if len(named) > len(set(named)):
            raise ValueError("it names a file twice")
    except ValueError as error:
        raise UserError(f"{path / _STATE} is damaged ({error}): save the data set again") from error
    if not named or not set(named) <= {file.name for file in files} or not (path / _INFO).is_file():
        raise UserError(f"{path}: {_INFO} or files that {_STATE} names are missing: copy the whole folder")
    return [path / _STATE, path / _INFO, *files]


@contextmanager
def open_arrow(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[Any, int, int, Iterator[Any]]]:
    """Yield the schema, the numbers of rows and of bytes when unpacked (of Parquet), and batches of rows of a Parquet file or a
    folder of ``save_to_disk``, which have only these ``columns``.

    What cannot be read raises :class:`UserError`, also during the body.
    """
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
            folder_files(path)  # refuses a folder that lacks some
            # In this format nothing is decoded: not the pictures or sounds of a stranger, nor the files that a row names.
            table = datasets.load_from_disk(str(path)).with_format("arrow")
            chosen = table if columns is None else table.select_columns(list(columns))
            yield table.features.arrow_schema, len(table), 0, chosen.iter(_FEWEST_ROWS_AT_ONCE)
        else:
            # Without pre_buffer, which reads a whole row group; with a buffer_size the chunk of a column is read in parts.
            with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
                metadata = file.metadata
                sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
                at_once = min(_MOST_ROWS_AT_ONCE, max(_FEWEST_ROWS_AT_ONCE, _BATCH_BYTES // max(1, *sizes, 0)))
                batches = file.iter_batches(at_once, columns=columns, use_threads=False)
                yield file.schema_arrow, metadata.num_rows, sum(sizes), batches
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = "folder of datasets" if path.is_dir() else "Parquet file"
        raise UserError(f"{path} is damaged or no {what} ({error!s:.200}): download or write it again") from error


def arrow_rows(
    path: Path, columns: Sequence[str] | None, on_read: Callable[[int], object]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbered rows (from 1), of :func:`plain` values, with the names of classes; ``on_read`` gets equal shares of the
    size of the file."""
    files = folder_files(path) if path.is_dir() else [path]
    size, reported, number = sum(file.stat().st_size for file in files), 0, 0
    with open_arrow(path, columns) as (schema, num_rows, _, batches):
        metadata = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
        classes = {name: _class_names(features.get(name)) for name in schema.names}
        for batch in batches:
            try:
                rows = _plain_rows(batch, classes)
            except _UNREADABLE:
                raise _unreadable_value(batch, classes, path, number) from None
            for row in rows:
                number += 1
                yield number, row
            done = size * number // max(1, num_rows)  # a damaged file may state 0 rows
            on_read(done - reported)
            reported = done


def _plain_rows(batch: Any, classes: dict[str, list[str] | None]) -> list[dict[str, Any]]:
    batch.validate(full=True)  # offsets that lead out of a damaged file would end the process
    values = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        cells = [plain(value) for value in _with_spelled_times(column).to_pylist()]
        names = classes[name]
        values.append(cells if names is None else [_with_names(cell, names) for cell in cells])
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*values, strict=True)]


def _with_spelled_times(column: Any) -> Any:
    """Return a column with dates and times as text: Python has no nanoseconds and few years, and may not know a time zone."""
    import pyarrow
    import pyarrow.compute

    types, kind = pyarrow.types, column.type
    if types.is_timestamp(kind) and kind.tz is not None:
        column = column.cast(pyarrow.timestamp(kind.unit, "UTC"))
    if not (types.is_timestamp(kind) or types.is_time(kind) or types.is_date(kind)):
        return column
    text = column.cast(pyarrow.string())
    if pyarrow.compute.any(pyarrow.compute.starts_with(text, "<")).as_py():  # what pyarrow writes of other years
        raise ValueError("a date or time that is out of range")
    return pyarrow.compute.replace_substring_regex(text, r"\.0+(Z?)$", r"\1")


def _unreadable_value(batch: Any, classes: dict[str, list[str] | None], path: Path, before: int) -> UserError:
    """Return what to say of the first value of a batch that cannot be read; ``before``: number of rows before it."""
    for name in batch.schema.names:
        for index in range(len(batch)):
            try:
                _plain_rows(batch.select([name]).slice(index, 1), classes)
            except _UNREADABLE as error:
                return UserError(
                    f"{path}, row {before + index + 1}: the value of {name} cannot be read ({error!s:.200}): correct it, or "
                    "write the table without it"
                )
    return UserError(f"{path} is damaged after row {before}: download or write it again")


def _class_names(feature: Any) -> list[str] | None:
    """Return the names of a ``ClassLabel`` of datasets, or of a list of them; None for other features."""
    while isinstance(feature, list) and len(feature) == 1:  # how older versions write lists
        feature = feature[0]
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") in ("Sequence", "List", "LargeList"):
        return _class_names(feature.get("feature"))
    return [str(name) for name in feature["names"]] if feature.get("_type") == "ClassLabel" else None


def _with_names(value: Any, names: list[str]) -> Any:
    if isinstance(value, list):
        return [_with_names(each, names) for each in value]
    if value is None or value == -1:  # what datasets writes where there is no label
        return None
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise ValueError(f"{value!r:.60} is not the number of one of its {len(names)} classes")
    return names[value]


def plain(value: Any) -> Any:
    """Return a cell of Parquet or JSON as text, bool, int, float, Decimal or None, or as a list or dict of these.

    Bytes are UTF-8; dates and times become text. NUL is removed from all texts; a text with half of a surrogate pair is None,
    and such a key is left out. Anything else raises ``ValueError``.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return None
        return value.replace("\0", "")
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        named = [(plain(key), plain(each)) for key, each in value.items()]
        return unique_keys([pair for pair in named if pair[0] is not None])
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | uuid.UUID):
        return str(value)
    if not isinstance(value, bool | int | float | Decimal | None):
        raise ValueError(f"it is a {type(value).__name__}")
    return value
