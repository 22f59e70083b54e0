"""Write rows of texts and labels as the input of the task ``text_classification``.

The files are those of :mod:`amos_fairseq.downstream.texts.dataset`.
"""

import argparse
import dataclasses
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.downstream.texts.scores import SCORES
from amos_fairseq.errors import printable
from amos_fairseq.files import DICTIONARY_FILE, TOKENIZER_DIRECTORY, write_lines
from amos_fairseq.inputs.rows import TASK_FILE, LabeledRows, LabelSpace, Tables
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import (
    BATCH_ROWS,
    END_ID,
    NUM_FAIRSEQ_SYMBOLS,
    UNKNOWN_ID,
    BinarizedFile,
    available_processors,
    describe_unknown,
    encode_rows,
    process_pool,
    start_encoding_process,
)
from amos_fairseq.text.prepared_data import description_of, prepared_data, say_first_example, write_manifest
from amos_fairseq.text.tokenization.tokenizer import BOS, EOS, Tokenizer

NAME = "classification"  # of the task of amos classify
TABLE_OPTIONS = tuple(field.name for field in dataclasses.fields(Tables))


def tables_of(arguments: argparse.Namespace) -> Tables:
    """Return the tables of ``amos classify``, whose columns are there."""
    options = {option: getattr(arguments, option) for option in TABLE_OPTIONS}
    return Tables(**{option: value for option, value in options.items() if value is not None}).check()


def write_task(
    directory: Path,
    name: str,
    space: LabelSpace,
    splits: Mapping[str, LabeledRows],
    tokenizer: Tokenizer,
    workers: int | None = None,
    with_ids: Collection[str] = (),
) -> dict[str, Any]:
    """Write the texts, the parsed labels (None in a test set) and the tokenizer of a task into the empty ``directory``, and
    return what ``task.json`` says of them. ``with_ids``: the splits of which ``SPLIT.ids`` has the names of the rows, one a
    line."""
    tokenizer_folder = directory / TOKENIZER_DIRECTORY
    tokenizer.save(tokenizer_folder)
    inputs = [directory / f"input{number}" for number in range(len(next(iter(splits.values())).texts[0]))]
    for path in inputs:
        path.mkdir()
        shutil.copyfile(tokenizer_folder / DICTIONARY_FILE, path / DICTIONARY_FILE)
    if "train" in splits:
        texts, label = splits["train"].texts[0], splits["train"].labels[0]
        say_first_example([BOS, *(piece for text in texts for piece in (*tokenizer.encode(text), EOS))], label)
    facts = {}
    num_rows, num_processes = sum(map(len, splits.values())), workers or available_processors()
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
        "scores": list(SCORES[space.kind]),
        "splits": facts,
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


def write_tables(directory: Path, tables: Tables, tokenizer: Tokenizer, description: Mapping[str, Any]) -> None:
    """Read the tables and write the prepared data of the task into the empty ``directory``."""
    splits, space, notes = tables.read()
    for note in notes:
        say(note, "classify")
    scored = [split for split in splits if split != "train"]
    record = write_task(directory, NAME, space, splits, tokenizer, with_ids=scored)
    for split in scored:
        lines = (json.dumps(texts, ensure_ascii=False) for texts in splits[split].texts)
        write_lines(directory / f"{split}.texts.jsonl", (f"{line}\n" for line in lines))
    for split, facts in record["splits"].items():
        say(f"{split}: {describe_unknown(facts)}", "classify")
    record |= {
        "text_columns": list(tables.text),
        "label_column": printable(tables.label_name),
        "header": not tables.no_header,
        "notes": notes,
    }
    write_manifest(directory / TASK_FILE, description | record)


def prepare_inside(out: Path, tables: Tables, tokenizer: Tokenizer) -> Path:
    """Return the data of the task in OUT; see :func:`~amos_fairseq.text.prepared_data.prepared_data`."""
    given = {"train": tables.train, "dev": tables.dev, "test": tables.test}
    files = {split: path for split, path in given.items() if path is not None}
    description = description_of(files, tokenizer, tables.settings)
    return prepared_data(out, NAME, description, lambda folder: write_tables(folder, tables, tokenizer, description))
