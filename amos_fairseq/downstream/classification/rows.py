"""Rows of texts and labels in a table: which columns to read, and what is left out."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.text.table_files import TableFile, number_columns

# Columns that are taken if none is given: the first of these that the table has.
TEXT_COLUMNS = (
    ("text",),
    ("sentence",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("review",),
    ("content",),
    ("document",),
    ("comment",),
    ("tweet",),
    ("message",),
)
LABEL_COLUMNS = ("label", "labels", "class", "category", "score", "stars", "rating", "sentiment", "target")


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are read.

    Attributes:
        texts: one, or the two texts of a pair.
        label: None where there are no labels.
    """

    texts: tuple[str, ...]
    label: str | None


@dataclass
class LabeledRows:
    """The rows of a table that have a text and a label.

    Attributes:
        lines: where each row is in the file: its line, or its number from 1 where there are no lines.
        labels: values of the label column as they are in the file.
        left_out: reason -> number of rows.
        sha256: of the file.
    """

    source: str
    sha256: str = ""
    lines: list[int] = field(default_factory=list)
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.texts)

    def choose(self, indices: Sequence[int]) -> "LabeledRows":
        """Return the rows of these indices, without what was left out before."""
        lines, texts, labels = ([own[index] for index in indices] for own in (self.lines, self.texts, self.labels))
        return LabeledRows(self.source, self.sha256, lines, texts, labels)

    def with_labels(self) -> "LabeledRows":
        """Return the rows that have a label; the others are counted."""
        chosen = self.choose([index for index, label in enumerate(self.labels) if not is_missing(label)])
        left_out = Counter({"without label": len(self) - len(chosen)})
        return dataclasses.replace(chosen, left_out=self.left_out + left_out)


def open_table(path: Path, header: bool = True) -> TableFile:
    """Open a table; without a header its columns are called 1, 2, ..."""
    names = () if header else [str(number) for number in range(1, number_columns(path) + 1)]
    return TableFile(path, names)


def check_columns(table: TableFile, columns: Columns) -> None:
    """Raise :class:`UserError` if the table lacks one of the columns."""
    for flag, given in (("--text", columns.texts), ("--label", (columns.label,) if columns.label else ())):
        for name in given:
            if name not in table.columns:
                raise UserError(
                    f"{table.path} has no column {name!r}: give {flag} with one of {_listed(table.columns)}"
                )


def _listed(names: Sequence[str]) -> str:
    return shorten(", ".join(names), 300)


def find_columns(table: TableFile, texts: Sequence[str] | None, label: str | None, labeled: bool = True) -> Columns:
    """Return the given columns, or those with a usual name.

    Args:
        texts: names of one or two columns; None for a usual name, or the only column besides the label.
        label: None for a usual name, or the only column besides the texts.
        labeled: whether the table has labels.

    Raises:
        UserError: a column does not exist, or which one to take is not clear.
    """
    names, path, shown = table.columns, table.path, _listed(table.columns)
    check_columns(table, Columns(tuple(texts or ()), label if labeled else None))
    if texts and (len(set(texts)) != len(texts) or len(texts) > 2 or (labeled and label in texts)):
        raise UserError("--text takes one column, or two different ones for pairs, and not that of the label")
    if labeled and label is None:
        label = next((name for name in LABEL_COLUMNS if name in names and name not in (texts or ())), None)
    rest = [name for name in names if name != label and name not in (texts or ())]
    if texts is None:
        texts = next((usual for usual in TEXT_COLUMNS if set(usual) <= set(names) - {label}), None)
        if texts is None and (label is not None or not labeled) and len(rest) == 1:
            texts = rest
    if texts is None:
        raise UserError(f"{path}: which column is the text is not clear: give --text with one or two of {shown}")
    if labeled and label is None:
        others = [name for name in names if name not in texts]
        if len(others) != 1:
            raise UserError(f"{path}: which column is the label is not clear: give --label with one of {shown}")
        (label,) = others
    return Columns(tuple(texts), label if labeled else None)


def read_rows(path: Path, columns: Columns, header: bool = True) -> LabeledRows:
    """Read the rows with a text, also those without a label; the others are counted.

    Raises:
        UserError: the file cannot be read, lacks a column, or no row is left.
    """
    table = open_table(path, header)
    check_columns(table, columns)
    rows = LabeledRows(path.name)
    for line, values in table.rows():
        texts = texts_of(values, columns.texts, f"{path}, line {line}")
        if not any(text.strip() for text in texts):
            rows.left_out["without text"] += 1
        else:
            rows.lines.append(line)
            rows.texts.append(texts)
            rows.labels.append(values.get(columns.label))
    rows.sha256 = table.sha256
    if table.broken_lines:
        rows.left_out["with another number of columns"] = len(table.broken_lines)
    if not rows:
        raise UserError(
            f"{path} has no row with a text in {' or '.join(columns.texts)}: give other columns with --text"
        )
    return rows


def texts_of(values: Mapping[str, Any], columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the texts of a row: without NUL, on which tokenizers differ, and with spaces in place of line ends.

    Raises:
        UserError: a value is no text; ``where`` is the row.
    """
    for name in columns:
        if isinstance(values.get(name), list | dict):
            raise UserError(f"{where}: {name} is a list or an object, no text: give a column of texts with --text")
    texts = ("" if is_missing(values.get(name)) else str(values[name]) for name in columns)
    return tuple(" ".join(text.replace("\0", "").splitlines()) for text in texts)


def printable(text: str) -> str:
    """Return a text with a question mark for each character that cannot be printed, as in names of files and columns."""
    return "".join(character if character.isprintable() else "?" for character in text)


def is_missing(value: Any) -> bool:
    """Return whether a value is none, empty, or not a number."""
    return (
        value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, float) and value != value)
    )
