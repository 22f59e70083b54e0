"""Rows of Parquet files and of folders that ``Dataset.save_to_disk`` wrote, read with ``pyarrow``."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.files import OnRead, files_of, ignore
from amos_fairseq.untrusted import is_unicode, parse_json, unique_keys

_ROWS_AT_ONCE = 16  # all of them are in memory, and a small file may repeat a large text in every row
_OLDEST_PYARROW = (14, 0, 1)  # older ones unpickle what the schema of a file contains (CVE-2023-47248)


@contextlib.contextmanager
def open_arrow(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[Any, int, Iterator[Any]]]:
    """Yield the schema, the number of rows (0 where a file does not state it), and batches of rows with only these ``columns``.

    What cannot be read raises :class:`UserError`, also during the body. No code of a file runs, and the pictures, sounds and
    files that a row names are not opened.
    """
    try:
        import pyarrow.parquet

        version = tuple(int(number) for number in pyarrow.__version__.split(".")[:3] if number.isdigit())
        if version < _OLDEST_PYARROW:
            raise ImportError(f"{pyarrow.__version__} may run code of a file")
    except ImportError as error:
        raise UserError(f"{path} is read with pyarrow ({error}): pip install 'amos_fairseq[data]'") from error
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
    """Yield numbered rows (from 1), of :func:`plain` values, with the names of classes. ``on_read`` gets equal shares of the
    size of the file where it states the number of rows, else all of it at the end."""
    size, reported, number = sum(file.stat().st_size for file in files_of(path)), 0, 0
    with open_arrow(path, columns) as (schema, num_rows, batches):
        metadata = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
        classes = {name: _class_names(features.get(name)) for name in schema.names}
        for batch in batches:
            batch.validate(full=True)  # offsets that lead out of a damaged file would end the process
            try:
                rows = list(_plain_rows(batch, classes))
            except ValueError as error:
                place = f"rows {number + 1} to {number + len(batch)}"
                raise UserError(f"{path}, {place}: a value cannot be read ({error!s:.200}): correct it") from None
            for row in rows:
                number += 1
                yield number, row
            done = size * number // num_rows if num_rows else 0
            on_read(done - reported)
            reported = done
    on_read(size - reported)


def _plain_rows(batch: Any, classes: dict[str, list[str] | None]) -> Iterator[dict[str, Any]]:
    import pyarrow

    values = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = column.type
        if pyarrow.types.is_timestamp(kind) and kind.tz is not None:
            column = column.cast(pyarrow.timestamp(kind.unit, "UTC"))  # any machine knows this zone
        if pyarrow.types.is_timestamp(kind) or pyarrow.types.is_date(kind) or pyarrow.types.is_time(kind):
            column = column.cast(pyarrow.string())  # Python has no nanoseconds, and few years
        names = classes[name]
        values.append([plain(cell) if names is None else _with_names(cell, names) for cell in column.to_pylist()])
    for cells in zip(*values, strict=True):
        yield dict(zip(batch.schema.names, cells, strict=True))


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
