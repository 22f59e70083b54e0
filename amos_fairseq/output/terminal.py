"""What commands show on the terminal: messages, progress bars, one line where they end early; tables, also as files."""

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tqdm import tqdm

from amos_fairseq.errors import INTERRUPTED, UserError, one_line
from amos_fairseq.files import NO_ROOM

if TYPE_CHECKING:
    from rich.console import Console

MISSING = "-"  # a cell of a table without a value


def say(line: str, name: str = "prepare") -> None:
    """Print a line about the work to stderr, where the progress bars are."""
    print(f"{name}: {one_line(line)}", file=sys.stderr, flush=True)


def progress_bar(total: int | None, name: str, unit: str, delay: float = 0.0) -> tqdm:
    """Create a progress bar. ``delay``: seconds before it is shown, for work that is usually short."""
    seconds = 0.5 if sys.stderr.isatty() else 15  # a log file stores every line
    return tqdm(total=total, desc=name, unit=unit, unit_scale=True, mininterval=seconds, delay=delay, file=sys.stderr)


@contextlib.contextmanager
def ending_in_one_line(repeated: str, name: str = "prepare") -> Iterator[None]:
    """Turn a disk error into a :class:`UserError`, and Ctrl-C into one line and exit code 130.

    ``repeated``: what the command ``name`` does when it is run again.
    """
    try:
        yield
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        if error.errno in NO_ROOM:
            raise UserError(
                f"no space left ({error.strerror}{place}): make room and repeat the command, {repeated}"
            ) from error
        raise UserError(f"{error.strerror or error}{place}") from error
    except KeyboardInterrupt:
        say(f"interrupted: repeat the command, {repeated}", name)
        raise SystemExit(INTERRUPTED) from None


@dataclass(frozen=True)
class Table:
    """Cells as strings; the first column names the row, notes are sentences. Terminal and Markdown show the same."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=list)
    is_square: bool = False  # rows and columns are the same things, so that an exchange of both would be another table

    def print(self, console: "Console | None" = None) -> None:
        """Print the table, transposed if it then has no more columns: twelve are wider than a terminal."""
        from rich import box  # here: it takes a tenth of a second, and every command imports this module
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        console = console or Console(highlight=False)
        cells = [["", *self.columns[1:]], *self.rows]
        if len(self.columns) > len(self.rows) and not self.is_square:
            cells = list(zip(*cells, strict=True))
        table = RichTable(title=Text(self.title), title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(cells[0]):
            # A name that is cut could be that of another class.
            table.add_column(Text(column), justify="right" if index else "left", overflow="fold")
        for row in cells[1:]:
            table.add_row(*map(Text, row))
        console.print(table)
        for note in self.notes:
            console.print(Text(f"* {note}"), soft_wrap=True)

    def as_markdown(self, heading: str = "#") -> str:
        notes = [f"- {escape_markdown(note)}" for note in self.notes]
        lines = [f"{heading} {escape_markdown(self.title)}", "", markdown_rows(self.columns, self.rows), "", *notes]
        return "\n".join(lines).rstrip() + "\n"


def escape_markdown(text: str) -> str:
    """Return a text without HTML, links and pictures: names of columns and labels may come from a stranger."""
    return text.replace("<", "&lt;").replace("](", "]\\(")


def markdown_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return head and rows in Markdown, the first column left-aligned and the others right-aligned."""
    align = ["---", *["---:"] * (len(columns) - 1)]
    return "\n".join(
        "| " + " | ".join(escape_markdown(cell).replace("|", "\\|") for cell in cells) + " |"
        for cells in (columns, align, *rows)
    )


def format_score(value: float | None, deviation: float | None = None) -> str:
    """Return "88.9 ± 0.1", with one decimal each as in the papers; a dash if there is no value."""
    if value is None:
        return MISSING
    return f"{value:.1f}" if deviation is None else f"{value:.1f} ± {deviation:.1f}"
