"""The files of a dictionary and of a tokenizer, and the sha256 that identifies them or a binarized text."""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

DICTIONARY_FILE = "dict.txt"
SETTINGS_FILE = "tokenizer.settings.json"
TOKENIZER_DIRECTORY = "tokenizer"  # in a corpus and in SAVE_DIR

_READ_SIZE = 1 << 20


def file_sha256(path: str | os.PathLike, on_read: Callable[[int], object] = lambda size: None) -> str:
    """Return the hexadecimal sha256 of a file's bytes; raise ``OSError`` if it cannot be read.

    ``on_read`` is called with the number of bytes of each part.
    """
    return joined_sha256([path], on_read)


def joined_sha256(paths: Iterable[str | os.PathLike], on_read: Callable[[int], object] = lambda size: None) -> str:
    """Return the hexadecimal sha256 of the bytes of files, one after the other. See :func:`file_sha256`."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as stream:
            while chunk := stream.read(_READ_SIZE):
                digest.update(chunk)
                on_read(len(chunk))
    return digest.hexdigest()


def sample_sha256(path: str | os.PathLike, num_samples: int = 16, sample_size: int = 1 << 16) -> str:
    """Return the hexadecimal sha256 of a file's size and of evenly spaced samples of it, the first and the last included.

    It identifies a large file by reading 1 MiB; it does not find damage between the samples.
    """
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as stream:
        for sample in range(num_samples):
            stream.seek(max(0, size - sample_size) * sample // (num_samples - 1))
            digest.update(stream.read(sample_size))
    return digest.hexdigest()


def file_version(path: str) -> tuple[int, ...]:
    """Return what changes when a file is replaced or written to; raise ``OSError`` if there is none."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def files_sha256(directory: Path) -> dict[str, str]:
    """Return the sha256 of each file in ``directory`` and below, by its path in it."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {path.relative_to(directory).as_posix(): file_sha256(path) for path in paths}


def directory_sha256(directory: str | os.PathLike) -> str:
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
