"""Write files atomically, completely or not at all, and without following links."""

import contextlib
import csv
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.strangers import is_unicode

# Errors of a full disk, an exceeded quota and a limit on file sizes.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

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


def cache_folder() -> Path:
    """Return the folder of this package in the user's cache; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "amos_fairseq"


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

    The holder may remove the file before it closes the descriptor.

    Raises:
        UserError: another process holds the lock or has ended it this moment (``refusal`` is the message), or ``path`` is a
            link.
    """
    descriptor = no_links(str(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # child processes do not inherit it
        # The holder may have removed the file since it was opened here: a third process would lock a new one.
        is_held = not os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except OSError:
        is_held = True
    if is_held:
        os.close(descriptor)
        raise UserError(refusal)
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


@contextlib.contextmanager
def explain_write_errors(what: object, hint: str) -> Iterator[None]:
    """Raise :class:`UserError` for a disk error behind any exception: ``what`` is not written, ``hint`` says how to fix it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        raise UserError(f"{what} cannot be written ({cause.strerror or cause}): {hint}") from error


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
