"""The wanted files out of a ZIP archive that nobody vouches for."""

import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Dict, List

from amos_fairseq.errors import UserError

# The largest official table, MNLI's training set, is a tenth of it.
LARGEST_FILE_BYTES = 1 << 30
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)


def extract_tables(archive: Path, folder: str, names: List[str], directory: Path) -> None:
    """``folder/name`` of the archive to ``directory/name`` for all ``names``, and the ``.txt`` beside them (licences).

    Nothing else is unpacked, whatever the archive holds.

    Raises:
        UserError: no whole ZIP archive, a name that leads elsewhere, a wanted file that is missing or too large.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            entries = _entries(archive, file, folder)
            missing = [name for name in names if name not in entries]
            if missing:
                raise UserError(f"{archive.name} holds no {folder}/{missing[0]}: is it the archive of {folder}?")
            for name, entry in entries.items():
                if name in names or name.lower().endswith(".txt"):
                    _extract(archive, file, entry, directory / name)
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault, not the archive's
        raise UserError(
            f"{archive.name} is no whole ZIP archive ({error}): repeat the command to fetch it again"
        ) from error


def _entries(archive: Path, file: zipfile.ZipFile, folder: str) -> Dict[str, zipfile.ZipInfo]:
    """Files that lie directly in ``folder``, by their own name."""
    found = {}
    for entry in file.infolist():
        path = PurePosixPath(entry.filename)
        is_link = stat.S_ISLNK(entry.external_attr >> 16)
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or ":" in entry.filename or is_link:
            raise UserError(
                f"{archive.name}: its entry {entry.filename!r} leads out of the archive, so nothing of it is unpacked: "
                "this is not an official file, take it from elsewhere"
            )
        if path.parts[:-1] == (folder,) and not entry.is_dir():
            found[path.name] = entry
    return found


def _extract(archive: Path, file: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    if entry.file_size > LARGEST_FILE_BYTES:
        raise UserError(
            f"{archive.name}: {entry.filename} would take {entry.file_size >> 20} MiB: not an official file"
        )
    with file.open(entry) as source, open(target, "wb") as stream:  # reading to the end checks size and CRC
        shutil.copyfileobj(source, stream)
