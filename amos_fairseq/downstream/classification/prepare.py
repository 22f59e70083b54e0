"""``amos classify``: convert a table of texts and labels to the input of the task ``text_classification``.

Read the tables -> decide what the labels are -> encode -> write ``task.json``, ``input0``, ``input1`` and ``label``
(:mod:`amos_fairseq.downstream.classification.dataset`).
"""

import dataclasses
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
from torch import nn

from amos_fairseq import strangers
from amos_fairseq.downstream.classification.dataset import KINDS
from amos_fairseq.downstream.classification.glue.tasks import TASK_FILE, TASKS
from amos_fairseq.downstream.classification.rows import (
    Columns,
    LabeledRows,
    find_columns,
    is_missing,
    open_table,
    printable,
    read_rows,
)
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text
from amos_fairseq.fingerprint import DICTIONARY_FILE, TOKENIZER_DIRECTORY, files_sha256
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.binarizing import (
    END_ID,
    NUM_FAIRSEQ_SYMBOLS,
    UNKNOWN_ID,
    BinarizedFile,
    encode_rows,
    start_encoding_process,
)
from amos_fairseq.text.inside_out import prepared_data
from amos_fairseq.text.processes import number_of_processes, process_pool
from amos_fairseq.text.tokenization import Tokenizer

TASK = "classification"
USED_BY = ("runs/classification", "runs/classification-random")  # folders in OUT with results of the data
# Whole numbers with more different values than this are numbers, not classes.
MOST_NUMBERED_CLASSES = 20
MOST_CLASSES = 10_000
# Of labels that are numbers: the largest, and their mean over their deviation. Models compute them in float32.
LARGEST_NUMBER, LARGEST_RATIO = 1e30, 1e5
DEV_SHARE, SPLIT_SEED = 0.1, 1
# Folders of runs of other benchmarks, and words of the command line.
RESERVED_NAMES = {TASK, f"{TASK}-random", "multi", "tagging", "all", *map(str.lower, TASKS)}
OWN_TASK_OPTIONS = ("train", "dev", "text", "label", "kind", "label_separator", "no_header")  # of amos classify
_SHOWN = 100  # characters of a list of labels in a message


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


def names_of(value: Any, separator: str) -> list[str]:
    """Return the names of the labels of a row, each once."""
    parts = value if isinstance(value, list | tuple) else [] if is_missing(value) else str(value).split(separator)
    return list(dict.fromkeys(filter(None, map(name_of, parts))))


def parse_labels(rows: LabeledRows, kind: str, separator: str) -> list[Any]:
    """Return the labels of all rows: names, lists of names, or floats.

    Raises:
        UserError: a label is not of this kind.
    """
    parsed: list[Any] = []
    for line, value in zip(rows.lines, rows.labels, strict=True):
        where = f"{rows.source}, line {line}"
        if kind == "number":
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number) or isinstance(value, bool):
                raise UserError(
                    f"{where}: the label {str(value)[:60]!r} is not a finite number: correct it, or give --kind"
                )
            parsed.append(number)
            continue
        if kind == "classes" and isinstance(value, list | tuple):
            raise UserError(f"{where}: the label is a list: give --kind labels")
        names = [name_of(value)] if kind == "classes" else names_of(value, separator)
        for name in names:
            if not name.isprintable():
                raise UserError(
                    f"{where}: the label {name[:60]!r} has a tab, a line end or another character that cannot be printed: is "
                    "it the column of the labels?"
                )
        parsed.append(names[0] if kind == "classes" else names)
    return parsed


def sorted_names(names: set[str]) -> list[str]:
    """Sort names; by value if all are numbers."""
    try:
        return sorted(names, key=lambda name: (float(name), name))
    except ValueError:
        return sorted(names)


def split_off_dev(rows: LabeledRows) -> tuple[LabeledRows, LabeledRows]:
    """Return training and dev rows: a tenth, at random. Rows with equal texts are on the same side.

    Raises:
        UserError: there are too few different texts.
    """
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
    chosen = set(dev)
    train = rows.choose([index for index in range(len(rows)) if index not in chosen])
    return dataclasses.replace(train, left_out=rows.left_out), rows.choose(sorted(dev))


def notes_on(train: LabeledRows, dev: LabeledRows, dev_is_given: bool) -> Iterator[str]:
    """Yield footnotes of the table: which rows are left out, and texts that occur twice."""
    for name, rows in (("training", train), ("dev", dev)):
        for reason, count in rows.left_out.items():
            yield f"{rows.source}: {count:,} {name} rows {reason} are left out"
        if half_empty := sum(not all(map(str.strip, texts)) for texts in rows.texts):
            yield f"{rows.source}: {half_empty:,} {name} pairs have one empty text"
    if not dev_is_given:
        yield f"dev: {len(dev):,} rows of {dev.source}, chosen at random (seed {SPLIT_SEED}); {len(train):,} rows train"
    labels: dict[tuple[str, ...], set[str]] = {}
    for texts, label in zip(train.texts, train.labels, strict=True):
        labels.setdefault(texts, set()).add(str(label))
    if repeated := len(train) - len(labels):
        several = sum(len(own) > 1 for own in labels.values())
        with_others = f"; {several:,} texts have different labels" if several else ""
        yield f"{train.source}: {repeated:,} training rows repeat the text of an earlier row{with_others}"
    if seen := sum(texts in labels for texts in dev.texts):
        yield f"{dev.source}: {seen:,} of {len(dev):,} dev rows have a text that trains too: the scores may be too high"


@dataclass(frozen=True)
class LabelKind:
    """What the labels are.

    Attributes:
        kind: classes, labels or number.
        names: of the training set, in the order of the classes; empty for numbers.
        mean, deviation: of the numbers of the training set.
    """

    kind: str
    names: list[str]
    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, kind: str, labels: Sequence[Any], source: str, is_given: bool = True) -> "LabelKind":
        """Return the kind of the labels of the training set; raise :class:`UserError` if there is nothing to learn.

        ``is_given``: by the user. If it was inferred, very many classes are taken for a wrong column.
        """
        if kind == "number":
            if max(map(abs, labels)) > LARGEST_NUMBER:
                raise UserError(f"{source}: a label is larger than {LARGEST_NUMBER:g}: give it in a larger unit")
            mean, deviation = float(np.mean(labels)), float(np.std(labels))
            if deviation > 0 and abs(mean) > LARGEST_RATIO * deviation:
                raise UserError(
                    f"{source}: the labels of mean {mean:.6g} differ by {deviation:.2g}, which float32 does not tell apart: "
                    "subtract a constant from them"
                )
            if not deviation > 0:
                raise UserError(
                    f"{source}: each row has the label {labels[0]:g}: give the column of the labels as --label"
                )
            return cls(kind, [], mean, deviation)
        names = set(labels) if kind == "classes" else {name for own in labels for name in own}
        if len(names) < (2 if kind == "classes" else 1):
            only = f"each row has the label {labels[0]}" if kind == "classes" else "no row has a label"
            raise UserError(f"{source}: {only}: give the column of the labels as --label")
        if len(names) > MOST_CLASSES or (not is_given and kind == "classes" and len(names) > max(20, len(labels) // 2)):
            raise UserError(
                f"{source}: the {len(labels):,} labels have {len(names):,} different values: give the column of the labels as "
                "--label, or say with --kind what they are"
            )
        return cls(kind, sorted_names(names))

    def describe(self) -> str:
        if self.kind == "number":
            return f"numbers of mean {self.mean:.4g} and standard deviation {self.deviation:.4g}"
        shown = shorten(", ".join(self.names), _SHOWN, placeholder=" ...")
        return f"{len(self.names)} {self.kind} ({shown})"

    def unknown(self, labels: Sequence[Any]) -> Counter[str]:
        """Count the names among dev labels that the training set lacks."""
        if self.kind == "number":
            return Counter()
        known = set(self.names)
        rows = ([label] for label in labels) if self.kind == "classes" else labels
        return Counter(name for row in rows for name in row if name not in known)

    def write(self, directory: Path, split: str, labels: Sequence[Any]) -> None:
        """Write the labels of a split as :func:`~amos_fairseq.downstream.classification.dataset.read_targets` reads them."""
        directory.mkdir(exist_ok=True)
        if self.kind == "number":
            (directory / f"{split}.label").write_text("".join(f"{value!r}\n" for value in labels), encoding="utf-8")
            return
        ids = {name: index for index, name in enumerate(self.names, NUM_FAIRSEQ_SYMBOLS)}
        rows = [[label] for label in labels] if self.kind == "classes" else labels
        lines = [[*(ids.get(name, UNKNOWN_ID) for name in row), END_ID] for row in rows]
        with BinarizedFile(directory / split, NUM_FAIRSEQ_SYMBOLS + len(ids)) as file:
            file.add_lines(np.array([index for line in lines for index in line]), list(map(len, lines)))


@dataclass(frozen=True)
class ClassificationSource:
    """The tables to train and to score on, and how to read them.

    Attributes:
        dev: None to take a tenth of the rows of ``train``.
        kind: classes, labels or number; None to infer it from the labels of ``train``.
        separator: between the labels of a row that is no list.
        header: whether the first line names the columns; otherwise they are called 1, 2, ...
    """

    train: Path
    dev: Path | None
    columns: Columns
    kind: str | None = None
    separator: str = ","
    header: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the prepared data besides the files and the tokenizer, as plain values."""
        columns = {"texts": list(self.columns.texts), "label": self.columns.label, "header": self.header}
        return columns | {"kind": self.kind, "separator": self.separator if self.kind == "labels" else None}

    def write(self, directory: Path, tokenizer: Tokenizer, name: str = TASK) -> None:
        """Read the tables and write the prepared data of the task ``name`` into the empty ``directory``.

        Raises:
            UserError: a table or a label cannot be used.
        """
        train = read_rows(self.train, self.columns, self.header)
        dev = read_rows(self.dev, self.columns, self.header) if self.dev else None
        kind, inferred = self.kind, ""
        if kind is None:
            kind = infer_kind(train.labels)
            others = "--kind labels or number" if kind == "classes" else "--kind classes"
            inferred = f", inferred ({others} for something else)"
        train = self._parsed(train, kind)
        train, dev = split_off_dev(train) if dev is None else (train, self._parsed(dev, kind))
        label_kind = LabelKind.of(kind, train.labels, train.source, is_given=self.kind is not None)
        notes = [
            f"{self.columns.label}: {label_kind.describe()}{inferred}",
            *notes_on(train, dev, self.dev is not None),
        ]
        if unknown := label_kind.unknown(dev.labels):
            names = shorten(", ".join(sorted_names(set(unknown))), _SHOWN, placeholder=" ...")
            counted = "counted as wrong" if kind == "classes" else "not counted"
            notes.append(
                f"{dev.source}: {sum(unknown.values()):,} labels that no training row has are {counted}: {names}"
            )
        notes = [printable(note) for note in notes]
        for note in notes:
            say(note, "classify")
        splits = {"train": train, "valid": dev}
        facts = self._write_texts(directory, tokenizer, splits)
        for split, rows in splits.items():
            label_kind.write(directory / "label", split, rows.labels)
        (directory / "valid.ids").write_text("".join(f"{line}\n" for line in dev.lines), encoding="utf-8")
        record = {
            "task": name,
            "kind": kind,
            "num_classes": max(1, len(label_kind.names)),
            "labels": label_kind.names,
            "text_columns": list(self.columns.texts),
            "label_column": printable(self.columns.label),
            "header": self.header,
            "notes": notes,
            "tokenizer_sha256": tokenizer.sha256,
            "splits": facts,
            "sha256": files_sha256(directory),
        }
        if kind == "number":
            record |= {"mean": label_kind.mean, "deviation": label_kind.deviation}
        (directory / TASK_FILE).write_text(json_text(record), encoding="utf-8")

    def _parsed(self, rows: LabeledRows, kind: str) -> LabeledRows:
        """Return the rows with their labels parsed. Without a label is no row, unless a row can have none of several."""
        rows = rows if kind == "labels" else rows.with_labels()
        if not rows:
            raise UserError(
                f"{rows.source}: no row has a label in {self.columns.label}: give another column with --label"
            )
        return dataclasses.replace(rows, labels=parse_labels(rows, kind, self.separator))

    def _write_texts(
        self, directory: Path, tokenizer: Tokenizer, splits: Mapping[str, LabeledRows]
    ) -> dict[str, dict[str, Any]]:
        tokenizer.save(directory / TOKENIZER_DIRECTORY)
        inputs = [directory / f"input{number}" for number in range(len(self.columns.texts))]
        for path in inputs:
            path.mkdir()
            shutil.copyfile(directory / TOKENIZER_DIRECTORY / DICTIONARY_FILE, path / DICTIONARY_FILE)
        facts = {}
        with (
            process_pool(
                number_of_processes(None), start_encoding_process, directory / TOKENIZER_DIRECTORY
            ) as in_order,
            progress_bar(sum(map(len, splits.values())), "encode", "row", delay=2) as bar,
        ):
            for split, rows in splits.items():
                counts = encode_rows(rows.texts, [path / split for path in inputs], tokenizer, in_order, bar.update)
                facts[split] = {"source": printable(rows.source), "sha256": rows.sha256, "rows": len(rows), **counts}
        return facts


def prepare_inside(out: Path, source: ClassificationSource, tokenizer: Tokenizer, name: str = TASK) -> Path:
    """Return the data of ``source`` prepared in OUT; see :func:`~amos_fairseq.text.inside_out.prepared_data`.

    ``name``: of the task, one of several in OUT; by default that of ``amos classify``.
    """
    files = {"train": source.train} | ({} if source.dev is None else {"dev": source.dev})
    kind, used_by = (TASK, USED_BY) if name == TASK else (f"own/{name}", [f"runs/{name}", "runs/multi"])

    def write(directory: Path) -> None:
        source.write(directory, tokenizer, name)

    return prepared_data(out, kind, files, tokenizer, source.settings, write, used_by)


def read_own_tasks(file: Path) -> dict[str, ClassificationSource]:
    """Read the tasks of ``amos glue --own-tasks``: a YAML of names and the options of ``amos classify`` for each.

    ::

        reviews: {train: reviews.tsv, dev: dev.tsv, text: [text], label: stars, kind: number}

    Paths are relative to the YAML; everything but ``train`` may be left out, as for the command.

    Raises:
        UserError: the file, a name, an option or a table cannot be used.
    """
    hint = "give names and the options of amos classify, such as 'reviews: {train: reviews.tsv, label: stars}'"
    content = strangers.read_yaml(file, hint)
    if not isinstance(content, dict) or not content:
        raise UserError(f"{file} has no tasks: {hint}")
    sources = {}
    for name, options in content.items():
        where = f"{file}, {str(name)[:40]!r}"
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,40}", name):
            raise UserError(f"{where}: a task has a name of letters, digits, - and _, with a letter at the beginning")
        if name.lower() in RESERVED_NAMES or hasattr(nn.ModuleDict, name) or hasattr(nn.ModuleDict(), name):
            raise UserError(f"{where} has a name that is taken: give another one")
        if not isinstance(options, dict) or "train" not in options or set(options) - set(OWN_TASK_OPTIONS):
            raise UserError(f"{where} needs train, and may only have {', '.join(OWN_TASK_OPTIONS)}")
        sources[name] = _own_source(file.parent, where, options)
    return sources


def _own_source(folder: Path, where: str, given: dict[str, Any]) -> ClassificationSource:
    """Return the source that the options of a task describe; raise :class:`UserError` for values that cannot be used."""
    header = given.get("no_header", False) is False
    texts, label = given.get("text"), given.get("label")
    texts = texts if isinstance(texts, list) or texts is None else [texts]
    columns = [*(texts or []), *([] if label is None else [label])]
    if not header:  # columns are numbers
        columns = [str(column) if type(column) is int else column for column in columns]
        texts, label = (columns[: len(texts)] if texts else None), (columns[-1] if label is not None else None)
    others = [given["train"], given.get("dev", ""), given.get("label_separator", ",")]
    if (
        not all(isinstance(value, str) for value in (*columns, *others))
        or type(given.get("no_header", False)) is not bool
    ):
        raise UserError(f"{where}: files, columns and label_separator are texts, no_header is true or false")
    if given.get("kind") not in (None, *KINDS):
        raise UserError(f"{where}: kind is one of {', '.join(KINDS)}")
    train, dev = folder / given["train"], folder / given["dev"] if "dev" in given else None
    for path in (train, *([] if dev is None else [dev])):
        if not path.exists():
            raise UserError(f"{where}: {path}: no such file")
    separator = check_separator(given.get("label_separator", ","))
    found = find_columns(open_table(train, header), texts, label)
    return ClassificationSource(train, dev, found, given.get("kind"), separator, header)


def check_separator(separator: str) -> str:
    """Return the text between labels; raise :class:`UserError` if it is empty."""
    if not separator:
        raise UserError("the separator of labels is empty: give the text between two labels, such as ','")
    return separator
