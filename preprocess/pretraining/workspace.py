"""The hidden directory of an unfinished corpus: finished stages stay, unfinished ones are removed."""

import contextlib
import dataclasses
import os
import re
import shutil
from pathlib import Path
from typing import Any, Dict, Optional

from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, refuse_link, write_text
from amos_fairseq.preprocess.common.processes import take_lock
from amos_fairseq.preprocess.pretraining.splitting import Piece, Split
from amos_fairseq.strangers import field, finite_number, read_json, whole_number

MANIFEST = "corpus.json"
_COUNTS = "counts.json"
_HIDDEN = ".prepare"
_PIECE_NAME = re.compile(r"(\d{5,}|valid|sample)\.txt")
_REPEAT = "what is unfinished was removed, repeat the command"


class Workspace:
    """``OUT/.prepare``. Parts under their final name are complete; the others are named ``*.unfinished``.

    As a context manager it holds the lock, and removes what an interrupted run left.
    """

    def __init__(self, out: Path, identity: Dict[str, Any]) -> None:
        """``identity``: settings and inputs; a run continues an earlier one only if they are equal.

        Raises:
            UserError: ``out`` contains other files, another unfinished corpus or links in it, or another run is writing it.
        """
        self.out, self._identity = out, identity
        self.root = out / _HIDDEN
        self._lock: Optional[int] = None

    def __enter__(self) -> "Workspace":
        refuse_link(self.root)
        self._created_out = not self.out.exists()
        if not self._created_out and not self.root.is_dir() and any(self.out.iterdir()):
            raise UserError(
                f"--out {self.out} is not empty and contains no corpus of prepare.sh: give another directory"
            )
        self.root.mkdir(parents=True, exist_ok=True)
        refusal = f"another prepare.sh is writing {self.out}: wait for it, or give another --out"
        self._lock = take_lock(self.root / "lock", refusal)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(os.close, self._lock)
            self._refuse_links()
            self._claim()
            on_failure.pop_all()
        self._remove_unfinished()
        return self

    def __exit__(self, kind: Optional[type], *exception: object) -> None:
        if kind is not None and self.root.is_dir():
            self._remove_unfinished()
            if not self.text.is_dir():
                self.discard()
        os.close(self._lock)

    def discard(self) -> None:
        """Restore ``out`` to its state before the run."""
        shutil.rmtree(self.root)
        if self._created_out:
            self.out.rmdir()

    @property
    def text(self) -> Path:
        return self.root / "text"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    def shard(self, number: int) -> Path:
        return self.root / f"shard{number}"

    def unfinished(self, path: Path) -> Path:
        """Create the directory that :meth:`finish` renames to ``path``."""
        directory = path.with_name(path.name + ".unfinished")
        directory.mkdir()
        return directory

    def finish(self, unfinished: Path) -> None:
        unfinished.rename(unfinished.with_suffix(""))

    def save_split(self, directory: Path, split: Split) -> None:
        write_json(directory / "split.json", dataclasses.asdict(split))

    def load_split(self) -> Optional[Split]:
        path = self.text / "split.json"
        if not path.is_file():
            return None
        record = read_json(path, _REPEAT)
        try:
            pieces = [_piece(piece) for piece in field(record, "pieces", list)]
            return Split(field(record, "inputs", list), pieces, _piece(record["valid"]), _piece(record["sample"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged: {_REPEAT}") from error

    def save_counts(self, directory: Path, counts: Dict[str, Any]) -> None:
        write_json(directory / _COUNTS, counts)

    def load_counts(self, number: int) -> Optional[Dict[str, Any]]:
        path = self.shard(number) / _COUNTS
        counts = read_json(path, _REPEAT, optional=True)
        if counts is None:
            return None
        try:
            for part in ("train", "valid") if number == 0 else ("train",):
                for count in field(counts, part, dict).values():
                    finite_number(count)
        except ValueError as error:
            raise UserError(f"{path} is damaged ({error}): {_REPEAT}") from error
        return counts

    def publish(self, shards: int, manifest: Dict[str, Any]) -> None:
        """Move the finished parts into ``out``, the manifest last; the next run completes an interrupted move."""
        write_json(self.root / MANIFEST, manifest)
        for number in range(shards):
            self._move(self.shard(number), self._target(number, shards))
        self._move(self.tokenizer, self.out / "tokenizer")
        os.replace(self.root / MANIFEST, self.out / MANIFEST)
        shutil.rmtree(self.root)

    def continue_publishing(self) -> bool:
        """Complete the publishing of an interrupted run; return whether there was one."""
        path = self.root / MANIFEST
        if not path.is_file():
            return False
        hint = f"remove {self.out} and repeat the command"
        manifest = read_json(path, hint)
        if not isinstance(manifest.get("shards"), list):
            raise UserError(f"{path} is damaged: {hint}")
        self.publish(len(manifest["shards"]), manifest)
        return True

    def _target(self, number: int, shards: int) -> Path:
        return self.out / f"shard{number}" if shards > 1 else self.out

    def _move(self, source: Path, target: Path) -> None:
        if target != self.out:  # the user named OUT, which may be a link
            refuse_link(target)
        target.mkdir(exist_ok=True)
        for path in sorted(source.iterdir()) if source.is_dir() else []:
            if path.name != _COUNTS:
                os.replace(path, target / path.name)

    def _refuse_links(self) -> None:
        """The files of a folder that is a link would be moved, replaced or removed elsewhere."""
        for folder, folders, files in os.walk(self.root):  # it follows no links
            for name in (*folders, *files):
                refuse_link(Path(folder, name))

    def _claim(self) -> None:
        path = self.root / "identity.json"
        identity = read_json(path, f"remove {self.root} and repeat the command", optional=True)
        # The identity is written before any part, so parts without one are not of this command.
        parts = [self.root / MANIFEST, self.text, self.tokenizer, *self.root.glob("shard*")]
        is_new = identity is None and not any(part.exists() for part in parts)
        if identity != self._identity and not is_new:
            raise UserError(
                f"{self.out} contains an unfinished corpus of other inputs or settings: repeat the command that started it, "
                f"or remove {self.root}"
            )
        write_json(path, self._identity)

    def _remove_unfinished(self) -> None:
        for path in self.root.glob("*.unfinished"):
            # After Ctrl-C an ending process may still write there; the next run removes the rest.
            shutil.rmtree(path, ignore_errors=True)


def _piece(record: Any) -> Piece:
    """Return a piece; raise ``ValueError``, ``KeyError`` or ``TypeError`` if it is damaged. The file that it names is removed
    once it is encoded, so it must be one of the workspace."""
    if not _PIECE_NAME.fullmatch(field(record, "name", str)):
        raise ValueError(f"{record['name']!r:.60} is not the name of a piece")
    return Piece(record["name"], *(whole_number(record[count]) for count in ("documents", "paragraphs", "bytes")))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json_text(content))
