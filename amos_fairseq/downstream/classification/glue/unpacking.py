"""Unpack the official files: tables from a ZIP archive that is not trusted, and MRPC's tables from its authors' files."""

import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import plain_name
from amos_fairseq.text.text_files import InputFile

# Ten times the tables of the largest official archive, that of MNLI.
LARGEST_BYTES = 1 << 30
# zipfile decompresses the others without a limit on memory, and official archives have only these.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
LONGEST_NAME = 200  # file systems have a limit of 255 bytes
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)
_MRPC_HEADER = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_MRPC_TEST_HEADER = ("index", *_MRPC_HEADER[1:])


def extract_tables(archive: Path, folder: str, names: list[str], directory: Path) -> None:
    """Extract ``folder/name`` to ``directory/name`` for all ``names``, and the ``.txt`` files next to them (licenses).

    Nothing else is extracted, whatever the archive contains.

    Raises:
        UserError: the ZIP archive is damaged, has an entry outside of it, or a wanted file is missing or too large.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            entries = _entries(archive, file, folder)
            missing = [name for name in names if name not in entries]
            if missing:
                raise UserError(f"{archive.name} contains no {folder}/{missing[0]}: is it the archive of {folder}?")
            wanted = {name: entry for name, entry in entries.items() if name in names or name.lower().endswith(".txt")}
            _check(archive, list(wanted.values()))
            for name, entry in wanted.items():
                with file.open(entry) as source, open(directory / name, "wb") as stream:
                    shutil.copyfileobj(source, stream)  # at most the stated size; the end checks size and CRC
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the archive
        raise UserError(
            f"{archive.name} is not a complete ZIP archive ({error}): repeat the command to download it again"
        ) from error


def _entries(archive: Path, file: zipfile.ZipFile, folder: str) -> dict[str, zipfile.ZipInfo]:
    """Return the files directly in ``folder``, by file name."""
    found = {}
    for entry in file.infolist():
        path = PurePosixPath(entry.filename)
        is_link = stat.S_ISLNK(entry.external_attr >> 16)
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or ":" in entry.filename or is_link:
            raise UserError(
                f"{archive.name}: its entry {entry.filename!r:.200} leads out of the archive, so nothing is extracted: this is "
                "not an official file, download it from elsewhere"
            )
        if path.parts[:-1] == (folder,) and not entry.is_dir():
            found[path.name] = entry
    return found


def _check(archive: Path, entries: list[zipfile.ZipInfo]) -> None:
    advice = "this is not an official file, download it from elsewhere"
    size = sum(entry.file_size for entry in entries)
    if size > LARGEST_BYTES:
        raise UserError(f"{archive.name}: its files would take {size >> 20:,} MiB: {advice}")
    for entry in entries:
        if entry.compress_type not in _COMPRESSIONS:
            raise UserError(f"{archive.name}: {entry.filename!r:.60} is not compressed by deflate: {advice}")
        try:
            plain_name(entry.filename, LONGEST_NAME)
        except ValueError as error:
            raise UserError(f"{archive.name}: the name {error}: {advice}") from error


def build_mrpc(train: Path, test: Path, dev_ids: Path, directory: Path) -> None:
    """Write ``train.tsv``, ``dev.tsv`` and ``test.tsv`` into ``directory``.

    GLUE distributes only the list of development pairs. A training pair whose two ids are in ``dev_ids`` belongs to the
    development set, every other line to the training set, in the order of the file. Broken lines are copied:
    ``amos prepare`` counts them.

    Raises:
        UserError: a header is wrong, or the list does not match the training file.
    """
    wanted = {(fields[0], fields[1]) for fields in _fields(dev_ids) if len(fields) > 1}
    lines, dev_lines = [_MRPC_HEADER], [_MRPC_HEADER]
    found: set[tuple[str, str]] = set()
    for fields in _mrpc_rows(train):
        pair = (*fields[1:3], "", "")[:2]
        if pair in wanted:
            found.add(pair)
            dev_lines.append(fields)
        else:
            lines.append(fields)
    if not wanted or found != wanted:
        raise UserError(
            f"{dev_ids}: {len(found)} of its {len(wanted)} pairs of ids are in {train.name}: use the list and the file of "
            "the same release"
        )
    _write(directory / "train.tsv", lines)
    _write(directory / "dev.tsv", dev_lines)
    test_lines = [(str(index), *row[1:]) for index, row in enumerate(_mrpc_rows(test))]
    _write(directory / "test.tsv", [_MRPC_TEST_HEADER, *test_lines])


def _mrpc_rows(path: Path) -> Iterable[tuple[str, ...]]:
    lines = iter(_fields(path))
    header = next(lines, ())
    if header != _MRPC_HEADER:
        raise UserError(f"{path}: its first line is {header!r}, not {_MRPC_HEADER!r}: it is not MRPC's file")
    return lines


def _fields(path: Path) -> Iterable[tuple[str, ...]]:
    return (tuple(line.decode("utf-8").rstrip("\r\n").split("\t")) for _, line in InputFile(path).lines())


def _write(path: Path, rows: list[tuple[str, ...]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
