"""The folder of an export: whole or absent, and never in the place of something else."""

import contextlib
import os
import shutil
import socket
from pathlib import Path
from typing import Iterator

from amos_fairseq.errors import UserError
from amos_fairseq.files import abandoned, os_error_behind

# What every exported folder holds, and hardly any other.
_MARK = "config.json"


def check_place(path: Path, replace: bool) -> None:
    """Raise :class:`UserError` unless an export may become ``path``: known before the long work starts.

    ``replace`` permits a folder with a model in it, or an empty one, and no other: it is removed with all that is in it.
    """
    if path.name in ("", ".."):
        raise UserError(f"{path} has no name of its own: give the name of a folder to write")
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file: give the name of a folder")
    if not replace:
        raise UserError(f"{path} exists: give another folder, or --force to replace it")
    if not (path / _MARK).is_file() and any(path.iterdir()):
        raise UserError(
            f"{path} holds no exported model ({_MARK} is missing in it), and --force replaces nothing else: give another "
            "folder, or remove this one"
        )


@contextlib.contextmanager
def whole_folder(path: Path, replace: bool) -> Iterator[Path]:
    """An empty folder beside ``path`` that takes its place when the body ends, and is removed when the body fails.

    What a killed process left goes with the next writing.

    Raises:
        UserError: ``path`` may not be written (:func:`check_place`), or nothing can be written there.
    """
    check_place(path, replace)
    prefix = f".{path.name}.unfinished.{socket.gethostname()}."
    for folder in abandoned(str(path.with_name(prefix))):
        shutil.rmtree(folder, ignore_errors=True)
    unfinished = path.with_name(f"{prefix}{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        _put_in_place(unfinished, path)
    except UserError:
        raise
    except Exception as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        raise UserError(
            f"{path} cannot be written ({cause.strerror or cause}): make room, permit writing, or give another folder"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put_in_place(unfinished: Path, path: Path) -> None:
    if not path.exists():
        os.rename(unfinished, path)
        return
    replaced = path.with_name(f".{path.name}.replaced.{os.getpid()}")
    os.rename(path, replaced)
    try:
        os.rename(unfinished, path)
    except OSError:
        os.rename(replaced, path)
        raise
    shutil.rmtree(replaced)
