"""Tables of results: the same cells in the terminal, in Markdown and in CSV."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from amos_fairseq.files import csv_text, write_text

MISSING = "-"  # a cell without a value


@dataclass(frozen=True)
class Table:
    """Cells as strings; the first column names the row, notes are sentences. Terminal, Markdown and CSV show the same."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=list)

    def print(self, console: Console | None = None) -> None:
        """Print the table, transposed if it then has no more columns: twelve are wider than a terminal."""
        console = console or Console(highlight=False)
        cells = [["", *self.columns[1:]], *self.rows]
        if len(self.columns) > len(self.rows):
            cells = list(zip(*cells, strict=True))
        table = RichTable(title=Text(self.title), title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(cells[0]):
            table.add_column(Text(column), justify="right" if index else "left")
        for row in cells[1:]:
            table.add_row(*map(Text, row))
        console.print(table)
        for note in self.notes:
            console.print(Text(f"* {note}"), soft_wrap=True)

    def as_markdown(self) -> str:
        notes = [f"- {escape_markdown(note)}" for note in self.notes]
        lines = [f"# {escape_markdown(self.title)}", "", markdown_rows(self.columns, self.rows), "", *notes]
        return "\n".join(lines).rstrip() + "\n"

    def as_csv(self) -> str:
        """Return header and rows, without the notes."""
        return csv_text([self.columns, *self.rows])

    def save(self, stem: Path) -> list[Path]:
        """Write STEM.md and STEM.csv; return their paths."""
        contents = {stem.with_suffix(".md"): self.as_markdown(), stem.with_suffix(".csv"): self.as_csv()}
        for path, content in contents.items():
            write_text(path, content)
        return list(contents)


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
