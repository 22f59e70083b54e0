"""Rows of texts and labels in a table: which columns to read, what the labels are, and which rows train and are scored."""

import dataclasses
import itertools
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from amos_fairseq.errors import UserError, printable
from amos_fairseq.files import joined_sha256
from amos_fairseq.inputs.file_kinds import CSV, TSV, refuse_markup
from amos_fairseq.inputs.input_files import MISSING_WORDS, TableFile, files_of
from amos_fairseq.inputs.labels import (
    MISSING_BESIDE_NUMBERS,
    LabelSpace,
    check_lists,
    infer_kind,
    is_missing,
    listed,
    missing_words,
    parse_label,
    with_lists,
)
from amos_fairseq.inputs.splits import held_out, held_out_note
from amos_fairseq.output.terminal import say

# Columns that are taken if none is given: the first of these that the table has.
TEXT_COLUMNS = (
    ("text",),
    ("sentence",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    *((name,) for name in ("review", "content", "document", "comment", "tweet", "message")),
)
LABEL_COLUMNS = ("label", "labels", "class", "category", "score", "stars", "rating", "sentiment", "target")
CSV_ADVICE = " (if a program wrote the file as CSV, give --csv-quotes)"
BEGIN_WITH_A_QUOTE = f"rows have a field that begins with a quote, an ordinary character here{CSV_ADVICE}"
MOST_CHARACTERS = 10_000_000  # of a text; a tokenizer takes ten seconds for them


@dataclass(frozen=True)
class Tables:
    """The tables to train and to score on, and how to read them: options of ``amos classify``."""

    train: Path
    dev: Path | None = None  # None to take a tenth of the rows of ``train``
    text: Sequence[str] | None = None  # the one or two columns of the texts
    label: str | None = None
    kind: str | None = None  # one of ``KINDS``; None to infer it from the labels of ``train``
    label_separator: str = ","  # between the labels of a row that is no list
    no_header: bool = False
    csv_quotes: bool = False

    def with_columns(self) -> "Tables":
        """Return the tables with the columns that the user does not name, which are found in ``train``."""
        if not self.label_separator:
            raise UserError("the separator of labels is empty: give the text between two labels, such as ','")
        table = TableFile(self.train, not self.no_header, self.csv_quotes, all_keys=True)
        text, label = find_columns(table, self.text, self.label)
        if self.dev is not None:
            require_columns(TableFile(self.dev, not self.no_header, self.csv_quotes, all_keys=True), [*text, label])
        if self.no_header:
            labels = (values[label] for _, values in table.rows([label]))
            first = next(labels)
            if first.strip().lower() in LABEL_COLUMNS and first not in labels:  # no class of other rows
                raise UserError(f"{self.train}: its first line seems to name the columns: remove --no-header")
        if others := [name for name in table.columns if name not in (*text, label)]:
            read = f"text: {', '.join(text)}; label: {label}"
            say(f"{self.train}: {read}; not read: {shorten(', '.join(others), 300)}", "classify")
        return dataclasses.replace(self, text=text, label=label)

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the prepared data besides the files and the tokenizer, as plain values."""
        columns = {"texts": list(self.text), "label": self.label, "header": not self.no_header}
        separator = self.label_separator if self.kind == "labels" else None
        return columns | {"csv_quotes": self.csv_quotes, "kind": self.kind, "separator": separator}

    def read(self) -> tuple["LabeledRows", "LabeledRows", "LabelSpace", list[str]]:
        """Return the rows to train and to score on, what their labels are, and footnotes of the table of scores."""
        train, dev = (None if path is None else self._with_text(path) for path in (self.train, self.dev))
        missing = missing_words(train.labels, self.kind)
        kind, inferred = self.kind, ""
        if kind is None:
            kind = infer_kind([label for label in train.labels if not is_missing(label, missing)], train.source)
            others = "--kind labels or number" if kind == "classes" else "--kind classes"
            inferred = f", inferred ({others} for something else)"
        if kind == "labels":
            check_lists(train.labels, train.source)
        train = self._parsed(train, kind, missing)
        train, dev = split_off_dev(train) if dev is None else (train, self._parsed(dev, kind, missing))
        space = LabelSpace.of(kind, train.labels, train.source, bool(inferred))
        notes = [f"{self.label}: {space}{inferred}", *notes_on(train, dev, space, self.dev is None)]
        return train, dev, space, [printable(note) for note in notes]

    def _with_text(self, path: Path) -> "LabeledRows":
        rows = read_rows(path, self.text, self.label, not self.no_header, self.csv_quotes)
        header = None if self.no_header else (*self.text, self.label)
        is_header = [(*texts, label) == header for texts, label in zip(rows.texts, rows.labels, strict=True)]
        rows = rows.leave_out(is_header, "that repeat the names of the columns")
        rows = rows.without("text", rows.texts, MISSING_WORDS)
        texts = list(map(present_texts, rows.texts))
        return dataclasses.replace(rows, texts=texts, labels=with_lists(rows.labels, rows.source))

    def _parsed(self, rows: "LabeledRows", kind: str, missing: set[str]) -> "LabeledRows":
        """Return the rows with their labels parsed, without rows that lack one; those of kind ``labels`` may have none."""
        if kind != "labels":
            rows = rows.without("label", [(label,) for label in rows.labels], missing)
        labels, num_shortened = [], 0
        for line, value in zip(rows.ids, rows.labels, strict=True):
            try:
                labels.append(parse_label(value, kind, self.label_separator, missing))
                num_shortened += isinstance(value, list) and len(value) > len(labels[-1])
            except ValueError as error:
                raise UserError(f"{rows.source}, line {line}, column {printable(self.label)}: {error}") from error
        rows.counted += Counter({"rows have a list with labels that are missing or there twice": num_shortened})
        return dataclasses.replace(rows, labels=labels)


@dataclass
class LabeledRows:
    """Rows of a table."""

    source: str
    sha256: str = ""  # of the file
    ids: list[str] = field(default_factory=list)  # the line of each row, or its number from 1 where there are no lines
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)  # as they are in the file, or what parse_label() made of them
    counted: Counter[str] = field(default_factory=Counter)  # such as "rows without text are left out" -> how many
    broken_lines: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def choose(self, indices: Sequence[int]) -> "LabeledRows":
        """Return the rows of these indices, without what is counted of all rows."""
        lists = ([values[index] for index in indices] for values in (self.ids, self.texts, self.labels))
        return LabeledRows(self.source, self.sha256, *lists)

    def leave_out(self, is_left_out: Sequence[bool], what: str) -> "LabeledRows":
        """Return the other rows, and count those that are left out as ``what``."""
        rows = self.choose([index for index, is_out in enumerate(is_left_out) if not is_out])
        rows.counted = self.counted + Counter({f"rows {what} are left out": sum(is_left_out)})  # without zeros
        return rows

    def without(self, lacking: str, cells: Sequence[Sequence[Any]], missing: set[str]) -> "LabeledRows":
        """Leave out the rows whose ``cells`` are all missing (:func:`is_missing`), as rows without a text or a label."""
        lacks = [all(is_missing(cell, missing) for cell in row) for row in cells]
        if all(lacks):
            raise UserError(f"{self.source}: no row has a {lacking}: give another --{lacking}")
        left_out = itertools.compress(cells, lacks)
        words = missing & {cell.strip() for row in left_out for cell in row if isinstance(cell, str)}
        spelled = f" ({', '.join(sorted(words))})" if words else ""
        return self.leave_out(lacks, f"without {lacking}{spelled}")


def columns_of(table: TableFile, names: Sequence[str] = ()) -> str:
    """Return the names of these columns, or of all, for a message."""
    advice = " (or --no-header, if the first line is a row)" if table.header and table.kind in (TSV, CSV) else ""
    return f"{shorten(', '.join(names or table.columns), 300, placeholder=' ...')}{advice}"


def check_columns(table: TableFile, texts: Sequence[str], label: str | None) -> None:
    """Refuse a column that the table lacks, more than two columns of texts, and a column that is given twice."""
    for flag, names in (("--text", texts), ("--label", [] if label is None else [label])):
        for name in names:
            if name not in table.columns:
                raise UserError(f"{table.path} has no column {name!r}: give {flag} with one of {columns_of(table)}")
    if len(set(texts)) != len(texts) or len(texts) > 2 or label in texts:
        raise UserError("--text takes one column, or two different ones for pairs, and not that of the label")


def find_columns(table: TableFile, texts: Sequence[str] | None, label: str | None) -> tuple[tuple[str, ...], str]:
    """Return the columns that the user names, or else those with a usual name, or the only ones that remain."""
    texts = list(texts or ())
    check_columns(table, texts, label)
    names = table.columns

    def unclear(what: str, flag: str, candidates: Sequence[str]) -> UserError:
        return UserError(
            f"{table.path}: which column is the {what} is not clear: give {flag} of {columns_of(table, candidates)}"
        )

    if len(names) == 1:
        refuse_markup(table.path, table.first_lines)  # a download that failed gives a page
        separators = {TSV: ": tabs have to separate its columns", CSV: ": , or ; has to separate its columns"}
        problem = f"has the one column {names[0][:60]!r}, of texts or of labels"
        raise UserError(f"{table.path} {problem}{separators.get(table.kind, '')}")
    if label is None:
        label = next((name for name in LABEL_COLUMNS if name in names and name not in texts), None)
    if not texts:
        rest = [name for name in names if name != label]
        usual = next((columns for columns in TEXT_COLUMNS if set(columns) <= set(rest)), None)
        texts = usual or (rest if len(rest) == 1 and label is not None else [])
    if not texts:
        raise unclear("text", "--text with one or two", rest)
    if label is None:
        rest = [name for name in names if name not in texts]
        if len(rest) != 1:
            raise unclear("label", "--label with one (or, in JSON lines, a list of those that are 1)", rest)
        label = rest[0]
    return tuple(texts), label


def require_columns(table: TableFile, names: Sequence[str]) -> None:
    if missing := [name for name in names if name not in table.columns]:
        raise UserError(f"{table.path} has no column {missing[0]!r}: it has {shorten(', '.join(table.columns), 300)}")


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
    line does. The other arguments are those of :class:`~amos_fairseq.inputs.input_files.TableFile`.
    """
    table = TableFile(path, header, csv_quotes, on_read, all_keys=True)
    require_columns(table, [name for name in (*texts, label) if name is not None])
    rows = LabeledRows(path.name, broken_lines=table.broken_lines)
    id_column = next((name for name in id_columns if name in table.columns), None)
    quotes_are_ordinary = table.kind == TSV and not csv_quotes
    num_quoted = 0
    for line, values in table.rows([name for name in (*texts, label, id_column) if name is not None]):
        position = line - (2 if header else 1) if id_columns else line
        num_quoted += quotes_are_ordinary and any(value.startswith('"') for value in values.values())
        rows.ids.append(str(values[id_column] if id_column else position))
        rows.texts.append(texts_of(values, texts, f"{path}, line {line}"))
        rows.labels.append(values.get(label))
    rows.sha256 = joined_sha256(files_of(path))
    if table.broken_lines:
        others = f"rows with another number of columns{CSV_ADVICE if quotes_are_ordinary else ''} are left out"
        rows.counted[others] = len(table.broken_lines)
    if table.num_blank_lines:
        rows.counted["lines are blank and left out"] = table.num_blank_lines
    if num_quoted:
        rows.counted[BEGIN_WITH_A_QUOTE] = num_quoted
    return rows


def texts_of(values: Mapping[str, Any], columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the texts of the row ``where``, with spaces for line ends."""
    texts = []
    for name in columns:
        value = values.get(name)
        if isinstance(value, list | dict):
            raise UserError(f"{where}: {name} is a list or an object: give a column of texts with --text")
        text = "" if is_missing(value, ()) else str(value)
        if len(text) > MOST_CHARACTERS:
            raise UserError(
                f"{where}: {name} has {len(text):,} characters: cut it to {MOST_CHARACTERS:,} or fewer, because a "
                "model reads the first hundreds of tokens alone"
            )
        texts.append(" ".join(text.splitlines()))
    return tuple(texts)


def present_texts(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts of a row, "" for each that is missing."""
    return tuple("" if is_missing(text) else text for text in texts)


def split_off_dev(rows: LabeledRows) -> tuple[LabeledRows, LabeledRows]:
    """Return training and dev rows: a tenth, at random. Rows with equal texts are on the same side."""
    dev = held_out(rows.texts, rows.source, "texts")
    train = rows.choose(sorted(set(range(len(rows))).difference(dev)))
    return dataclasses.replace(train, counted=rows.counted), rows.choose(dev)


def notes_on(train: LabeledRows, dev: LabeledRows, space: LabelSpace, dev_is_chosen: bool) -> Iterator[str]:
    """Yield footnotes of the table: which rows are left out, texts that occur twice, and labels that cannot be learned."""
    for name, rows in (("training", train), ("dev", dev)):
        for what, count in rows.counted.items():
            yield f"{rows.source}: {count:,} {name} {what}"
        if half_empty := sum(not all(texts) for texts in rows.texts):
            yield f"{rows.source}: {half_empty:,} {name} pairs have one empty text"
    if dev_is_chosen:
        yield held_out_note(len(dev), len(train), "rows", dev.source)
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
    if num_without := train.labels.count([]):
        yield f"{train.source}: {num_without:,} training rows have no label"
    counts, alike = Counter(names_in(train, space.kind)), Counter(map(spelling, space.names))
    may_be_missing = [name for name in space.names if name in MISSING_BESIDE_NUMBERS]
    if may_be_missing:
        num_rows = sum(counts[name] for name in may_be_missing)
        rows_with_it = f"{num_rows:,} training rows have the label {listed(may_be_missing)}"
        yield f"{train.source}: {rows_with_it}, read as a name: remove them if the label is missing"
    if rare := [name for name in space.names if counts[name] == 1]:
        yield f"{train.source}: {len(rare):,} {space.kind} with one training row: {listed(rare)}"
    if variants := [name for name in space.names if alike[spelling(name)] > 1]:
        yield f"{train.source}: {len(variants):,} {space.kind} differ in their spelling alone: {listed(variants)}"
    if unknown := unknown_labels(dev, space):
        rows, counted = f"{len(unknown):,} dev rows with labels", "counted as wrong"
        if space.kind == "labels":
            rows, counted = f"{len(set(unknown)):,} dev labels", "not counted"
        yield f"{dev.source}: {rows} that no training row has are {counted}: {listed(unknown)}"


def spelling(name: str) -> str:
    """Return what is equal for names that differ in upper case, in spaces or in how their characters are encoded."""
    return "".join(unicodedata.normalize("NFKC", name).casefold().split())


def names_in(rows: LabeledRows, kind: str) -> list[str]:
    """Return the labels of all rows, one after the other; they are names."""
    return rows.labels if kind == "classes" else [name for names in rows.labels for name in names]


def unknown_labels(dev: LabeledRows, space: LabelSpace) -> list[str]:
    """Return the dev labels that no training row has; raise :class:`UserError` if there are no others."""
    known, names = set(space.names), names_in(dev, space.kind)
    unknown = [name for name in names if name not in known]
    if names and len(unknown) == len(names):
        raise UserError(
            f"{dev.source}: no training row has any of its labels ({listed(unknown)}; in training: {listed(space.names)}): "
            "give the dev set of the same task"
        )
    return unknown
