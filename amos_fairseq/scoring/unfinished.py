"""Rows of long work, kept from the start so that the same command continues after a stop."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from amos_fairseq.errors import UserError


class UnfinishedRows:
    """``OUT.unfinished``: a first line that tells what the rows are of, then one line a row.

    Args:
        out: the file that the rows are for; it is not touched here.
        identity: what determines the rows, plain JSON values. Rows of anything else are not continued.
    """

    def __init__(self, out: Path, identity: dict[str, Any]):
        self.path = out.with_name(f"{out.name}.unfinished")
        self._head = json.dumps(identity, sort_keys=True).encode() + b"\n"
        self.was_of_another = False
        try:
            self._file = self._open()
        except OSError as error:
            raise self._explained(error) from error

    def _open(self) -> BinaryIO:
        """Positioned after the last whole row; a row that a kill or a full disk has cut goes."""
        self.num_rows = 0
        if self.path.is_file():
            file = self.path.open("r+b")
            if file.readline() == self._head:
                whole = len(self._head)
                for row in file:
                    if row.endswith(b"\n"):
                        self.num_rows, whole = self.num_rows + 1, whole + len(row)
                file.truncate(whole)
                file.seek(whole)
                return file
            file.close()
            self.was_of_another = True
        file = self.path.open("w+b")
        file.write(self._head)
        return file

    def append(self, rows: Iterable[str]) -> None:
        """Rows without line ends; on return they are with the operating system, whatever becomes of this process."""
        try:
            self._file.write("".join(f"{row}\n" for row in rows).encode("utf-8"))
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing writes what is left, in vain
                self._file.close()
            raise self._explained(error) from error

    def rows(self) -> Iterator[str]:
        """All rows, those of earlier runs too."""
        self._file.seek(len(self._head))
        for row in self._file:
            yield row.decode("utf-8").removesuffix("\n")
        self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> "UnfinishedRows":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def remove(self) -> None:
        """The work is done and lies elsewhere."""
        self._file.close()
        self.path.unlink()

    def _explained(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path} cannot be written ({error.strerror}): make room, or choose another place with --out"
        )
