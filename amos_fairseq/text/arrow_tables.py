"""Read the tables of Apache Arrow: Parquet files, and folders that ``save_to_disk`` of Hugging Face's ``datasets`` wrote.

Both are read with pyarrow alone. ``datasets`` would be needed for nothing else, and runs code for some of its features.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.fingerprint import joined_sha256
from amos_fairseq.strangers import field, parse_json, plain_name, read_json
from amos_fairseq.text.text_files import LARGEST_DOCUMENT_BYTES

# Rows that are Python values at the same time, unless their texts have more bytes together.
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 1024, 1 << 26
_OLDEST_PYARROW = (14, 0, 1)  # older ones unpickle what the schema of a file contains (CVE-2023-47248)
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_NOT_WRITTEN = "it was not written by save_to_disk of datasets"
_LISTS = ("Sequence", "List", "LargeList")


class ArrowTable:
    """One Parquet file, or one folder; see :class:`~amos_fairseq.text.table_files.TableFile`."""

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
                for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    part = batch.slice(start, _ROWS_AT_ONCE)
                    is_small = self._num_bytes(part) <= _BYTES_AT_ONCE
                    for rows in [part] if is_small else (part.slice(row, 1) for row in range(part.num_rows)):
                        if not is_small and self._num_bytes(rows) > LARGEST_DOCUMENT_BYTES:
                            raise UserError(
                                f"{self._path}, row {number + 1}: larger than {LARGEST_DOCUMENT_BYTES >> 20} MiB: divide it"
                            )
                        for values in zip(*(column.to_pylist() for column in rows.columns), strict=True):
                            number += 1
                            yield number, self._named(number, values)

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
        """Yield batches of rows. Texts stay numbers of a dictionary: a small file may repeat a large text in every row.

        Not those in lists, whose dictionaries pyarrow cannot join where a batch has rows of two row groups.
        """
        with self._parquet([]) as file:
            num_rows = file.metadata.num_rows
            leaves = [file.schema.column(index) for index in range(len(file.schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY" and leaf.path == leaf.name]
        total, reported, done = self._path.stat().st_size, 0, 0
        with self._parquet(texts) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, use_threads=False):
                yield batch
                done += batch.num_rows
                part = total * done // max(done, num_rows) - reported
                reported += part
                self._on_read(part)
        self._on_read(total - reported)

    def _folder_batches(self) -> Iterator[Any]:
        for path in self._files:
            reported, size = 0, path.stat().st_size
            if path.suffix == ".arrow":
                self._refuse_compression(path)
                with self._stream(path) as (source, reader):
                    if tuple(reader.schema.names) != self.columns:
                        raise UserError(f"{path} has other columns than the last file of the folder: save it again")
                    for batch in reader:
                        batch.validate(full=True)  # offsets that lead out of the file would end the process
                        yield batch
                        self._on_read(source.tell() - reported)
                        reported = source.tell()
            self._on_read(size - reported)

    def _num_bytes(self, array: Any) -> int:
        """Return the bytes of the values of a batch or an array, with a copy of a text for each value that refers to it."""
        pa = self._pyarrow
        if isinstance(array, pa.RecordBatch):
            return sum(map(self._num_bytes, array.columns))
        if isinstance(array, pa.StructArray):
            return sum(map(self._num_bytes, array.flatten()))
        is_list = isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray)
        if is_list and not isinstance(array, pa.MapArray):
            return self._num_bytes(array.flatten())
        if isinstance(array, pa.DictionaryArray) and not pa.types.is_primitive(array.type.value_type):
            lengths = pa.compute.binary_length(array.dictionary.cast(pa.large_binary()))
            return pa.compute.sum(lengths.take(array.indices)).as_py() or 0
        return array.nbytes

    def _refuse_compression(self, path: Path) -> None:
        """Raise :class:`UserError` if a batch of a file is compressed. It would be unpacked as a whole, however large it is.

        ``datasets`` writes no such files. Whether one is compressed is a field of its header (Message.fbs of Arrow), which
        pyarrow verifies and does not show.
        """
        with self._pyarrow.memory_map(str(path)) as source:
            for message in self._pyarrow.ipc.MessageReader.open_stream(source):
                if message.type == "schema":
                    continue
                header = message.metadata.to_pybytes()
                batch = _member(header, _member(header, 0, None), 2)
                if message.type == "dictionary":
                    batch = _member(header, batch, 1)
                if _member(header, batch, 3):
                    raise UserError(f"{path} is compressed: save the data set again, without compression")

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
        except (self._pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError, struct.error) as error:
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


def _member(flatbuffer: bytes, table: int, number: int | None) -> int:
    """Return the position of the table that a member of another one refers to (None: the root), or 0 where it is absent."""
    place = 0
    if number is not None:
        members = table - struct.unpack_from("<i", flatbuffer, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", flatbuffer, members)[0]:
            return 0
        offset = struct.unpack_from("<H", flatbuffer, members + 4 + 2 * number)[0]
        if not offset:
            return 0
        place = table + offset
    return place + struct.unpack_from("<I", flatbuffer, place)[0]


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
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
