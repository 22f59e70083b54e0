"""sha256 of files and of flat directories: how a dictionary or a tokenizer is recognised again."""

import hashlib
import os
from pathlib import Path
from typing import Union

_READ_SIZE = 1 << 20


def file_sha256(path: Union[str, os.PathLike]) -> str:
    """Hexadecimal sha256 of a file's bytes; ``OSError`` where it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_READ_SIZE):
            digest.update(chunk)
    return digest.hexdigest()


def directory_sha256(directory: Union[str, os.PathLike]) -> str:
    """Hexadecimal sha256 of the names and bytes of the files that lie directly in ``directory``, sorted by name.

    Names that start with a dot are left out (editors and file systems put them there), subdirectories too. Each name
    enters with the sha256 of its file, both of known length, so no two different directories give the same input.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(directory).iterdir(), key=lambda path: path.name):
        if path.is_file() and not path.name.startswith("."):
            digest.update(hashlib.sha256(path.name.encode("utf-8")).digest())
            digest.update(bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()
