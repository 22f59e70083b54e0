"""Read the tables of Apache Arrow: Parquet files, and folders that ``save_to_disk`` of Hugging Face's ``datasets`` wrote.

Both are read with pyarrow alone. ``datasets`` would be needed for nothing else, and runs code for some of its features.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.fingerprint import joined_sha256
from amos_fairseq.strangers import field, parse_json, plain_name, read_json

# Rows of a batch, and of those of a batch that are Python values at the same time.
_BATCH_ROWS = 1024
# Rows that refer to the same text have copies of it in Python.
_MOST_COPIED_BYTES = 1 << 26
# Compared with what a file says of itself. A row group of the usual writers has a million rows or 128 MiB.
_LARGEST_ROW_GROUP_BYTES = 1 << 32
_OLDEST_PYARROW = (14, 0, 1)  # older ones unpickle what the schema of a file contains (CVE-2023-47248)
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_NOT_WRITTEN = "it was not written by save_to_disk of datasets"
_LISTS = ("Sequence", "List", "LargeList")


class ArrowTable:
    """One Parquet file, or one folder; see :class:`~amos_fairseq.data.table_files.TableFile`."""

    def __init__(self, path: Path, is_folder: bool, on_read: Callable[[int], object]) -> None:
        self._path, self._is_folder, self._on_read = path, is_folder, on_read
        self._pyarrow = _import_pyarrow(path)
        self._files = files_of(path)
        with self._explained():
            if is_folder:
                with self._stream(self._files[-1]) as (_, reader):
                    schema = reader.schema
                features = read_json(path / _INFO, _NOT_WRITTEN).get("features")
            else:
                with self._parquet([]) as file:
                    schema = file.schema_arrow
                features = _features(path, (schema.metadata or {}).get(b"huggingface"))
        self.columns = tuple(schema.names)
        features = features if isinstance(features, dict) else {}
        self._classes = {name: _class_names(features.get(name)) for name in self.columns}

    @property
    def sha256(self) -> str:
        return joined_sha256(self._files)

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        with self._explained():
            for batch in self._folder_batches() if self._is_folder else self._parquet_batches():
                step = self._rows_at_once(batch)
                for start in range(0, batch.num_rows, step):
                    values = [column.slice(start, step).to_pylist() for column in batch.columns]
                    for row in zip(*values, strict=True):
                        number += 1
                        yield number, self._named(number, row)

    def _named(self, number: int, values: tuple[Any, ...]) -> dict[str, Any]:
        row = {}
        for (name, classes), value in zip(self._classes.items(), values, strict=True):
            try:
                value = value if classes is None else _with_names(value, classes)
            except (IndexError, TypeError):
                raise UserError(
                    f"{self._path}, row {number}: {name} is {value!r:.60}, not the number of one of its {len(classes)} classes"
                ) from None
            row[name] = _without_nul(value)
        return row

    def _parquet_batches(self) -> Iterator[Any]:
        """Yield batches of rows. Texts stay numbers in a dictionary: a small file may repeat a large text in every row."""
        with self._parquet([]) as file:
            metadata, names = file.metadata, file.schema_arrow.names
            types = self._pyarrow.types
            texts = [
                name
                for name, each in zip(names, file.schema_arrow.types, strict=True)
                if types.is_string(each) or types.is_large_string(each)
            ]
        for group in range(metadata.num_row_groups):
            size = metadata.row_group(group).total_byte_size
            if size > _LARGEST_ROW_GROUP_BYTES:
                raise UserError(
                    f"{self._path}: a row group has {size:,} bytes: write the file again with smaller ones, at most "
                    f"{_LARGEST_ROW_GROUP_BYTES:,} are read"
                )
        total, reported, done = self._path.stat().st_size, 0, 0
        with self._parquet(texts) as file:
            for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
                yield batch
                done += batch.num_rows
                part = total * done // max(done, metadata.num_rows) - reported
                reported += part
                self._on_read(part)
        self._on_read(total - reported)

    def _folder_batches(self) -> Iterator[Any]:
        for path in self._files:
            reported, size = 0, path.stat().st_size
            if path.suffix == ".arrow":
                with self._stream(path) as (source, reader):
                    if tuple(reader.schema.names) != self.columns:
                        raise UserError(f"{path} has other columns than the last file of the folder: save it again")
                    for batch in reader:
                        batch.validate(full=True)  # offsets that lead out of the file would end the process
                        yield batch
                        self._on_read(source.tell() - reported)
                        reported = source.tell()
            self._on_read(size - reported)

    def _rows_at_once(self, batch: Any) -> int:
        sizes = [
            column.dictionary.nbytes
            for column in batch.columns
            if self._pyarrow.types.is_dictionary(column.type) and len(column.dictionary)
        ]
        return max(1, min(_BATCH_ROWS, _MOST_COPIED_BYTES // max([1, *sizes])))

    @contextmanager
    def _parquet(self, dictionaries: list[str]) -> Iterator[Any]:
        from pyarrow.parquet import ParquetFile

        # Without pre_buffer, which reads a whole row group; with a buffer_size the chunk of a column is read in parts.
        with ParquetFile(self._path, read_dictionary=dictionaries, pre_buffer=False, buffer_size=1 << 20) as file:
            yield file

    @contextmanager
    def _stream(self, path: Path) -> Iterator[tuple[Any, Any]]:
        with self._pyarrow.memory_map(str(path)) as source, self._pyarrow.ipc.open_stream(source) as reader:
            yield source, reader

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (self._pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            kind = "folder of datasets" if self._is_folder else "Parquet file"
            raise UserError(
                f"{self._path} is damaged or no {kind} ({error!s:.200}): download or write it again"
            ) from error


def is_written_by_datasets(path: Path) -> bool:
    """Return whether a folder is of ``save_to_disk``: one table, or one folder for each split."""
    return (path / _STATE).is_file() or (path / _SPLITS).is_file()


def files_of(path: Path) -> list[Path]:
    """Return the files of a table in order: the file itself, or those of a folder of ``save_to_disk``.

    Raises:
        UserError: the folder is no such folder, or has several splits.
    """
    if not path.is_dir():
        return [path]
    if not (path / _STATE).is_file():
        if (path / _SPLITS).is_file():
            content = read_json(path / _SPLITS, _NOT_WRITTEN)
            try:
                splits = [plain_name(name) for name in field(content, "splits", list)]
            except ValueError as error:
                raise UserError(f"{path / _SPLITS} is damaged ({error}): {_NOT_WRITTEN}") from None
            one = path / (splits[0] if splits else "train")
            raise UserError(f"{path} has the splits {', '.join(splits)[:200]}: give one of them, such as {one}")
        raise UserError(f"{path} is a folder, but not of save_to_disk of datasets ({_STATE} is missing): give a file")
    state = read_json(path / _STATE, _NOT_WRITTEN)
    try:
        if state.get("_indices_data_files"):
            raise ValueError("its rows are selected by another file, as before datasets 2.0")
        names = [plain_name(field(each, "filename", str)) for each in field(state, "_data_files", list)]
        if not names or any("/" in name or not name.endswith(".arrow") for name in names):
            raise ValueError("it names no data, or files elsewhere")
    except ValueError as error:
        raise UserError(f"{path / _STATE} cannot be used ({error}): save the data set again") from None
    files = [path / _STATE, path / _INFO, *(path / name for name in names)]
    for each in files:
        if not each.is_file():
            raise UserError(f"{each} is missing: copy the whole folder")
    return files


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.types
    except ImportError as error:
        raise UserError(
            f"{path} is read with pyarrow, which does not import ({error}): pip install 'amos_fairseq[data]'"
        ) from error
    if tuple(int(part) for part in pyarrow.__version__.split(".")[:3] if part.isdigit()) < _OLDEST_PYARROW:
        raise UserError(
            f"{path}: pyarrow {pyarrow.__version__} may run code of the file: pip install 'amos_fairseq[data]'"
        )
    return pyarrow


def _features(path: Path, metadata: bytes | None) -> Any:
    """Return what ``datasets`` wrote into a Parquet file about its columns."""
    if metadata is None:
        return None
    try:
        return field(parse_json(metadata), "info", dict).get("features")
    except ValueError as error:
        raise UserError(f"{path}: its metadata of datasets {error}: write it again") from None


def _class_names(feature: Any) -> list[str] | None:
    """Return the names of a ``ClassLabel``, or of a list of them; None for other features."""
    while isinstance(feature, list) and len(feature) == 1:  # how older versions write lists
        feature = feature[0]
    if not isinstance(feature, dict):
        return None
    kind = feature.get("_type")
    if kind in _LISTS:
        return _class_names(feature.get("feature"))
    names = feature.get("names") if kind == "ClassLabel" else None
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _with_names(value: Any, classes: list[str]) -> Any:
    if isinstance(value, list):
        return [_with_names(part, classes) for part in value]
    if value is None or value == -1:  # what datasets writes where there is no label
        return None
    if value < 0:
        raise IndexError
    return classes[value]


def _without_nul(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "") if "\0" in value else value
    return [_without_nul(part) for part in value] if isinstance(value, list) else value
