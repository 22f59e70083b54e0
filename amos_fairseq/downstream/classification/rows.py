"""Rows of texts and labels in a table: which columns to read, what the labels are, and which rows train and are scored."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from amos_fairseq.errors import UserError
from amos_fairseq.files import joined_sha256
from amos_fairseq.text.file_kinds import TSV
from amos_fairseq.text.input_files import TableFile, files_of

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
DEV_SHARE, SPLIT_SEED = 0.1, 1


@dataclass(frozen=True)
class Tables:
    """The tables to train and to score on, and how to read them: options of ``amos classify``.

    Attributes:
        dev: None to take a tenth of the rows of ``train``.
        text: the one or two columns of the texts.
        kind: one of :data:`KINDS`; None to infer it from the labels of ``train``.
        label_separator: between the labels of a row that is no list.
    """

    train: Path
    dev: Path | None = None
    text: Sequence[str] | None = None
    label: str | None = None
    kind: str | None = None
    label_separator: str = ","
    no_header: bool = False
    csv_quotes: bool = False

    def with_columns(self) -> "Tables":
        """Return the tables with the columns that the user does not name, which are found in ``train``."""
        if not self.label_separator:
            raise UserError("the separator of labels is empty: give the text between two labels, such as ','")
        text, label = find_columns(TableFile(self.train, not self.no_header, self.csv_quotes), self.text, self.label)
        return dataclasses.replace(self, text=text, label=label)

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the prepared data besides the files and the tokenizer, as plain values."""
        columns = {"texts": list(self.text), "label": self.label, "header": not self.no_header}
        if self.csv_quotes:
            columns["csv_quotes"] = True
        return columns | {"kind": self.kind, "separator": self.label_separator if self.kind == "labels" else None}

    def read(self) -> tuple["LabeledRows", "LabeledRows", "LabelSpace", list[str]]:
        """Return the rows to train and to score on, what their labels are, and footnotes of the table of scores."""
        train, dev = (None if path is None else self._with_text(path) for path in (self.train, self.dev))
        kind, inferred = self.kind, ""
        if kind is None:
            kind = infer_kind(train.labels)
            others = "--kind labels or number" if kind == "classes" else "--kind classes"
            inferred = f", inferred ({others} for something else)"
        train = self._parsed(train, kind)
        train, dev = split_off_dev(train) if dev is None else (train, self._parsed(dev, kind))
        space = LabelSpace.of(kind, train.labels, train.source, bool(inferred))
        notes = [f"{self.label}: {space}{inferred}", *notes_on(train, dev, space, self.dev is None)]
        return train, dev, space, [printable(note) for note in notes]

    def _with_text(self, path: Path) -> "LabeledRows":
        rows = read_rows(path, self.text, self.label, not self.no_header, self.csv_quotes)
        return rows.without("text", [not any(map(str.strip, texts)) for texts in rows.texts])

    def _parsed(self, rows: "LabeledRows", kind: str) -> "LabeledRows":
        """Return the rows with their labels parsed, without rows that lack one; of ``labels`` a row may have none."""
        if kind != "labels":
            rows = rows.without("label", list(map(is_missing, rows.labels)))
        labels = []
        for line, value in zip(rows.ids, rows.labels, strict=True):
            try:
                labels.append(parse_label(value, kind, self.label_separator))
            except ValueError as error:
                raise UserError(f"{rows.source}, line {line}: {error}") from error
        return dataclasses.replace(rows, labels=labels)


@dataclass
class LabeledRows:
    """Rows of a table.

    Attributes:
        sha256: of the file.
        ids: what the table calls each row: its line, or its number from 1 where there are no lines.
        labels: as they are in the file, or what :func:`parse_label` made of them.
        left_out: reason -> number of rows.
        broken_lines: see :class:`~amos_fairseq.text.input_files.TableFile`.
    """

    source: str
    sha256: str = ""
    ids: list[str] = field(default_factory=list)
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    broken_lines: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def choose(self, indices: Sequence[int]) -> "LabeledRows":
        """Return the rows of these indices, without what was left out before."""
        lists = ([values[index] for index in indices] for values in (self.ids, self.texts, self.labels))
        return LabeledRows(self.source, self.sha256, *lists)

    def without(self, lacking: str, lacks: Sequence[bool]) -> "LabeledRows":
        """Leave out the rows that ``lacks`` marks, and count them as rows without ``lacking``, a text or a label."""
        rows = self.choose([index for index, is_left_out in enumerate(lacks) if not is_left_out])
        if not rows:
            raise UserError(f"{self.source}: no row has a {lacking}: give another --{lacking}")
        rows.left_out = self.left_out + Counter({f"without {lacking}": sum(lacks)})
        return rows


def check_columns(table: TableFile, texts: Sequence[str], label: str | None) -> None:
    """Refuse a column that the table lacks, more than two columns of texts, and a column that is given twice."""
    for flag, names in (("--text", texts), ("--label", [] if label is None else [label])):
        for name in names:
            if name not in table.columns:
                listed = shorten(", ".join(table.columns), 300)
                raise UserError(f"{table.path} has no column {name!r}: give {flag} with one of {listed}")
    if len(set(texts)) != len(texts) or len(texts) > 2 or label in texts:
        raise UserError("--text takes one column, or two different ones for pairs, and not that of the label")


def find_columns(table: TableFile, texts: Sequence[str] | None, label: str | None) -> tuple[tuple[str, ...], str]:
    """Return the columns that the user names, or else those with a usual name, or the only ones that remain."""
    texts = list(texts or ())
    check_columns(table, texts, label)
    names, listed = table.columns, shorten(", ".join(table.columns), 300)
    if label is None:
        label = next((name for name in LABEL_COLUMNS if name in names and name not in texts), None)
    if not texts:
        rest = [name for name in names if name != label]
        usual = next((columns for columns in TEXT_COLUMNS if set(columns) <= set(rest)), None)
        texts = usual or (rest if len(rest) == 1 and label is not None else [])
    if not texts:
        raise UserError(f"{table.path}: which column is the text is not clear: give --text with one or two of {listed}")
    if label is None:
        rest = [name for name in names if name not in texts]
        if len(rest) != 1:
            raise UserError(f"{table.path}: which column is the label is not clear: give --label with one of {listed}")
        label = rest[0]
    return tuple(texts), label


def read_rows(
    path: Path,
    texts: Sequence[str],
    label: str | None,
    header: bool = True,
    csv_quotes: bool = False,
    id_columns: Sequence[str] = (),
    on_read: Callable[[int], object] = lambda size: None,
) -> LabeledRows:
    """Read all rows, also those without a text or label; ``texts`` and ``label`` are columns.

    ``id_columns``: the first of them that the table has names the rows, or else their position in the file; without any, their
    line does. The other arguments are those of :class:`~amos_fairseq.text.input_files.TableFile`.
    """
    table = TableFile(path, header, csv_quotes, on_read)
    check_columns(table, texts, label)
    rows = LabeledRows(path.name, broken_lines=table.broken_lines)
    id_column = next((name for name in id_columns if name in table.columns), None)
    for line, values in table.rows():
        position = line - (2 if header else 1) if id_columns else line
        rows.ids.append(str(values[id_column] if id_column else position))
        rows.texts.append(texts_of(values, texts, f"{path}, line {line}"))
        rows.labels.append(values.get(label))
    rows.sha256 = joined_sha256(files_of(path))
    if table.broken_lines:
        advice = "" if csv_quotes or table.kind != TSV else " (if a program wrote it as CSV, give --csv-quotes)"
        rows.left_out[f"with another number of columns{advice}"] = len(table.broken_lines)
    if not rows:
        raise UserError(f"{path} has no rows: fill it")
    return rows


def texts_of(values: Mapping[str, Any], columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the texts of the row ``where``: without NUL, on which tokenizers differ, and with spaces for line ends."""
    texts = []
    for name in columns:
        value = values.get(name)
        if isinstance(value, list | dict):
            raise UserError(f"{where}: {name} is a list or an object, no text: give a column of texts with --text")
        text = "" if is_missing(value) else str(value)
        texts.append(" ".join(text.replace("\0", "").splitlines()))
    return tuple(texts)


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


def parse_label(value: Any, kind: str, separator: str) -> str | list[str] | float:
    """Return the name of a class, the different names of a list, or a number; raise ``ValueError`` for something else."""
    if kind == "number":
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"the label {str(value)[:60]!r} is not a finite number: give another --kind")
        return number
    is_list = isinstance(value, list | tuple)
    if kind == "classes":
        if is_list:
            raise ValueError("the label is a list: give --kind labels")
        values = [value]
    else:
        values = value if is_list else [] if is_missing(value) else str(value).split(separator)
    names = list(dict.fromkeys(filter(None, map(name_of, values))))
    for name in names:
        if not name.isprintable():
            raise ValueError(f"the label {name[:60]!r} cannot be printed: is it the column of the labels?")
    return names[0] if kind == "classes" else names


def name_of(value: Any) -> str:
    """Return the name of a class: 1 for 1.0 and "1.0", as tables with missing values spell whole numbers."""
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    name = str(value).strip()
    return name.removesuffix(".0") if re.fullmatch(r"-?\d+\.0", name) else name


def sorted_names(names: set[str]) -> list[str]:
    try:
        return sorted(names, key=lambda name: (float(name), name))
    except ValueError:
        return sorted(names)


@dataclass(frozen=True)
class LabelSpace:
    """What the labels of a task are.

    Attributes:
        kind: one of :data:`KINDS`.
        names: in the order of the classes; empty for numbers.
        mean, deviation: of the numbers of the training set, by which the outputs of a model are scaled; None if they are not.
    """

    kind: str
    names: Sequence[str] = ()
    mean: float | None = None
    deviation: float | None = None

    @classmethod
    def of(cls, kind: str, labels: Sequence[Any], source: str, is_inferred: bool) -> "LabelSpace":
        """Return the space of the parsed labels of the training set; raise :class:`UserError` if there is nothing to learn.

        ``is_inferred``: the user did not give the kind. Very many classes are then refused: it is likely the wrong column.
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
        if len(names) > MOST_CLASSES or (is_inferred and kind == "classes" and len(names) > max(20, len(labels) // 2)):
            counts = f"{len(labels):,} labels have {len(names):,} different values"
            raise UserError(f"{source}: the {counts}: give another column as --label, or their --kind")
        return cls(kind, sorted_names(names))

    def __str__(self) -> str:
        if self.kind == "number":
            return f"numbers of mean {self.mean:.4g} and standard deviation {self.deviation:.4g}"
        return f"{len(self.names)} {self.kind} ({shorten(', '.join(self.names), SHOWN_CHARACTERS, placeholder=' ...')})"


def split_off_dev(rows: LabeledRows) -> tuple[LabeledRows, LabeledRows]:
    """Return training and dev rows: a tenth, at random. Rows with equal texts are on the same side."""
    indices: dict[tuple[str, ...], list[int]] = {}
    for index, texts in enumerate(rows.texts):
        indices.setdefault(texts, []).append(index)
    groups, wanted = list(indices.values()), round(DEV_SHARE * len(rows))
    if len(groups) < 10 or wanted < 1:
        raise UserError(f"{rows.source} has {len(groups)} different texts, too few to choose dev rows: give --dev")
    dev: list[int] = []
    for group in np.random.default_rng(SPLIT_SEED).permutation(len(groups)):
        if len(dev) + len(groups[group]) <= wanted:
            dev += groups[group]
    train = rows.choose(sorted(set(range(len(rows))).difference(dev)))
    return dataclasses.replace(train, left_out=rows.left_out), rows.choose(sorted(dev))


def notes_on(train: LabeledRows, dev: LabeledRows, space: LabelSpace, dev_is_chosen: bool) -> Iterator[str]:
    """Yield footnotes of the table: which rows are left out, texts that occur twice, and labels that cannot be learned."""
    for name, rows in (("training", train), ("dev", dev)):
        for reason, count in rows.left_out.items():
            yield f"{rows.source}: {count:,} {name} rows {reason} are left out"
        if half_empty := sum(not all(map(str.strip, texts)) for texts in rows.texts):
            yield f"{rows.source}: {half_empty:,} {name} pairs have one empty text"
    if dev_is_chosen:
        yield f"dev: {len(dev):,} rows of {dev.source}, chosen at random (seed {SPLIT_SEED}); {len(train):,} rows train"
    labels: dict[tuple[str, ...], set[str]] = {}
    for texts, label in zip(train.texts, train.labels, strict=True):
        labels.setdefault(texts, set()).add(str(label))
    if repeated := len(train) - len(labels):
        several = sum(len(names) > 1 for names in labels.values())
        with_others = f"; {several:,} texts have different labels" if several else ""
        yield f"{train.source}: {repeated:,} training rows repeat the text of an earlier row{with_others}"
    if seen := sum(texts in labels for texts in dev.texts):
        yield f"{dev.source}: {seen:,} of {len(dev):,} dev rows have a text that trains too: the scores may be too high"
    if space.kind == "number":
        return
    known = set(space.names)
    names_of_rows = ([label] for label in dev.labels) if space.kind == "classes" else dev.labels
    if unknown := [name for names in names_of_rows for name in names if name not in known]:
        listed = shorten(", ".join(sorted_names(set(unknown))), SHOWN_CHARACTERS, placeholder=" ...")
        counted = "counted as wrong" if space.kind == "classes" else "not counted"
        yield f"{dev.source}: {len(unknown):,} labels that no training row has are {counted}: {listed}"
