"""Tables that ``pyarrow`` and ``datasets`` read: Parquet files, and folders that ``Dataset.save_to_disk`` wrote."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import field, parse_json, read_json

# Rows that are Python values at the same time: a small file may repeat a large text in every row.
_ROWS_AT_ONCE = 100
_OLDEST_PYARROW = (14, 0, 1)  # older ones unpickle what the schema of a file contains (CVE-2023-47248)
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"  # files of save_to_disk


def folder_files(path: Path) -> list[Path]:
    """Return the files of a folder of ``save_to_disk``, which must be whole, in order."""
    if (path / _SPLITS).is_file():
        raise UserError(f"{path} has several splits: give the folder of one of them, such as {path / 'train'}")
    if not (path / _STATE).is_file():
        raise UserError(f"{path} is a folder, but not of save_to_disk of datasets ({_STATE} is missing): give a file")
    state, files = read_json(path / _STATE, "save the data set again"), sorted(path.glob("*.arrow"))
    try:
        named = {field(each, "filename", str) for each in field(state, "_data_files", list)}
    except ValueError as error:
        raise UserError(f"{path / _STATE} is damaged ({error}): save the data set again") from error
    if not named or not named <= {file.name for file in files} or not (path / _INFO).is_file():
        raise UserError(f"{path}: {_INFO} or files that {_STATE} names are missing: copy the whole folder")
    return [path / _STATE, path / _INFO, *files]


@contextmanager
def open_arrow(path: Path) -> Iterator[tuple[Any, int, Iterator[Any]]]:
    """Yield the schema, the number of rows, and batches of rows of a Parquet file or a folder of ``save_to_disk``.

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
            yield table.features.arrow_schema, len(table), table.iter(_ROWS_AT_ONCE)
        else:
            # Without pre_buffer, which reads a whole row group; with a buffer_size the chunk of a column is read in parts.
            with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
                yield file.schema_arrow, file.metadata.num_rows, file.iter_batches(_ROWS_AT_ONCE, use_threads=False)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = "folder of datasets" if path.is_dir() else "Parquet file"
        raise UserError(f"{path} is damaged or no {what} ({error!s:.200}): download or write it again") from error


def arrow_rows(path: Path, on_read: Callable[[int], object]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbered rows (from 1), with the names of classes; ``on_read`` gets equal shares of the size of the file."""
    files = folder_files(path) if path.is_dir() else [path]
    size, reported, number = sum(file.stat().st_size for file in files), 0, 0
    with open_arrow(path) as (schema, num_rows, batches):
        metadata = parse_json((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features", {})
        classes = {name: _class_names(features.get(name)) for name in schema.names}
        for batch in batches:
            for row in _checked_rows(batch, path, number):
                number += 1
                for name, names in classes.items():
                    if names is not None:
                        row[name] = _with_names(row[name], names, f"{path}, row {number}: {name}")
                yield number, without_nul(row)
            done = size * number // max(1, num_rows)  # a damaged file may state 0 rows
            on_read(done - reported)
            reported = done


def _checked_rows(batch: Any, path: Path, before: int) -> list[dict[str, Any]]:
    """Return the rows of a batch; if one of its values cannot be read, say which. ``before``: number of rows before it."""
    try:
        batch.validate(full=True)  # offsets that lead out of a damaged file would end the process
        return batch.to_pylist()
    except (ValueError, OverflowError):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for index in range(len(column)):
                cell = column.slice(index, 1)
                try:
                    cell.validate(full=True)
                    cell.to_pylist()
                except (ValueError, OverflowError) as error:
                    raise UserError(
                        f"{path}, row {before + index + 1}: the value of {name} cannot be read ({error!s:.200}): correct it, "
                        "or write the table without it"
                    ) from error
        raise


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


def without_nul(value: Any) -> Any:
    """Remove NUL from all texts in a value; a text with half of a surrogate pair becomes None, and a key is left out."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return None
        return value.replace("\0", "")
    if isinstance(value, list):
        return [without_nul(each) for each in value]
    if isinstance(value, dict):
        named = ((without_nul(key), each) for key, each in value.items())
        return {key: without_nul(each) for key, each in named if key is not None}
    return value
