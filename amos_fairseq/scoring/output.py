"""Output files of ``amos score``: the formats of rows, rows stored in ``OUT.unfinished``, and the finished file."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from amos_fairseq.errors import UserError
from amos_fairseq.files import no_links, whole_file
from amos_fairseq.scoring.pseudo_likelihood import ScoredLine

RowFormat = Callable[[ScoredLine], str]

TSV_HEADER = "line\tpll\tnum_pieces\tnum_unknown\tpieces\tlog_probs"
DECIMALS = 6  # about the precision of float32 for values around 10


def tsv_row(scored: ScoredLine) -> str:
    """Format number, PLL, number of pieces and of unknown pieces, the pieces, and the log-probability of each.

    Spaces separate pieces and values, since pieces contain no space. PLL and values of a line that is too long for the model
    are empty.
    """
    values = [f"{value:.{DECIMALS}f}" for value in scored.log_probs or []]
    pll = "" if scored.pll is None else f"{scored.pll:.{DECIMALS}f}"
    line = scored.line
    columns = (line.number, pll, len(line.pieces), len(line.unknown), " ".join(line.pieces), " ".join(values))
    return "\t".join(map(str, columns))


def json_row(scored: ScoredLine) -> str:
    """Format a JSON object that also holds the text; PLL and values of a line that is too long are null."""
    values = scored.log_probs
    record = {
        "line": scored.line.number,
        "text": scored.line.text,
        "pll": None if scored.pll is None else round(scored.pll, DECIMALS),
        "num_unknown": len(scored.line.unknown),
        "pieces": scored.line.pieces,
        "log_probs": None if values is None else [round(value, DECIMALS) for value in values],
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


# --format -> the header of the file, if it has one, and the row of a line.
FORMATS: dict[str, tuple[str | None, RowFormat]] = {"tsv": (TSV_HEADER, tsv_row), "jsonl": (None, json_row)}


class UnfinishedRows(contextlib.AbstractContextManager):
    """``OUT.unfinished``: a first line that identifies the work, then one line per row.

    A stopped command continues from this file.

    Args:
        out: the output file; it is not changed here.
        identity: everything that determines the rows, as plain JSON values. Rows of another identity are discarded.
    """

    def __init__(self, out: Path, identity: dict[str, Any]):
        self.path = out.with_name(f"{out.name}.unfinished")
        self._header = json.dumps(identity, sort_keys=True).encode() + b"\n"
        self.discarded_others = False
        try:
            self._file = self._open()
        except OSError as error:
            raise _write_error(self.path, error) from error

    def _open(self) -> BinaryIO:
        """Open the file at the end of its last complete row; a row cut short by a kill or a full disk is removed."""
        self.num_rows = 0
        if self.path.is_file():
            file = open(self.path, "r+b", opener=no_links)  # noqa: SIM115 - closed by __exit__
            if file.readline() == self._header:
                end = len(self._header)
                for row in file:
                    if row.endswith(b"\n"):
                        self.num_rows, end = self.num_rows + 1, end + len(row)
                file.truncate(end)
                file.seek(end)
                return file
            file.close()
            self.discarded_others = True
        self.path.unlink(missing_ok=True)  # truncated, it could be a link to another file
        file = self.path.open("x+b")
        file.write(self._header)
        return file

    def append(self, rows: Iterable[str]) -> None:
        """Append rows without line ends. They are flushed to the operating system, so a kill of this process keeps them."""
        try:
            self._file.write("".join(f"{row}\n" for row in rows).encode("utf-8"))
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # closing tries to write the rest, which fails again
                self._file.close()
            raise _write_error(self.path, error) from error

    def rows(self) -> Iterator[str]:
        """Yield all rows, including those of earlier runs."""
        self._file.seek(len(self._header))
        for row in self._file:
            try:
                yield row.decode("utf-8").removesuffix("\n")
            except UnicodeDecodeError as error:
                raise self.damaged() from error
        self._file.seek(0, os.SEEK_END)

    def damaged(self) -> UserError:
        return UserError(f"{self.path} is damaged: remove it and repeat the command, which then starts from line 1")

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def remove(self) -> None:
        """Remove the file after the output file has been written."""
        self._file.close()
        self.path.unlink()


def write_whole(out: Path, lines: Iterable[str]) -> None:
    """Write the output file at once; raise :class:`UserError` on failure, which leaves an existing file unchanged."""
    try:
        with whole_file(str(out)) as unfinished, open(unfinished, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise _write_error(out, error) from error


def _write_error(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be written ({error.strerror}): free some space, or give another --out")
