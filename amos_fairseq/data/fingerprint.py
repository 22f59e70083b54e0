"""sha256 of files and of flat directories, which identifies a dictionary or a tokenizer."""

import hashlib
import os
from pathlib import Path
from typing import Union

_READ_SIZE = 1 << 20


def file_sha256(path: Union[str, os.PathLike]) -> str:
    """Return the hexadecimal sha256 of a file's bytes; raise ``OSError`` if it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_READ_SIZE):
            digest.update(chunk)
    return digest.hexdigest()


def directory_sha256(directory: Union[str, os.PathLike]) -> str:
    """Return the hexadecimal sha256 of the names and bytes of the files in ``directory``, sorted by name.

    Subdirectories and names that start with a dot (files of editors and file systems) are excluded. The input is the sha256
    of each name and of each file, both of fixed length, so two different directories never give the same input.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(directory).iterdir(), key=lambda path: path.name):
        if path.is_file() and not path.name.startswith("."):
            digest.update(hashlib.sha256(path.name.encode("utf-8")).digest())
            digest.update(bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()
