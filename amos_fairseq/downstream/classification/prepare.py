"""Write a table of texts and labels as the input of the task ``text_classification``, for ``amos classify`` and for GLUE.

Read the tables -> decide what the labels are -> encode -> write ``task.json``, ``input0``, ``input1`` and ``label``
(:mod:`amos_fairseq.downstream.classification.dataset`).
"""

import dataclasses
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from amos_fairseq import strangers
from amos_fairseq.downstream.classification.glue.tasks import TASK_FILE, TASKS
from amos_fairseq.downstream.classification.rows import (
    KINDS,
    SHOWN_CHARACTERS,
    Columns,
    LabeledRows,
    LabelKind,
    find_columns,
    infer_kind,
    parse_labels,
    printable,
    read_rows,
    sorted_names,
)
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text
from amos_fairseq.fingerprint import DICTIONARY_FILE, TOKENIZER_DIRECTORY, files_sha256
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import (
    END_ID,
    NUM_FAIRSEQ_SYMBOLS,
    UNKNOWN_ID,
    BinarizedFile,
    encode_rows,
    start_encoding_process,
)
from amos_fairseq.text.prepared_data import prepared_data
from amos_fairseq.text.processes import number_of_processes, process_pool
from amos_fairseq.text.table_files import TableFile
from amos_fairseq.text.tokenization import Tokenizer

TASK = "classification"
USED_BY = ("runs/classification", "runs/classification-random")  # folders in OUT with results of the data
DEV_SHARE, SPLIT_SEED = 0.1, 1
# Folders of runs of other benchmarks, and words of the command line.
RESERVED_NAMES = {TASK, f"{TASK}-random", "multi", "tagging", "all", *map(str.lower, TASKS)}
# Of amos classify: arguments of open_source, also in the YAML of amos glue --own-tasks.
SOURCE_OPTIONS = ("train", "dev", "text", "label", "kind", "label_separator", "no_header", "csv_quotes")


def write_task(
    directory: Path,
    name: str,
    kind: LabelKind,
    splits: Mapping[str, LabeledRows],
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    workers: int | None = None,
    with_ids: Collection[str] = (),
) -> dict[str, Any]:
    """Write the texts and labels of a task into ``directory``, and return the content of ``task.json``.

    Args:
        splits: their labels are parsed (:func:`~amos_fairseq.downstream.classification.rows.parse_labels`), or None in a test
            set.
        tokenizer_folder: where ``tokenizer`` is saved.
        with_ids: the splits of which ``SPLIT.ids`` has the names of the rows, one a line.
    """
    inputs = [directory / f"input{number}" for number in range(len(next(iter(splits.values())).texts[0]))]
    for path in inputs:
        path.mkdir()
        shutil.copyfile(tokenizer_folder / DICTIONARY_FILE, path / DICTIONARY_FILE)
    facts = {}
    with (
        process_pool(number_of_processes(workers), start_encoding_process, tokenizer_folder) as in_order,
        progress_bar(sum(map(len, splits.values())), f"{name}: encode", "row", delay=2) as bar,
    ):
        for split, rows in splits.items():
            counts = encode_rows(rows.texts, [path / split for path in inputs], tokenizer, in_order, bar.update)
            facts[split] = {"source": printable(rows.source), "sha256": rows.sha256, "rows": len(rows), **counts}
    write_labels(directory / "label", kind, {split: rows.labels for split, rows in splits.items()})
    for split in with_ids:
        (directory / f"{split}.ids").write_text("".join(f"{row}\n" for row in splits[split].ids), encoding="utf-8")
    record = {
        "task": name,
        "kind": kind.kind,
        "num_classes": max(1, len(kind.names)),
        "labels": list(kind.names),
        "tokenizer_sha256": tokenizer.sha256,
        "splits": facts,
        "sha256": files_sha256(directory),
    }
    return record if kind.deviation is None else record | {"mean": kind.mean, "deviation": kind.deviation}


def write_labels(directory: Path, kind: LabelKind, labels: Mapping[str, Sequence[Any]]) -> None:
    """Write the labels of each split as fairseq's ``sentence_prediction`` reads them: a line of ids, whose names are in
    ``dict.txt`` in the order of the classes, ended by ``</s>``; numbers as text."""
    directory.mkdir()
    if kind.kind != "number":
        names = "".join(f"{name} 1\n" for name in kind.names)
        (directory / DICTIONARY_FILE).write_text(names, encoding="utf-8")
    ids = {name: index for index, name in enumerate(kind.names, NUM_FAIRSEQ_SYMBOLS)}
    for split, values in labels.items():
        if values[0] is None:  # a test set
            continue
        if kind.kind == "number":
            (directory / f"{split}.label").write_text("".join(f"{value!r}\n" for value in values), encoding="utf-8")
            continue
        rows = [[value] for value in values] if kind.kind == "classes" else values
        lines = [[*(ids.get(name, UNKNOWN_ID) for name in row), END_ID] for row in rows]
        with BinarizedFile(directory / split, NUM_FAIRSEQ_SYMBOLS + len(ids)) as file:
            file.add_lines(np.array([index for line in lines for index in line]), list(map(len, lines)))


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
        several = sum(len(names) > 1 for names in labels.values())
        with_others = f"; {several:,} texts have different labels" if several else ""
        yield f"{train.source}: {repeated:,} training rows repeat the text of an earlier row{with_others}"
    if seen := sum(texts in labels for texts in dev.texts):
        yield f"{dev.source}: {seen:,} of {len(dev):,} dev rows have a text that trains too: the scores may be too high"


@dataclass(frozen=True)
class ClassificationSource:
    """The tables to train and to score on, and how to read them.

    Attributes:
        dev: None to take a tenth of the rows of ``train``.
        kind: classes, labels or number; None to infer it from the labels of ``train``.
        separator: between the labels of a row that is no list.
        header, csv_quotes: see :class:`~amos_fairseq.text.table_files.TableFile`.
    """

    train: Path
    dev: Path | None
    columns: Columns
    kind: str | None = None
    separator: str = ","
    header: bool = True
    csv_quotes: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What determines the prepared data besides the files and the tokenizer, as plain values."""
        columns = {"texts": list(self.columns.texts), "label": self.columns.label, "header": self.header}
        if self.csv_quotes:
            columns["csv_quotes"] = True
        return columns | {"kind": self.kind, "separator": self.separator if self.kind == "labels" else None}

    def write(self, directory: Path, tokenizer: Tokenizer, name: str = TASK) -> None:
        """Read the tables and write the prepared data of the task ``name`` into the empty ``directory``."""
        train = read_rows(self.train, self.columns, self.header, self.csv_quotes)
        dev = read_rows(self.dev, self.columns, self.header, self.csv_quotes) if self.dev else None
        kind_name, inferred = self.kind, ""
        if kind_name is None:
            kind_name = infer_kind(train.labels)
            others = "--kind labels or number" if kind_name == "classes" else "--kind classes"
            inferred = f", inferred ({others} for something else)"
        train = self._parsed(train, kind_name)
        train, dev = split_off_dev(train) if dev is None else (train, self._parsed(dev, kind_name))
        kind = LabelKind.of(kind_name, train.labels, train.source, is_given=self.kind is not None)
        notes = [f"{self.columns.label}: {kind}{inferred}", *notes_on(train, dev, self.dev is not None)]
        if unknown := kind.unknown(dev.labels):
            names = shorten(", ".join(sorted_names(set(unknown))), SHOWN_CHARACTERS, placeholder=" ...")
            counted = "counted as wrong" if kind_name == "classes" else "not counted"
            notes.append(
                f"{dev.source}: {sum(unknown.values()):,} labels that no training row has are {counted}: {names}"
            )
        notes = [printable(note) for note in notes]
        for note in notes:
            say(note, "classify")
        tokenizer_folder = directory / TOKENIZER_DIRECTORY
        tokenizer.save(tokenizer_folder)
        splits = {"train": train, "valid": dev}
        record = write_task(directory, name, kind, splits, tokenizer, tokenizer_folder, with_ids=["valid"])
        record |= {
            "text_columns": list(self.columns.texts),
            "label_column": printable(self.columns.label),
            "header": self.header,
            "notes": notes,
        }
        (directory / TASK_FILE).write_text(json_text(record), encoding="utf-8")

    def _parsed(self, rows: LabeledRows, kind: str) -> LabeledRows:
        """Return the rows with their labels parsed. Without a label is no row, unless a row can have none of several."""
        rows = rows if kind == "labels" else rows.with_labels()
        if not rows:
            raise UserError(f"{rows.source}: no row has a label in {self.columns.label}: give another --label")
        return dataclasses.replace(rows, labels=parse_labels(rows, kind, self.separator))


def prepare_inside(out: Path, source: ClassificationSource, tokenizer: Tokenizer, name: str = TASK) -> Path:
    """Return the data of ``source`` prepared in OUT; see :func:`~amos_fairseq.text.prepared_data.prepared_data`.

    ``name``: of the task, one of several in OUT; by default that of ``amos classify``.
    """
    files = {"train": source.train} | ({} if source.dev is None else {"dev": source.dev})
    folder, used_by = (TASK, USED_BY) if name == TASK else (f"own/{name}", [f"runs/{name}", "runs/multi"])

    def write(directory: Path) -> None:
        source.write(directory, tokenizer, name)

    return prepared_data(out, folder, files, tokenizer, source.settings, write, used_by)


def read_own_tasks(file: Path) -> dict[str, ClassificationSource]:
    """Read the tasks of ``amos glue --own-tasks``: a YAML of names and the options of ``amos classify`` for each.

    ::

        reviews: {train: reviews.tsv, dev: dev.tsv, text: [text], label: stars, kind: number}

    Paths are relative to the YAML; everything but ``train`` may be left out, as for the command.
    """
    from torch import nn  # amos prepare glue, which is in this file too, answers mistakes without PyTorch

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
        if not isinstance(options, dict) or not options.get("train") or set(options) - set(SOURCE_OPTIONS):
            raise UserError(f"{where} needs train, and may only have {', '.join(SOURCE_OPTIONS)}")
        sources[name] = _own_source(file.parent, where, options)
    return sources


def _own_source(folder: Path, where: str, options: dict[str, Any]) -> ClassificationSource:
    """Return the source that the options of a task describe; columns of a file without a header are called 1, 2, ..."""
    options = {name: value for name, value in options.items() if value is not None}
    switches = {name: options.pop(name, False) for name in ("no_header", "csv_quotes")}
    texts = options.pop("text", None)
    texts = texts if isinstance(texts, list) or texts is None else [texts]
    are_names = all(isinstance(name, str) or type(name) is int for name in [*options.values(), *(texts or [])])
    if not are_names or not all(isinstance(switch, bool) for switch in switches.values()):
        raise UserError(f"{where}: no_header and csv_quotes are true or false, the other options are texts")
    options = {name: str(value) for name, value in options.items()}
    for name in {"train", "dev"} & options.keys():
        options[name] = folder / options[name]
        if not options[name].exists():
            raise UserError(f"{where}: {options[name]}: no such file")
    if options.get("kind") not in (None, *KINDS):
        raise UserError(f"{where}: kind is one of {', '.join(KINDS)}")
    return open_source(**options, **switches, text=None if texts is None else list(map(str, texts)))


def open_source(
    train: Path,
    dev: Path | None = None,
    text: Sequence[str] | None = None,
    label: str | None = None,
    kind: str | None = None,
    label_separator: str = ",",
    no_header: bool = False,
    csv_quotes: bool = False,
) -> ClassificationSource:
    """Return how to read the tables, after the columns that the user does not name are found in ``train``."""
    if not label_separator:
        raise UserError("the separator of labels is empty: give the text between two labels, such as ','")
    columns = find_columns(TableFile(train, not no_header, csv_quotes), text, label)
    return ClassificationSource(train, dev, columns, kind, label_separator, not no_header, csv_quotes)
