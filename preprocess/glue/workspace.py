"""The output directory and a hidden one for unfinished tasks: a task is either complete or absent."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, Dict, Optional

from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, refuse_link, write_text
from amos_fairseq.preprocess.common.processes import take_lock
from amos_fairseq.strangers import read_json
from amos_fairseq.tokenization import load_tokenizer
from amos_fairseq.tokenization.tokenizer import Tokenizer

TASK_FILE = "task.json"
_HIDDEN = ".prepare"


class Workspace:
    """``OUT``: ``tokenizer/`` and a directory for each task. Used as a context manager, which locks ``OUT``."""

    def __init__(self, out: Path, tokenizer: Tokenizer) -> None:
        self.out, self._tokenizer = out, tokenizer
        self.root = out / _HIDDEN
        self._lock: Optional[int] = None

    def __enter__(self) -> "Workspace":
        """
        Raises:
            UserError: ``out`` contains other files, or data of another tokenizer, or another run is writing it.
        """
        refuse_link(self.root)  # what is in it is removed
        self._check_out()
        self._created_out = not self.out.exists()
        self.root.mkdir(parents=True, exist_ok=True)
        refusal = f"another prepare.sh is writing {self.out}: wait for it, or give another OUT"
        self._lock = take_lock(self.root / "lock", refusal)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.__exit__)
            self._clear()
            self._tokenizer.save(self.tokenizer)
            on_failure.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.root, ignore_errors=True)  # after Ctrl-C an ending process may still write there
        if self._created_out and not any(self.out.iterdir()):
            self.out.rmdir()
        os.close(self._lock)

    @property
    def tokenizer(self) -> Path:
        """A copy for the duration of the run."""
        return self.root / "tokenizer"

    def unfinished(self, task: str) -> Path:
        """Create the directory that :meth:`publish` renames to ``OUT/task``."""
        directory = self.root / task
        directory.mkdir()
        return directory

    def read_record(self, task: str) -> Optional[Dict[str, Any]]:
        """Return ``task.json`` of a finished task, or None.

        Raises:
            UserError: the directory was not written by this command and must not be replaced.
        """
        directory = self.out / task
        if not directory.exists():
            return None
        hint = f"{directory} was not written by prepare.sh; give another OUT, or remove it"
        record = read_json(directory / TASK_FILE, hint)
        if record.get("task") == task:
            return record
        raise UserError(f"{directory / TASK_FILE} is not of {task}: {hint}")

    def publish(self, task: str, record: Dict[str, Any]) -> None:
        """Replace an earlier version of the task by the finished one; the tokenizer is published before the first task."""
        directory = self.root / task
        write_text(directory / TASK_FILE, json_text(record))
        if not (self.out / "tokenizer").exists():
            copy = self.root / "tokenizer.copy"
            self._tokenizer.save(copy)
            copy.rename(self.out / "tokenizer")
        if (self.out / task).exists():
            (self.out / task).rename(self.root / f"{task}.replaced")
        directory.rename(self.out / task)

    def _check_out(self) -> None:
        if "," in str(self.out):
            raise UserError(f"OUT {self.out}: fairseq separates files by commas, choose a name without commas")
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"OUT {self.out} is not a directory")
        if (self.out / "tokenizer").is_dir():
            if load_tokenizer(self.out / "tokenizer").sha256 != self._tokenizer.sha256:
                raise UserError(f"{self.out} was made with another tokenizer: give another OUT, or remove it")
        elif self.out.exists() and {path.name for path in self.out.iterdir()} - {_HIDDEN}:
            raise UserError(
                f"OUT {self.out} is not empty and contains no GLUE data of prepare.sh: give another directory"
            )

    def _clear(self) -> None:
        """Remove what a killed run left."""
        for path in self.root.iterdir():
            refuse_link(path)
            if path.is_dir():
                shutil.rmtree(path)
