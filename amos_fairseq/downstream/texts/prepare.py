"""Write rows of texts and labels as the input of the task ``text_classification``, for ``amos classify`` and for GLUE.

The files are those of :mod:`amos_fairseq.downstream.texts.dataset`.
"""

import argparse
import dataclasses
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq import strangers
from amos_fairseq.downstream.labeled_task import TASK_FILE
from amos_fairseq.downstream.texts.glue.tasks import TASKS
from amos_fairseq.errors import UserError, printable
from amos_fairseq.files import DICTIONARY_FILE, TOKENIZER_DIRECTORY, files_sha256, json_text
from amos_fairseq.inputs.labels import KINDS, LabelSpace
from amos_fairseq.inputs.rows import LabeledRows, Tables
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import (
    BATCH_ROWS,
    END_ID,
    NUM_FAIRSEQ_SYMBOLS,
    UNKNOWN_ID,
    BinarizedFile,
    describe_loss,
    encode_rows,
    number_of_processes,
    process_pool,
    start_encoding_process,
)
from amos_fairseq.text.prepared_data import prepared_data
from amos_fairseq.text.tokenization.tokenizer import Tokenizer

NAME = "classification"  # of the task of amos classify
# Names of other benchmarks (those of amos tag begin with tagging-), of scores, and words of the command line.
RESERVED_NAMES = {NAME, f"{NAME}-random", "multi", "parsing", "tagging", "squad", "all", "average", "avg"}
RESERVED_NAMES |= set(map(str.lower, TASKS))
# Options of amos classify that are also those of a task in the YAML of amos glue --own-tasks.
TABLE_OPTIONS = tuple(field.name for field in dataclasses.fields(Tables))


def tables_of(arguments: argparse.Namespace) -> Tables:
    """Return the tables of ``amos classify``, whose columns are there."""
    return Tables(**{option: getattr(arguments, option) for option in TABLE_OPTIONS}).with_columns()


def write_task(
    directory: Path,
    name: str,
    space: LabelSpace,
    splits: Mapping[str, LabeledRows],
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    workers: int | None = None,
    with_ids: Collection[str] = (),
) -> dict[str, Any]:
    """Write the texts and the parsed labels (None in a test set) of a task into ``directory``, and return the content of
    ``task.json``. ``with_ids``: the splits of which ``SPLIT.ids`` has the names of the rows, one a line."""
    inputs = [directory / f"input{number}" for number in range(len(next(iter(splits.values())).texts[0]))]
    for path in inputs:
        path.mkdir()
        shutil.copyfile(tokenizer_folder / DICTIONARY_FILE, path / DICTIONARY_FILE)
    facts = {}
    num_rows, num_processes = sum(map(len, splits.values())), number_of_processes(workers)
    if num_rows <= BATCH_ROWS:  # too few to start processes for them
        num_processes = 1
    with (
        process_pool(num_processes, start_encoding_process, tokenizer_folder) as map_in_order,
        progress_bar(num_rows, f"{name}: encode", "row", delay=2) as bar,
    ):
        for split, rows in splits.items():
            counts = encode_rows(rows.texts, [path / split for path in inputs], tokenizer, map_in_order, bar.update)
            facts[split] = {"source": printable(rows.source), "sha256": rows.sha256, "rows": len(rows), **counts}
    write_labels(directory / "label", space, {split: rows.labels for split, rows in splits.items()})
    for split in with_ids:
        (directory / f"{split}.ids").write_text("".join(f"{row}\n" for row in splits[split].ids), encoding="utf-8")
    record = {
        "task": name,
        "kind": space.kind,
        "num_classes": max(1, len(space.names)),
        "labels": list(space.names),
        "tokenizer_sha256": tokenizer.sha256,
        "splits": facts,
        "sha256": files_sha256(directory),
    }
    return record if space.deviation is None else record | {"mean": space.mean, "deviation": space.deviation}


def write_labels(directory: Path, space: LabelSpace, labels: Mapping[str, Sequence[Any]]) -> None:
    """Write the labels of each split as fairseq's ``sentence_prediction`` reads them: a line of ids, whose names are in
    ``dict.txt`` in the order of the classes, ended by ``</s>``; numbers as text."""
    directory.mkdir()
    if space.kind != "number":
        names = "".join(f"{name} 1\n" for name in space.names)
        (directory / DICTIONARY_FILE).write_text(names, encoding="utf-8")
    ids = {name: index for index, name in enumerate(space.names, NUM_FAIRSEQ_SYMBOLS)}
    for split, values in labels.items():
        if values[0] is None:  # a test set
            continue
        if space.kind == "number":
            (directory / f"{split}.label").write_text("".join(f"{value!r}\n" for value in values), encoding="utf-8")
            continue
        rows = [[value] for value in values] if space.kind == "classes" else values
        lines = [[*(ids.get(name, UNKNOWN_ID) for name in row), END_ID] for row in rows]
        with BinarizedFile(directory / split, NUM_FAIRSEQ_SYMBOLS + len(ids)) as file:
            file.add_lines(np.array([index for line in lines for index in line]), list(map(len, lines)))


def write_tables(directory: Path, tables: Tables, tokenizer: Tokenizer, name: str = NAME) -> None:
    """Read the tables and write the prepared data of the task ``name`` into the empty ``directory``."""
    train, dev, space, notes = tables.read()
    for note in notes:
        say(note, "classify")
    tokenizer_folder, splits = directory / TOKENIZER_DIRECTORY, {"train": train, "valid": dev}
    tokenizer.save(tokenizer_folder)
    record = write_task(directory, name, space, splits, tokenizer, tokenizer_folder, with_ids=["valid"])
    for split, facts in record["splits"].items():
        say(f"{split}: {describe_loss(facts)}", "classify")
    record |= {
        "text_columns": list(tables.text),
        "label_column": printable(tables.label),
        "header": not tables.no_header,
        "csv_quotes": tables.csv_quotes,
        "notes": notes,
    }
    (directory / TASK_FILE).write_text(json_text(record), encoding="utf-8")


def prepare_inside(out: Path, tables: Tables, tokenizer: Tokenizer, name: str = NAME) -> Path:
    """Return the data of ``tables`` prepared in OUT; see :func:`~amos_fairseq.text.prepared_data.prepared_data`.

    ``name``: of the task, one of several in OUT; by default that of ``amos classify``.
    """
    files = {"train": tables.train} | ({} if tables.dev is None else {"dev": tables.dev})
    folder, used_by = (NAME, [NAME, f"{NAME}-random"]) if name == NAME else (f"own/{name}", [name, "multi"])

    def write(directory: Path) -> None:
        write_tables(directory, tables, tokenizer, name)

    return prepared_data(out, folder, files, tokenizer, tables.settings, write, [f"runs/{task}" for task in used_by])


def read_own_tasks(file: Path) -> dict[str, Tables]:
    """Read the tasks of ``amos glue --own-tasks``: a YAML of names and the options of ``amos classify`` for each.

    ::

        reviews: {train: reviews.tsv, dev: dev.tsv, text: [text], label: stars, kind: number}

    Paths are relative to the YAML; everything but ``train`` may be left out, as for the command.
    """
    from torch import nn  # here: amos prepare glue imports this file, and reports mistakes without PyTorch

    hint = "give names and the options of amos classify, such as 'reviews: {train: reviews.tsv, label: stars}'"
    content = strangers.read_yaml(file, hint)
    if not isinstance(content, dict) or not content:
        raise UserError(f"{file} has no tasks: {hint}")
    tasks = {}
    for name, options in content.items():
        where = f"{file}, {str(name)[:40]!r}"
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,40}", name):
            raise UserError(f"{where}: a task has a name of letters, digits, - and _, with a letter at the beginning")
        is_reserved = name.lower() in RESERVED_NAMES or name.lower().startswith("tagging-")
        if is_reserved or hasattr(nn.ModuleDict(), name):  # a task is a key of the heads
            raise UserError(f"{where} has a name that is taken: give another one")
        if not isinstance(options, dict) or not options.get("train") or set(options) - set(TABLE_OPTIONS):
            raise UserError(f"{where} needs train, and may only have {', '.join(TABLE_OPTIONS)}")
        tasks[name] = _own_tables(file.parent, where, options).with_columns()
    return tasks


def _own_tables(folder: Path, where: str, options: dict[str, Any]) -> Tables:
    """Return the tables that the options of a task describe; columns of a file without a header are called 1, 2, ..."""
    plain: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        is_switch = name in ("no_header", "csv_quotes")
        values = value if name == "text" and isinstance(value, list) else [value]
        if not all(type(each) in ((bool,) if is_switch else (str, int)) for each in values):
            raise UserError(f"{where}: no_header and csv_quotes are true or false, the other options are texts")
        if name == "text":
            plain[name] = list(map(str, values))
        else:
            plain[name] = value if is_switch else str(value)
    for name in {"train", "dev"} & plain.keys():
        plain[name] = folder / plain[name]
        if not plain[name].exists():
            raise UserError(f"{where}: {plain[name]}: no such file")
    if plain.get("kind") not in (None, *KINDS):
        raise UserError(f"{where}: kind is one of {', '.join(KINDS)}")
    return Tables(**plain)
