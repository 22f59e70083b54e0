"""Write files atomically; lock a folder; sha256 of files."""

import contextlib
import csv
import errno
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import FileLock, Timeout

from amos_fairseq.errors import UserError
from amos_fairseq.untrusted import is_unicode

logger = logging.getLogger(__name__)
logging.getLogger("filelock").setLevel(logging.INFO)  # it reports every lock at DEBUG, which fairseq's settings print

DICTIONARY_FILE = "dict.txt"
CORPUS_FILE = "corpus.json"  # of a corpus: settings, counts, hashes
SETTINGS_FILE = "tokenizer.settings.json"
TOKENIZER_DIRECTORY = "tokenizer"  # in a corpus and in SAVE_DIR

# Errors of a full disk, an exceeded quota and a limit on file sizes.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_READ_SIZE = 1 << 20


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


def write_lines(out: Path, lines: Iterable[str]) -> None:
    """Write lines, with their ends, to the file that the user named by ``--out``, atomically (:func:`whole_file`)."""
    with (
        explain_write_errors(out, "make room, permit writing, or give another --out"),
        whole_file(str(out)) as unfinished,
        open(unfinished, "w", encoding="utf-8", newline="") as stream,
    ):
        stream.writelines(lines)


def json_text(content: Any) -> str:
    """Return readable JSON, with a line end, that UTF-8 can represent. A path has half of a surrogate pair for each byte that
    is not text in the locale; such content is escaped as a whole."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    return (text if is_unicode(text) else json.dumps(content, indent=2)) + "\n"


def csv_lines(
    rows: Iterable[Sequence[object]], separator: str = ",", quoting: int = csv.QUOTE_MINIMAL
) -> Iterator[str]:
    """Yield each row as CSV with a line end; None is an empty cell."""
    lines: list[str] = []
    # Only with its default, CR LF as the end of a line, does the writer quote cells with a lone CR.
    writer = csv.writer(SimpleNamespace(write=lines.append), delimiter=separator, quoting=quoting)
    for row in rows:
        writer.writerow(row)
        yield lines.pop().removesuffix("\r\n") + "\n"


def take_lock(path: str | os.PathLike, problem: str, advice: str) -> FileLock:
    """Lock the file ``path``, which stands for its folder; the lock ends with ``release()`` or with this process.

    If another process holds it, a :class:`UserError` names that process: "{problem} (process 7 on host): {advice}". The
    kernel keeps the lock, so none is left after kill -9; a forked child does not hold it. Keep the returned object: a lock
    that is garbage-collected is released. Where a file system has no locks, a warning is printed and nothing is locked.
    """
    path = str(path)
    lock = FileLock(path, timeout=0, thread_local=False, on_acquired=_write_holder)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(f"{problem} ({_holder_of(path)}): {advice}") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s cannot be locked (%s): start no second command there", path, error.strerror)
    return lock


def _write_holder(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: only the name of the holder is missing
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _holder_of(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if name := re.fullmatch(rb"process \d+ on \S{1,200}\n", file.read(300)):
            return name.group().decode(errors="replace").strip()
    return "of unknown name"


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


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """Name runs by the shortest part of their paths that differs: ``out/a`` and ``out/b``, or ``a/run`` and ``b/run``, are
    ``a`` and ``b``. A single run has the last part that is not ``run``."""
    folders = [os.path.abspath(path).strip(os.sep).split(os.sep) for path in paths]
    are_several = len(set(map(tuple, folders))) > 1
    while min(map(len, folders), default=1) > 1 and len({folder[-1] for folder in folders}) == 1:
        if not are_several and folders[0][-1] != "run":
            break
        folders = [folder[:-1] for folder in folders]
    names: list[str] = []
    for length in range(1, max(map(len, folders), default=0) + 1):
        names = ["/".join(folder[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def check_new_folder(path: Path, may_exist: bool) -> None:
    """Refuse a ``path`` that cannot become a folder, or exists, unless it is a folder and ``may_exist``."""
    problem, advice = "", "give the name of a folder to write"
    try:
        str(path).encode()  # safetensors takes names in UTF-8
        if path.name in ("", ".."):
            problem = "has no name of its own"
        elif path.exists() and not path.is_dir():
            problem = "is a file"
        elif path.exists() and not may_exist:
            problem, advice = "exists", "give another folder, or --force to replace it"
    except (OSError, UnicodeError) as error:  # a name that is too long, a folder that may not be read
        problem = f"cannot be a folder ({getattr(error, 'strerror', 'it is not UTF-8')})"
    if problem:
        raise UserError(f"{path} {problem}: {advice}")


@contextlib.contextmanager
def whole_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that is renamed to ``path`` when the body ends, and removed when the body raises, or by the next
    call after a process was killed. ``replace`` permits a ``path`` that exists, which is removed with everything in it."""
    prefix = f".{path.name}.unfinished.{socket.gethostname()}."
    for left in abandoned(str(path.with_name(prefix))):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = path.with_name(f"{prefix}{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process with this id, in a container that was started again
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        _sync(unfinished)
        if replace and os.path.lexists(path):
            _exchange(unfinished, path)
        else:
            os.rename(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # a rename may reach the disk before the content does


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
    """Turn a disk error, also one that a library has wrapped, into a :class:`UserError`; ``hint``: how to fix it."""
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
    """Return the OSError in a chain of exceptions, or None. torch's zip writer raises a RuntimeError instead when it closes;
    safetensors and tokenizers only name it in a message."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            return OSError(int(match.group(1)), os.strerror(int(match.group(1))))
        error = error.__cause__ or error.__context__
    return None


def file_sha256(path: str | os.PathLike, on_read: Callable[[int], object] = lambda size: None) -> str:
    """Return the hexadecimal sha256 of a file; ``on_read`` is called with the number of bytes of each part."""
    return joined_sha256([path], on_read)


def joined_sha256(paths: Iterable[str | os.PathLike], on_read: Callable[[int], object] = lambda size: None) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            while chunk := stream.read(_READ_SIZE):
                digest.update(chunk)
                on_read(len(chunk))
    return digest.hexdigest()


def file_version(path: str) -> tuple[int, ...]:
    """Return what changes when a file is replaced or written to."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def files_sha256(directory: Path) -> dict[str, str]:
    """Return the sha256 of each file in ``directory`` and below, by its path in it."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path.relative_to(directory).as_posix(): file_sha256(path) for path in paths}


def directory_sha256(directory: str | os.PathLike) -> str:
    """Return the hexadecimal sha256 of the names and bytes of the files in ``directory``, sorted by name, without
    subdirectories and names that start with a dot. The input is the sha256 of each name and file: two different directories
    never give the same."""
    digest = hashlib.sha256()
    for path in sorted(Path(directory).iterdir(), key=lambda path: path.name):
        if path.is_file() and not path.name.startswith("."):
            digest.update(hashlib.sha256(path.name.encode("utf-8")).digest())
            digest.update(bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()
