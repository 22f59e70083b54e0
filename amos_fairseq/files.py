"""Files that are whole or absent."""

import contextlib
import errno
import glob
import os
import re
import socket
from typing import Iterator

# What a full disk, a quota and a limit on the size of files say.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[str]:
    """Give a name beside ``path`` to write to; at the end that file takes the place of ``path`` in one step.

    A reader, a kill or a full disk meets the old file or the new one, never a part. Where the body raises, the
    unfinished file is removed; what a killed process left goes with the next writing. The name keeps the extension of
    ``path``, from which libraries choose a format, and tells the process, so that two of them do not meet in one file.
    """
    stem, extension = os.path.splitext(path)
    prefix = f"{stem}.unfinished.{socket.gethostname()}."
    for left in abandoned(prefix, extension):  # a checkpoint may have gigabytes
        with contextlib.suppress(OSError):  # gone already, or not ours to remove: no reason not to write
            os.unlink(left)
    unfinished = f"{prefix}{os.getpid()}{extension}"
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())  # a rename may reach the disk before the content that it names
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise


def abandoned(prefix: str, extension: str = "") -> list[str]:
    """Paths ``prefix`` PROCESS ``extension`` of this machine's processes that no longer run."""
    paths = glob.glob(f"{glob.escape(prefix)}*{glob.escape(extension)}")
    processes = {path: path[len(prefix) : len(path) - len(extension)] for path in paths}
    return [path for path, process in processes.items() if process.isdigit() and not _is_running(int(process))]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return True


def os_error_behind(error: BaseException | None) -> OSError | None:
    """The OSError in a chain of exceptions: torch's zip writer covers it with a RuntimeError when it closes, safetensors and
    tokenizers put it into their own words.
    """
    while error is not None:
        if isinstance(error, OSError):
            return error
        if told := re.search(r"\(os error (\d+)\)", str(error)):
            return OSError(int(told.group(1)), os.strerror(int(told.group(1))))
        error = error.__cause__ or error.__context__
    return None
