"""A table of results as text for the terminal, Markdown and CSV: the same cells everywhere."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from amos_fairseq.files import whole_file

MISSING = "-"


@dataclass(frozen=True)
class Table:
    """Cells as texts; the first column names the row.

    Attributes:
        notes: footnotes, one sentence each.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=list)

    def print(self, console: Console | None = None) -> None:
        """Turned by a quarter, because twelve columns of numbers are wider than a terminal."""
        console = console or Console(highlight=False)
        table = RichTable(title=Text(self.title), title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("")
        for row in self.rows:
            table.add_column(Text(row[0]), justify="right")
        for number, column in enumerate(self.columns[1:], start=1):
            table.add_row(Text(column), *(Text(row[number]) for row in self.rows))
        console.print(table)
        for note in self.notes:
            console.print(Text(f"* {note}"), soft_wrap=True)

    def as_markdown(self) -> str:
        lines = [f"# {self.title}", "", _markdown_row(self.columns)]
        lines.append(_markdown_row(["---", *["---:"] * (len(self.columns) - 1)]))
        lines += [_markdown_row(row) for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]).rstrip() + "\n"

    def as_csv(self) -> str:
        """Header and rows; the notes are in the other files."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return text.getvalue()

    def save(self, stem: Path) -> list[Path]:
        """Write STEM.md and STEM.csv; returns their paths."""
        contents = {stem.with_suffix(".md"): self.as_markdown(), stem.with_suffix(".csv"): self.as_csv()}
        for path, content in contents.items():
            with whole_file(str(path)) as unfinished:
                Path(unfinished).write_text(content, encoding="utf-8")
        return list(contents)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float | None, deviation: float | None = None) -> str:
    """ "88.9 ± 0.1" with one digit each, as the papers print; a dash for nothing."""
    if value is None:
        return MISSING
    return f"{value:.1f}" if deviation is None else f"{value:.1f} ± {deviation:.1f}"
