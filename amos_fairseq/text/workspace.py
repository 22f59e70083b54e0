"""Where data are written: the hidden folder of unfinished work, and the check that leaves finished data alone."""

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from amos_fairseq.errors import UserError
from amos_fairseq.files import refuse_link, take_lock
from amos_fairseq.fingerprint import DICTIONARY_FILE, TOKENIZER_DIRECTORY, file_sha256, files_sha256
from amos_fairseq.output.terminal import say
from amos_fairseq.strangers import is_unicode
from amos_fairseq.text.tokenization import Tokenizer


class Workspace:
    """The hidden folder of ``OUT``, as a context manager that locks it. Folders named ``*.unfinished`` do not outlive it.

    A kind of work says in a subclass which ``OUT`` it takes (``check_out``), what it does with the rest of a killed run
    (``open``), and whether a later run can continue this one (``can_continue``); otherwise the folder is removed.
    """

    hidden = ".prepare"
    command = "amos prepare"

    def __init__(self, out: Path) -> None:
        self.out, self.root = out, out / self.hidden
        self._lock: FileLock | None = None
        self._created_out = False

    def __enter__(self) -> "Workspace":
        """
        Raises:
            UserError: ``out`` holds other files or data, or a link in the hidden folder, or another run is writing it.
        """
        refuse_link(self.root)
        self.check_out()
        self._created_out = not self.out.exists()
        self.root.mkdir(parents=True, exist_ok=True)
        problem = f"another {self.command} is writing {self.out}"
        self._lock = take_lock(self.root / "lock", problem, "wait for it, or give another OUT")
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._lock.release)
            # The files of a folder that is a link would be moved, replaced or removed elsewhere.
            for folder, folders, files in os.walk(self.root):  # it follows no links
                for name in (*folders, *files):
                    refuse_link(Path(folder, name))
            self.open()
            on_failure.pop_all()
        self._remove_unfinished()
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove_unfinished()
        if not self.can_continue():
            self.discard()
        self._lock.release()

    def check_out(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"OUT {self.out} is not a directory")

    def open(self) -> None:
        pass

    def can_continue(self) -> bool:
        return False

    def discard(self) -> None:
        """Remove the hidden folder, and ``out`` if this run has created it and published nothing."""
        shutil.rmtree(self.root, ignore_errors=True)  # after Ctrl-C an ending process may still write there
        if self._created_out and self.out.is_dir() and not any(self.out.iterdir()):
            self.out.rmdir()

    def unfinished(self, name: str) -> Path:
        """Create the folder that is renamed when it is complete."""
        directory = self.root / f"{name}.unfinished"
        directory.mkdir()
        return directory

    def _remove_unfinished(self) -> None:
        for path in self.root.glob("*.unfinished"):
            shutil.rmtree(path, ignore_errors=True)  # as in discard; the next run removes the rest


@dataclass(frozen=True)
class Sample:
    """How many examples of the training split are kept (None: all), and the seed that chooses them."""

    limit: int | None
    seed: int

    def describe(self, name: str) -> dict[str, int | None]:
        """Return the settings for a manifest, the limit under ``name``. The seed matters only if examples are chosen."""
        return {name: self.limit, "seed": None if self.limit is None else self.seed}

    def choose(self, total: int) -> list[int]:
        """Return the indices of the chosen examples, in ascending order."""
        if self.limit is None or total <= self.limit:
            return list(range(total))
        return sorted(random.Random(self.seed).sample(range(total), self.limit))


def check_inputs(paths: list[Path], advice: str) -> None:
    """Raise :class:`UserError` if a file is missing, or UTF-8 cannot represent its name, which manifests contain."""
    check_paths(*paths)
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file: {advice}")


def check_paths(*paths: Path) -> None:
    """Raise :class:`UserError` if UTF-8 cannot represent the path of an input or output."""
    for path in paths:
        if not is_unicode(str(path)):
            raise UserError(f"the name of {str(path)!r} is not UTF-8: rename it, for example with convmv")


def describe_source(path: Path) -> dict[str, str]:
    """Return name and sha256 of a file, or of the paths and contents of all files in a folder."""
    if path.is_dir():
        listed = json.dumps(files_sha256(path), sort_keys=True)
        return {"name": path.name, "sha256": hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()}
    return {"name": path.name, "sha256": file_sha256(path)}


def is_finished(
    out: Path, description: dict[str, Any], kind: str, manifest: str, read_manifest: Callable[[Path], dict[str, Any]]
) -> bool:
    """Return True, with a message, if OUT holds the data that would be made; False if it is empty or missing.

    Args:
        description: entries of the manifest that must be equal: settings, tokenizer_sha256, sources.
        kind: of the data, in the message.
        manifest: name of the file in OUT.

    Raises:
        UserError: OUT holds anything else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not out.is_dir():
        raise UserError(f"OUT {out} is not a directory")
    if not (out / manifest).is_file():
        raise UserError(f"OUT {out} is not empty and contains no {kind} data of amos prepare: give another directory")
    found = read_manifest(out)
    for name, value in description.items():
        if found.get(name) != value:
            other = {"settings": "settings", "tokenizer_sha256": "tokenizer", "sources": "files"}[name]
            raise UserError(f"{out} was made with other {other}: give another OUT, or remove it")
    given = "these files and settings" if "settings" in description else "these files"
    say(f"{out} is finished already, with {given}: nothing to do")
    return True


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer/``, and its ``dict.txt`` beside it, where fairseq looks for one."""
    tokenizer.save(directory / TOKENIZER_DIRECTORY)
    shutil.copyfile(directory / TOKENIZER_DIRECTORY / DICTIONARY_FILE, directory / DICTIONARY_FILE)
