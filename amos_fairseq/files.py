"""Write files atomically; load checkpoints as data only, and verify their checksums."""

import contextlib
import csv
import errno
import fcntl
import glob
import io
import json
import os
import pickle
import re
import shutil
import socket
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import LARGEST_COUNT, finite_number, is_unicode

# Errors of a full disk, an exceeded quota and a limit on file sizes.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_verified: set[tuple[str, tuple[int, ...]]] = set()  # name and version of checkpoints with right checksums
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"-|[+-]?\d[\d.]*([eE][+-]?\d+)?( ± \d[\d.]*)?")  # a lone hyphen is a missing score


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[str]:
    """Yield a temporary name next to ``path``; on success, the file written there replaces ``path`` atomically.

    A reader, a killed process or a full disk leaves either the old or the new file, never a part. If the body raises, the
    temporary file is removed; the next call removes what a killed process left. The temporary name keeps the extension of
    ``path``, from which libraries choose a format, and contains the process id, so that two processes use different files.
    """
    stem, extension = os.path.splitext(path)
    prefix = f"{stem}.unfinished.{socket.gethostname()}."
    for left in abandoned(prefix, extension):  # a checkpoint may take gigabytes
        with contextlib.suppress(OSError):  # already removed, or owned by another user
            os.unlink(left)
    unfinished = f"{prefix}{os.getpid()}{extension}"
    with contextlib.suppress(FileNotFoundError):  # a link of this name would be followed
        os.unlink(unfinished)
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())  # a rename may reach the disk before the content does
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def write_text(path: str | os.PathLike, content: str) -> None:
    """Write a UTF-8 file atomically (:func:`whole_file`)."""
    with whole_file(str(path)) as unfinished:
        Path(unfinished).write_text(content, encoding="utf-8")


def json_text(content: Any) -> str:
    """Return readable JSON, with a line end, that UTF-8 can represent.

    A path has half of a surrogate pair for each byte that is not text in the locale; such content is escaped as a whole.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return (text if is_unicode(text) else json.dumps(content, indent=2)) + "\n"


def csv_text(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV in which no cell is a formula: names and labels may come from a stranger.

    Spreadsheets run a cell that starts with one of ``=+-@``, also in quotes, so an apostrophe precedes texts that do; numbers
    are unchanged.
    """
    lines: list[str] = []
    # Only with its default, CR LF as the end of a line, does the writer quote cells with a lone CR.
    writer = csv.writer(SimpleNamespace(write=lines.append))
    for row in rows:
        cells = ("" if cell is None else str(cell) for cell in row)
        writer.writerow(
            f"'{cell}" if cell.startswith(_FORMULA) and not _NUMBER.fullmatch(cell) else cell for cell in cells
        )
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def refuse_link(path: str | os.PathLike) -> None:
    """Raise :class:`UserError` if ``path`` is a link: in SAVE_DIR of another person's run it can point to any file."""
    if os.path.islink(path):
        raise UserError(f"{path} is a link, which is not followed: remove it, or replace it by a copy")


def no_links(path: str, flags: int) -> int:
    """Open a file that is written in place, without following a link: an ``opener`` of :func:`open`.

    Raises:
        UserError: ``path`` is a link, or exists and is not a regular file.
    """
    refuse_link(path)
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # opening a pipe would wait for a reader
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path} is not a regular file: remove it")
    return descriptor


def take_lock(path: Path, refusal: str) -> int:
    """Lock the file ``path`` and return its descriptor; the lock ends when it is closed or with this process.

    Raises:
        UserError: another process holds the lock (``refusal`` is the message), or ``path`` is a link.
    """
    descriptor = no_links(str(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # child processes do not inherit it
    except OSError:
        os.close(descriptor)
        raise UserError(refusal) from None
    return descriptor


def abandoned(prefix: str, extension: str = "") -> list[str]:
    """Return the paths ``{prefix}{process id}{extension}`` whose process on this machine has ended."""
    paths = glob.glob(f"{glob.escape(prefix)}*{glob.escape(extension)}")
    processes = {path: path[len(prefix) : len(path) - len(extension)] for path in paths}
    return [path for path, process in processes.items() if process.isdigit() and not _is_running(int(process))]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only checks
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    return True


@contextlib.contextmanager
def whole_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that is renamed to ``path`` when the body ends, and removed when the body raises.

    Folders that a killed process left behind are removed by the next call. ``replace`` permits a ``path`` that exists, which is
    removed with everything in it.
    """
    prefix = f".{path.name}.unfinished.{socket.gethostname()}."
    for left in abandoned(str(path.with_name(prefix))):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = path.with_name(f"{prefix}{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if replace and os.path.lexists(path):
            _exchange(unfinished, path)
        else:
            os.rename(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _exchange(unfinished: Path, path: Path) -> None:
    replaced = path.with_name(f".{path.name}.replaced.{os.getpid()}")
    os.rename(path, replaced)
    try:
        os.rename(unfinished, path)
    except OSError:
        os.rename(replaced, path)
        raise
    if replaced.is_dir() and not replaced.is_symlink():
        shutil.rmtree(replaced)
    else:
        replaced.unlink()


def os_error_behind(error: BaseException | None) -> OSError | None:
    """Return the OSError in a chain of exceptions, or None.

    torch's zip writer replaces it by a RuntimeError on closing; safetensors and tokenizers put it into their own messages.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error
        if found := re.search(r"\(os error (\d+)\)", str(error)):
            return OSError(int(found.group(1)), os.strerror(int(found.group(1))))
        error = error.__cause__ or error.__context__
    return None


class DamagedCheckpoint(UserError):
    """The file is not a complete checkpoint: it is truncated, empty, changed, or in another format."""


def checkpoint_file(path: Path) -> Path:
    """Return ``path``; of a directory ``checkpoint_last.pt``, or ``checkpoint_best.pt`` where fine-tuning kept only that one.

    Raises:
        UserError: there is no such file.
    """
    files = [path / "checkpoint_last.pt", path / "checkpoint_best.pt"] if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            return file
    raise UserError(f"{files[0]} is missing: give a checkpoint or the SAVE_DIR of a run that has saved one")


def file_version(path: str) -> tuple[int, ...]:
    """Return what changes when a file is replaced or written to; raise ``OSError`` if there is none."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def verify_checksums(path: str, digest: Any = None) -> None:
    """Read a checkpoint and compare the CRC-32 that ``torch.save`` has stored for each tensor; torch.load ignores them.

    A process verifies a file once, until it is replaced or written to. The file is streamed; 1 GB in the page cache took 1.8 s
    on one core of a busy machine. Files in the format before torch 1.6 have no checksums.

    Args:
        digest: of ``hashlib``; gets all bytes of the file, which is read only once for both.

    Raises:
        DamagedCheckpoint: the content of a member has changed.
    """
    key = path, file_version(path)
    if digest is None and key in _verified:
        return
    with _HashedFile(path) as file:
        if zipfile.is_zipfile(file):
            archive = zipfile.ZipFile(file)
            # torch.save does not compress; unpacking could take any amount of time and memory.
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise DamagedCheckpoint(f"{path} was not written by torch.save (it is compressed): give another file")
            file.digest = digest
            if (member := archive.testzip()) is not None:
                raise DamagedCheckpoint(
                    f"{path} is damaged (the checksum of {member} in it is wrong): give another checkpoint, or copy it again"
                )
        file.digest = digest
        file.hash_until(os.path.getsize(path))
    _verified.add(key)


class _HashedFile(io.FileIO):
    """A file whose bytes go into ``digest``, if there is one, each once and in order, while it is read."""

    digest: Any = None
    num_hashed = 0

    def read(self, size: int = -1) -> bytes:
        begin = self.tell()
        self.hash_until(begin)
        part = super().read(size)
        self._hash(part[max(0, self.num_hashed - begin) :])
        return part

    def hash_until(self, end: int) -> None:
        """Hash what the reader has skipped."""
        if self.digest is not None and self.num_hashed < end:
            self.seek(self.num_hashed)
            while self.num_hashed < end and (part := super().read(min(end - self.num_hashed, 1 << 20))):
                self._hash(part)
            self.seek(end)

    def _hash(self, part: bytes) -> None:
        if self.digest is not None:
            self.digest.update(part)
            self.num_hashed += len(part)


def read_header(path: str, digest: Any = None) -> dict[str, Any]:
    """Load a checkpoint with memory-mapped tensors; ``digest`` of ``hashlib``, if given, gets all bytes of the file.

    Raises:
        DamagedCheckpoint: the file is truncated or is not a checkpoint.
        UserError: the file contains a class that is not allowed, or cannot be read.
    """
    import torch  # not needed to write files

    try:
        with explain_load_errors(path, digest):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except DamagedCheckpoint as error:
        if "mmap can only be used" not in str(error.__cause__):
            raise
        with explain_load_errors(path):  # files in the format before torch 1.6 cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise DamagedCheckpoint(f"{path} contains a {type(content).__name__}, not a checkpoint: give another file")
    return content


def task_state_of(path: str, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return ``task_state`` of a checkpoint, empty if there is none; raise :class:`UserError` if it is damaged."""
    state = checkpoint.get("task_state") or {}
    if not isinstance(state, dict) or not all(isinstance(value, str | None) for value in state.values()):
        raise UserError(f"{path} has a damaged task_state: give another checkpoint")
    return state


def training_seconds_of(checkpoint: dict[str, Any]) -> float:
    """Return the training time up to a checkpoint; raise ``ValueError`` if it is missing or damaged."""
    import torch

    state = checkpoint.get("extra_state")
    seconds = state.get("previous_training_time") if isinstance(state, dict) else None
    if torch.is_tensor(seconds) and seconds.numel() == 1 and not seconds.is_complex():  # the mean over several ranks
        seconds = seconds.item()
    return finite_number(seconds, 0, LARGEST_COUNT)


@contextlib.contextmanager
def explain_load_errors(path: str, digest: Any = None) -> Iterator[None]:
    """Verify the checksums of the file ``path``, and turn what ``torch.load`` raises for it into a :class:`UserError`.

    ``digest``: see :func:`verify_checksums`.
    """
    try:
        with open(path, "rb"):  # torch reports a file without read permission as "not an archive"
            verify_checksums(path, digest)
            yield
    except UserError:
        raise
    except Exception as error:
        # In a truncated file torch seeks to an invalid position: EINVAL. Every other OSError comes from the disk.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): permit reading it, or give another file"
            ) from error
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and foreign:
            raise UserError(
                f"{path} contains an object of class {foreign.group(1)}, which is not loaded because it could run code of "
                "the author of the file: store only tensors, numbers, strings, lists and dictionaries in it"
            ) from error
        raise DamagedCheckpoint(
            f"{path} is not a complete checkpoint (truncated, or not written by fairseq): give another file"
        ) from error
