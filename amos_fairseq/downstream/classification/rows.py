"""Rows of texts and labels in a table: which columns to read, what the labels are, and what is left out."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from amos_fairseq.errors import UserError
from amos_fairseq.text.table_files import TSV, TableFile

# Columns that are taken if none is given: the first of these that the table has.
TEXT_COLUMNS = (
    ("text",),
    ("sentence",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    *((name,) for name in ("review", "content", "document", "comment", "tweet", "message")),
)
LABEL_COLUMNS = ("label", "labels", "class", "category", "score", "stars", "rating", "sentiment", "target")
# What a label is: one class of several, any number of labels, or a number (a regression).
KINDS = ("classes", "labels", "number")
# Whole numbers with more different values than this are numbers, not classes.
MOST_NUMBERED_CLASSES = 20
MOST_CLASSES = 10_000
# Of labels that are numbers: the largest, and their mean over their deviation. Models compute them in float32.
LARGEST_NUMBER, LARGEST_RATIO = 1e30, 1e5
SHOWN_CHARACTERS = 100  # of a list of labels in a message


@dataclass(frozen=True)
class Columns:
    """The one or two columns of the texts, and that of the label: None where there are no labels."""

    texts: tuple[str, ...]
    label: str | None


@dataclass
class LabeledRows:
    """The rows of a table that have a text.

    Attributes:
        lines: where each row is in the file: its line, or its number from 1 where there are no lines.
        ids: what a test set calls each row.
        labels: values of the label column as they are in the file.
        left_out: reason -> number of rows.
        broken_lines: see :class:`~amos_fairseq.text.table_files.TableFile`.
        sha256: of the file.
    """

    source: str
    sha256: str = ""
    lines: list[int] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    broken_lines: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def choose(self, indices: Sequence[int]) -> "LabeledRows":
        """Return the rows of these indices, without what was left out before."""
        lists = (self.lines, self.ids, self.texts, self.labels)
        return LabeledRows(self.source, self.sha256, *([values[index] for index in indices] for values in lists))

    def with_labels(self) -> "LabeledRows":
        """Return the rows that have a label; the others are counted."""
        chosen = self.choose([index for index, label in enumerate(self.labels) if not is_missing(label)])
        without = Counter({"without label": len(self) - len(chosen)})
        return dataclasses.replace(chosen, left_out=self.left_out + without)


def check_columns(table: TableFile, columns: Columns) -> None:
    for flag, names in (("--text", columns.texts), ("--label", (columns.label,) if columns.label else ())):
        for name in names:
            if name not in table.columns:
                listed = shorten(", ".join(table.columns), 300)
                raise UserError(f"{table.path} has no column {name!r}: give {flag} with one of {listed}")


def find_columns(table: TableFile, texts: Sequence[str] | None, label: str | None, labeled: bool = True) -> Columns:
    """Return the columns that the user names, or else those with a usual name, or the only ones that remain."""
    check_columns(table, Columns(tuple(texts or ()), label if labeled else None))
    if texts and (len(set(texts)) != len(texts) or len(texts) > 2 or (labeled and label in texts)):
        raise UserError("--text takes one column, or two different ones for pairs, and not that of the label")
    names, listed = table.columns, shorten(", ".join(table.columns), 300)
    if labeled and label is None:
        label = next((name for name in LABEL_COLUMNS if name in names and name not in (texts or ())), None)
    if texts is None:
        rest = [name for name in names if name != label]
        texts = next((usual for usual in TEXT_COLUMNS if set(usual) <= set(rest)), None)
        if texts is None and len(rest) == 1 and (label is not None or not labeled):
            texts = rest
    if texts is None:
        raise UserError(f"{table.path}: which column is the text is not clear: give --text with one or two of {listed}")
    if labeled and label is None:
        rest = [name for name in names if name not in texts]
        if len(rest) != 1:
            raise UserError(f"{table.path}: which column is the label is not clear: give --label with one of {listed}")
        label = rest[0]
    return Columns(tuple(texts), label if labeled else None)


def read_rows(
    path: Path,
    columns: Columns,
    header: bool = True,
    csv_quotes: bool = False,
    with_empty: bool = False,
    id_columns: Sequence[str] = (),
    on_read: Callable[[int], object] = lambda size: None,
) -> LabeledRows:
    """Read the rows with a text, also those without a label; the others are counted.

    Args:
        header, csv_quotes, on_read: see :class:`~amos_fairseq.text.table_files.TableFile`.
        with_empty: read the rows without a text, too.
        id_columns: the first of them that the table has names the rows, or else their position in the file; without any,
            their line does.
    """
    table = TableFile(path, header, csv_quotes, on_read)
    check_columns(table, columns)
    rows = LabeledRows(path.name, broken_lines=table.broken_lines)
    id_column = next((name for name in id_columns if name in table.columns), None)
    for line, values in table.rows():
        texts = texts_of(values, columns.texts, f"{path}, line {line}")
        if not with_empty and not any(text.strip() for text in texts):
            rows.left_out["without text"] += 1
            continue
        rows.lines.append(line)
        position = line - (2 if header else 1) if id_columns else line
        rows.ids.append(str(values[id_column] if id_column else position))
        rows.texts.append(texts)
        rows.labels.append(values.get(columns.label))
    rows.sha256 = table.sha256
    if table.broken_lines:
        advice = "" if csv_quotes or table.kind != TSV else " (if a program wrote it as CSV, give --csv-quotes)"
        rows.left_out[f"with another number of columns{advice}"] = len(table.broken_lines)
    if not rows:
        raise UserError(f"{path} has no row with a text in {' or '.join(columns.texts)}: give another --text")
    return rows


def texts_of(values: Mapping[str, Any], columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the texts of the row ``where``: without NUL, on which tokenizers differ, and with spaces for line ends."""
    for name in columns:
        if isinstance(values.get(name), list | dict):
            raise UserError(f"{where}: {name} is a list or an object, no text: give a column of texts with --text")
    texts = ("" if is_missing(values.get(name)) else str(values[name]) for name in columns)
    return tuple(" ".join(text.replace("\0", "").splitlines()) for text in texts)


def printable(text: str) -> str:
    """Return a text with a question mark for each character that cannot be printed, as in names of files and columns."""
    return "".join(character if character.isprintable() else "?" for character in text)


def is_missing(value: Any) -> bool:
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or (isinstance(value, str) and not value.strip())


def infer_kind(labels: Sequence[Any]) -> str:
    """Return what the labels are: "labels" for lists; "number" for numbers with a fraction, or with more than
    ``MOST_NUMBERED_CLASSES`` different values; "classes" for everything else."""
    labels = [label for label in labels if not is_missing(label)]
    if any(isinstance(label, list | tuple) for label in labels):
        return "labels"
    try:
        numbers = {float(label) for label in labels if not isinstance(label, bool)}
    except (TypeError, ValueError):
        return "classes"
    whole = all(number == int(number) for number in numbers if math.isfinite(number))
    return "classes" if whole and len(numbers) <= MOST_NUMBERED_CLASSES else "number"


def name_of(value: Any) -> str:
    """Return the name of a class: 1 for 1.0 and "1.0", as tables with missing values spell whole numbers."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool):
        value = str(value).lower()
    name = str(value).strip()
    return name.removesuffix(".0") if re.fullmatch(r"-?\d+\.0", name) else name


def parse_labels(rows: LabeledRows, kind: str, separator: str) -> list[Any]:
    """Return the labels of all rows: names, lists of different names, or floats.

    Args:
        separator: between the names of a row that is no list, for the kind "labels".
    """
    parsed: list[Any] = []
    for line, value in zip(rows.lines, rows.labels, strict=True):
        where = f"{rows.source}, line {line}"
        if kind == "number":
            try:
                number = math.nan if isinstance(value, bool) else float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                raise UserError(f"{where}: the label {str(value)[:60]!r} is not a finite number: give another --kind")
            parsed.append(number)
            continue
        is_list = isinstance(value, list | tuple)
        if kind == "classes":
            if is_list:
                raise UserError(f"{where}: the label is a list: give --kind labels")
            names = [name_of(value)]
        else:
            values = value if is_list else [] if is_missing(value) else str(value).split(separator)
            names = list(dict.fromkeys(filter(None, map(name_of, values))))
        for name in names:
            if not name.isprintable():
                raise UserError(f"{where}: the label {name[:60]!r} cannot be printed: is it the column of the labels?")
        parsed.append(names[0] if kind == "classes" else names)
    return parsed


def sorted_names(names: set[str]) -> list[str]:
    try:
        return sorted(names, key=lambda name: (float(name), name))
    except ValueError:
        return sorted(names)


@dataclass(frozen=True)
class LabelKind:
    """What the labels of a task are.

    Attributes:
        kind: classes, labels or number.
        names: in the order of the classes; empty for numbers.
        mean, deviation: of the numbers of the training set, by which the outputs of a model are scaled; None if they are not.
    """

    kind: str
    names: Sequence[str] = ()
    mean: float | None = None
    deviation: float | None = None

    @classmethod
    def of(cls, kind: str, labels: Sequence[Any], source: str, is_given: bool = True) -> "LabelKind":
        """Return the kind of the labels of the training set; raise :class:`UserError` if there is nothing to learn.

        ``is_given``: by the user. If it was inferred, very many classes are taken for a wrong column.
        """
        if kind == "number":
            if max(map(abs, labels)) > LARGEST_NUMBER:
                raise UserError(f"{source}: a label is larger than {LARGEST_NUMBER:g}: give it in a larger unit")
            mean, deviation = float(np.mean(labels)), float(np.std(labels))
            if not deviation > 0:
                raise UserError(f"{source}: each row has the label {labels[0]:g}: give another column as --label")
            if abs(mean) > LARGEST_RATIO * deviation:
                differ = f"of mean {mean:.6g} differ by {deviation:.2g}, which float32 does not tell apart"
                raise UserError(f"{source}: the labels {differ}: subtract a constant from them")
            return cls(kind, (), mean, deviation)
        names = set(labels) if kind == "classes" else {name for row in labels for name in row}
        if len(names) < (2 if kind == "classes" else 1):
            problem = f"each row has the label {labels[0]}" if kind == "classes" else "no row has a label"
            raise UserError(f"{source}: {problem}: give the column of the labels as --label")
        if len(names) > MOST_CLASSES or (not is_given and kind == "classes" and len(names) > max(20, len(labels) // 2)):
            counts = f"{len(labels):,} labels have {len(names):,} different values"
            raise UserError(f"{source}: the {counts}: give another column as --label, or their --kind")
        return cls(kind, sorted_names(names))

    def __str__(self) -> str:
        if self.kind == "number":
            return f"numbers of mean {self.mean:.4g} and standard deviation {self.deviation:.4g}"
        return f"{len(self.names)} {self.kind} ({shorten(', '.join(self.names), SHOWN_CHARACTERS, placeholder=' ...')})"

    def unknown(self, labels: Sequence[Any]) -> Counter[str]:
        """Count the names among dev labels that the training set lacks."""
        if self.kind == "number":
            return Counter()
        rows = ([label] for label in labels) if self.kind == "classes" else labels
        known = set(self.names)
        return Counter(name for row in rows for name in row if name not in known)
