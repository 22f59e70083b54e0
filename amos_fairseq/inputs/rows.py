"""Rows of texts and labels in a table: which columns to read, what the labels are, and which rows train and are scored."""

import dataclasses
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from amos_fairseq.errors import UserError, printable
from amos_fairseq.files import joined_sha256
from amos_fairseq.inputs import LABEL_COLUMN, TEXT_COLUMN
from amos_fairseq.inputs.files import OnRead, files_of, ignore, print_what_was_read
from amos_fairseq.inputs.raw_words import is_blank
from amos_fairseq.inputs.tables import TableFile, held_out, held_out_note, require_columns

# What a label is: one class of several, any number of labels, or a number (a regression).
KINDS = ("classes", "labels", "number")
TASK_FILE = "task.json"  # in prepared tables: kind and names of the labels, sources, counts
MOST_CLASSES = 10_000
# Of labels that are numbers: the largest, and their mean over their deviation. Models compute them in float32, and scores their
# squares.
LARGEST_NUMBER, LARGEST_RATIO = 1e30, 1e5
MOST_COUNTED = 20  # classes whose dev rows a note counts
SHOWN_LABELS = 100  # of a list of labels in a message


def is_missing(value: Any) -> bool:
    """Return whether a cell has no value: None, nan, or a blank text."""
    if isinstance(value, str):
        return is_blank(value)
    return value is None or (isinstance(value, float) and math.isnan(value))


def number_of(label: Any) -> float | None:
    """Return the number that a label is, or None for a name and for what a model cannot compute."""
    try:
        number = math.nan if isinstance(label, bool) else float(label)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST_NUMBER else None


def infer_kind(labels: Sequence[Any]) -> str:
    """Return what the labels are, none of which is missing.

    "labels": there are lists. "number": all are numbers, some with a fraction. "classes": all others.
    """
    if any(isinstance(label, list) for label in labels):
        return "labels"
    numbers = list(map(number_of, labels))
    return "number" if None not in numbers and not all(map(float.is_integer, numbers)) else "classes"


def parse_label(value: Any, kind: str, separator: str) -> str | list[str] | float:
    """Return the name of a class, the different names of a list, or a number; raise ``ValueError`` for something else."""
    if kind == "number":
        return parse_number(value)
    values = value if isinstance(value, list) else [value]
    if kind == "labels" and isinstance(value, str):
        if re.fullmatch(r"\s*\[.*\]\s*", value):
            raise ValueError(f"{value!r:.60} is a list as Python prints it: write the table as JSON lines")
        values = value.split(separator)
    if any(isinstance(part, list | dict) for part in values) or (kind == "classes" and isinstance(value, list)):
        raise ValueError(f"the label {value!r:.60} is not one of {'several classes' if kind == 'classes' else 'names'}")
    names = list(dict.fromkeys(name_of(each) for each in values if not is_missing(each)))
    return names[0] if kind == "classes" else names


def names_of_marks(labels: Sequence[Any]) -> list[str]:
    """Return the names 0, 1, ... of the places in lists that are all as long as each other, two or more, and of the numbers 0
    and 1 alone; nothing for other labels, such as lists of names."""
    lists = [label for label in labels if not is_missing(label)]
    if not lists or not all(isinstance(label, list) and len(label) == len(lists[0]) > 1 for label in lists):
        return []
    are_marks = all(not isinstance(cell, str | list | dict) and cell in (0, 1) for label in lists for cell in label)
    return [str(place) for place in range(len(lists[0]))] if are_marks else []


def marked(cells: Any, names: Sequence[str]) -> list[str]:
    """Return those of the names whose cells are 1 or true; raise ``ValueError`` if another cell is not 0 or false."""
    if not isinstance(cells, list) or len(cells) != len(names):
        raise ValueError(f"{cells!r:.60} is no list of {len(names)} values 0 or 1, as the others are")
    spelled = [name_of(cell).lower() for cell in cells]
    for name, cell, value in zip(names, cells, spelled, strict=True):
        if value not in ("0", "1", "false", "true"):
            raise ValueError(f"{name} is {cell!r:.60}, not 0 or 1")
    return [name_of(name) for name, value in zip(names, spelled, strict=True) if value in ("1", "true")]


def parse_number(value: Any) -> float:
    """Return the number of a label that has to be one; raise ``ValueError`` if it is none."""
    number = number_of(value)
    if number is None:
        limits = f"-{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g} (docs/converting.md, Tables)"
        raise ValueError(f"the label {str(value)[:60]!r} is not a number from {limits}")
    return number


def name_of(value: Any) -> str:
    """Return the name of a class: 1 for 1.0 and "1.00", as tables with missing values spell whole numbers, true for True,
    one plain space for others, such as the no-break spaces of web pages, and NFC, as an accented letter has two encodings."""
    text = unicodedata.normalize("NFC", " ".join(str(value).split()))
    name = str(value).lower() if isinstance(value, bool) else printable(text)
    whole = re.fullmatch(r"(-?[0-9]+)\.0+", name)
    return whole[1] if whole else name


def sorted_names(names: set[str]) -> list[str]:
    """Return the names in the order of their numbers, or of their characters if one is no number."""
    are_numbers = all(number_of(name) is not None for name in names)
    return sorted(names, key=lambda name: (number_of(name) if are_numbers else 0, name))


def listed(names: Sequence[str] | set[str]) -> str:
    """Return the names as a list of limited length; those with a comma are in quotes."""
    spelled = (repr(name) if "," in name else name for name in sorted_names(set(names)))
    return shorten(", ".join(spelled), SHOWN_LABELS, placeholder=" ...")


@dataclass(frozen=True)
class LabelSpace:
    """What the labels of a task are."""

    kind: str  # one of :data:`KINDS`
    names: Sequence[str] = ()  # in the order of the classes; empty for numbers
    mean: float | None = None  # of the numbers of the training set, by which the outputs of a model are scaled
    deviation: float | None = None

    @classmethod
    def of(cls, kind: str, labels: Sequence[Any], source: str) -> "LabelSpace":
        """Return the space of the parsed labels of the training set; refuse labels of which a model can learn nothing."""
        if kind == "number":
            space = cls(kind, (), float(np.mean(labels)), float(np.std(labels)))
            is_learnable = space.deviation > abs(space.mean) / LARGEST_RATIO
        else:
            names = set(labels) if kind == "classes" else {name for row in labels for name in row}
            space = cls(kind, sorted_names(names))
            is_learnable = (2 if kind == "classes" else 1) <= len(names) <= MOST_CLASSES
        if not is_learnable:
            raise UserError(
                f"{source}: {space}, of which nothing can be learned: give the column of the labels as --label"
            )
        return space

    def __str__(self) -> str:
        if self.kind == "number":
            return f"numbers of mean {self.mean:.4g} and standard deviation {self.deviation:.4g}"
        return f"{len(self.names)} {self.kind} ({listed(self.names)})"


@dataclass(frozen=True)
class Tables:
    """The tables to train and to score on, and how to read them: options of ``amos classify``."""

    train: Path
    dev: Path | None = None  # None to choose rows of ``train``
    text: Sequence[str] = (TEXT_COLUMN,)  # the one or two columns of the texts
    label: str | Sequence[str] = LABEL_COLUMN  # or several columns of 0 and 1, the names of labels
    kind: str | None = None  # one of ``KINDS``; None to infer it from the labels of ``train``
    label_separator: str = ","  # between the labels of a row that is no list
    no_header: bool = False
    test: Path | None = None  # to score the best model on, too

    def check(self) -> "Tables":
        """Return the tables; refuse columns that they lack."""
        for path in (self.train, self.dev, self.test):
            if path is not None:
                check_columns(TableFile(path, not self.no_header, all_keys=True), self.text, self.label)
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the prepared data besides the files and the tokenizer, as plain values."""
        columns = {
            "texts": list(self.text),
            "label": ", ".join(names_in_option(self.label)),
            "header": not self.no_header,
        }
        return columns | {"kind": self.kind, "separator": self.label_separator if self.kind == "labels" else None}

    @property
    def label_name(self) -> str:
        """What titles and notes call the label: its column, or "labels" for several columns."""
        columns = names_in_option(self.label)
        return columns[0] if len(columns) == 1 else "labels"

    def read(self) -> tuple[dict[str, "LabeledRows"], "LabelSpace", list[str]]:
        """Return the rows to train and to score on, by their split (train, valid, and test if there is one), what their labels
        are, and footnotes of the table of scores; print what was read."""
        train, dev, test = (None if path is None else self._read(path) for path in (self.train, self.dev, self.test))
        kind, inferred = self.kind, ""
        if kind is None:
            kind = infer_kind([label for label in train.labels if not is_missing(label)])
            inferred = ", inferred: --kind gives another"
        columns, marks = names_in_option(self.label), []
        if kind == "labels":
            marks = columns if len(columns) > 1 else names_of_marks(train.labels)
        train = self._parsed(self.train, train, kind, marks)
        train, dev = split_off_dev(train, kind) if dev is None else (train, self._parsed(self.dev, dev, kind, marks))
        space = LabelSpace.of(kind, train.labels, train.source)
        if len(columns) > 1:
            inferred = ", a column of 0 and 1 each" if marks else inferred
        elif marks:
            inferred += ", named by their places in lists of 0 and 1"
        notes = [f"{self.label_name}: {space}{inferred}", *notes_on(train, dev, space, self.dev is None)]
        alike = Counter(name.lower() for name in space.names)
        if twice := [name for name in space.names if alike[name.lower()] > 1]:
            notes.append(f"{self.label_name}: names that differ only in case: {listed(twice)}")
        if kind == "labels" and not marks and not any(len(labels) > 1 for labels in train.labels):
            advice = f"--label-separator {self.label_separator!r} is for text, --kind classes for one label a row"
            notes.append(f"no row has more than one label: {advice}")
        splits = {"train": train, "valid": dev}
        if test is not None:
            splits["test"] = test = self._parsed(self.test, test, kind, marks)
            notes += notes_on_scored(train, test, "test", space)
        return splits, space, [printable(note) for note in notes]

    def _read(self, path: Path) -> "LabeledRows":
        rows = read_rows(path, self.text, self.label, not self.no_header)
        return rows.leave_out([not any(texts) for texts in rows.texts], "without text")

    def _parsed(self, path: Path, rows: "LabeledRows", kind: str, marks: Sequence[str]) -> "LabeledRows":
        """Return the rows with their labels parsed, without rows that lack one; those of kind ``labels`` may have none.
        ``marks``: the names of labels that are lists of 0 and 1."""
        columns = names_in_option(self.label)
        if kind != "labels":
            rows = rows.leave_out(list(map(is_missing, rows.labels)), "without label")
        labels = []
        for line, value in zip(rows.ids, rows.labels, strict=True):
            try:
                names = marked(value, marks) if marks and not is_missing(value) else value
                labels.append(parse_label(names, kind, self.label_separator))
            except ValueError as error:
                raise UserError(
                    f"{rows.source}, line {line}, column {printable(', '.join(columns))}: {error}"
                ) from error
        if not labels:
            raise UserError(f"{path} has no row with a text and a label in {', '.join((*self.text, *columns))}")
        first = f"{' | '.join(rows.texts[0])} -> {labels[0]}"
        print_what_was_read(
            path, rows.kind, [*self.text, *columns], len(rows), rows.left_out, first, "classify", rows.what
        )
        return dataclasses.replace(rows, labels=labels)


@dataclass
class LabeledRows:
    """Rows of a table."""

    source: str
    sha256: str = ""  # of the file
    ids: list[str] = field(default_factory=list)  # the line of each row, or its number from 1 where there are no lines
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)  # as they are in the file, or what parse_label() made of them
    left_out: dict[str, int] = field(default_factory=dict)  # why -> how many rows
    what: str = "rows"  # are counted
    broken_lines: list[int] = field(default_factory=list)
    kind: str = ""  # of the file

    def __len__(self) -> int:
        return len(self.texts)

    def choose(self, indices: Sequence[int]) -> "LabeledRows":
        """Return the rows of these indices."""
        ids, texts, labels = ([values[index] for index in indices] for values in (self.ids, self.texts, self.labels))
        return dataclasses.replace(self, ids=ids, texts=texts, labels=labels)

    def leave_out(self, is_left_out: Sequence[bool], why: str) -> "LabeledRows":
        """Return the other rows, and count those that are left out."""
        rows = self.choose([index for index, is_out in enumerate(is_left_out) if not is_out])
        return dataclasses.replace(rows, left_out=self.left_out | {why: sum(is_left_out)})


def names_in_option(label: str | Sequence[str] | None) -> list[str]:
    """Return the names of the columns of labels, of which an option may have none, one or several."""
    return [label] if isinstance(label, str) else list(label or ())


def check_columns(table: TableFile, texts: Sequence[str], label: str | Sequence[str] | None) -> None:
    """Refuse a column that the table lacks, more than two columns of texts, and a column that is given twice."""
    names = [*texts, *names_in_option(label)]
    require_columns(table, names, f"choose with --text{'' if label is None else ' and --label'}")
    if len(set(names)) < len(names) or len(texts) > 2:
        raise UserError("--text takes one column, or two different ones for pairs, and not that of the label")


def read_rows(
    path: Path,
    texts: Sequence[str],
    label: str | Sequence[str] | None,
    header: bool = True,
    quotes: bool = True,
    id_columns: Sequence[str] = (),
    on_read: OnRead = ignore,
) -> LabeledRows:
    """Read all rows, also those without a text or label; ``texts`` and ``label`` are columns; of
    several columns the label of a row is the list of their values.

    ``id_columns``: the first of them that the table has names the rows, or else their position in the file; without any, their
    line does. The other arguments are those of :class:`~amos_fairseq.inputs.tables.TableFile`.
    """
    table = TableFile(path, header, quotes, on_read, all_keys=True)
    labels = names_in_option(label)
    columns = [*texts, *labels]
    require_columns(table, columns)
    rows = LabeledRows(path.name, broken_lines=table.broken_lines, kind=table.form)
    id_column = next((name for name in id_columns if name in table.columns), None)
    for line, values in table.rows([*columns, *([] if id_column is None else [id_column])]):
        position = line - (2 if header else 1) if id_columns else line
        rows.ids.append(str(values[id_column] if id_column else position))
        rows.texts.append(texts_of(values, texts, f"{path}, line {line}"))
        cells = [values[name] for name in labels]
        rows.labels.append(cells if len(cells) > 1 else next(iter(cells), None))
    rows.sha256 = joined_sha256(files_of(path))
    rows.left_out, rows.what = table.left_out, table.counted("rows")
    return rows


def texts_of(values: Mapping[str, Any], columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the texts of the row ``where``, with spaces for line ends, "" for each that is missing."""
    texts = []
    for name in columns:
        value = values.get(name)
        if isinstance(value, list | dict):
            raise UserError(f"{where}: {name} is a list or an object: give a column of texts with --text")
        texts.append("" if is_missing(value) else " ".join(str(value).splitlines()))
    return tuple(texts)


def split_off_dev(rows: LabeledRows, kind: str) -> tuple[LabeledRows, LabeledRows]:
    """Return training rows, and dev rows as ``held_out`` chooses them. Rows with equal texts are on the same side."""
    dev = held_out(rows.texts, rows.source, "texts", rows.labels if kind == "classes" else None)
    train = rows.choose(sorted(set(range(len(rows))).difference(dev)))
    return train, dataclasses.replace(rows.choose(dev), left_out={})


def notes_on(train: LabeledRows, dev: LabeledRows, space: LabelSpace, dev_is_chosen: bool) -> Iterator[str]:
    """Yield footnotes of the table: rows left out, dev rows of each class, and those of :func:`notes_on_scored`."""
    yield from notes_on_left_out(train, "training")
    if dev_is_chosen:
        yield held_out_note(len(dev), len(train), "rows", dev.source)
    if space.kind == "classes":
        counts = Counter(dev.labels)
        each = f"dev rows of each class: {', '.join(f'{name} {counts[name]:,}' for name in space.names)}"
        few = f"dev has rows of {len(counts.keys() & space.names):,} of {len(space.names):,} classes"
        yield f"{dev.source}: {each if len(space.names) <= MOST_COUNTED else few}"
    yield from notes_on_scored(train, dev, "dev", space)


def notes_on_left_out(rows: LabeledRows, name: str) -> Iterator[str]:
    for why, count in rows.left_out.items():
        if count:
            yield f"{rows.source}: {count:,} {name} rows {why} are left out"


def notes_on_scored(train: LabeledRows, rows: LabeledRows, name: str, space: LabelSpace) -> Iterator[str]:
    """Yield footnotes on dev or test rows: those left out, texts that train too, and labels that no training row has."""
    yield from notes_on_left_out(rows, name)
    trained = set(train.texts)
    if seen := sum(texts in trained for texts in rows.texts):
        count = f"{seen:,} of {len(rows):,} {name} rows have a text that trains too"
        yield f"{rows.source}: {count}: the scores may be too high"
    if space.kind == "number":
        return
    labels = rows.labels if space.kind == "classes" else [name for names in rows.labels for name in names]
    if unknown := [label for label in labels if label not in space.names]:
        if len(unknown) == len(rows) and space.kind == "classes":
            known = f"{listed(unknown)}, but those of training {listed(space.names)}"
            raise UserError(f"{rows.source}: its labels are {known}: write both alike")
        counted, treated = f"{len(unknown):,} {name} rows with labels", "counted as wrong"
        if space.kind == "labels":
            counted, treated = f"{len(set(unknown)):,} {name} labels", "not counted"
        yield f"{rows.source}: {counted} that no training row has are {treated}: {listed(unknown)}"
