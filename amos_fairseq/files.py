"""Files that are whole or absent."""

import contextlib
import os
from typing import Iterator


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[str]:
    """Give a name beside ``path`` to write to; at the end that file takes the place of ``path`` in one step.

    A reader, a kill or a full disk meets the old file or the new one, never a part. Where the body raises, the
    unfinished file is removed. The name keeps the extension of ``path``, from which libraries choose a format.
    """
    stem, extension = os.path.splitext(path)
    unfinished = f"{stem}.unfinished{extension}"
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())  # a rename may reach the disk before the content that it names
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise
