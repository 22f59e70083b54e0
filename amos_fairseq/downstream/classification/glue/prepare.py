"""``amos prepare glue``: convert GLUE's files to the input of ``text_classification`` and fairseq's ``sentence_prediction``.

For each task: read the tables -> encode -> publish.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from amos_fairseq import strangers
from amos_fairseq.downstream.classification.glue.tables import GlueRow, GlueTable, find_files, has_any_file, read_table
from amos_fairseq.downstream.classification.glue.tasks import TASK_FILE, TASKS, GlueTask, is_test, parse_tasks
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, write_text
from amos_fairseq.fingerprint import DICTIONARY_FILE, TOKENIZER_DIRECTORY, file_sha256, files_sha256
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.binarizing import (
    END_ID,
    NUM_FAIRSEQ_SYMBOLS,
    BinarizedFile,
    encode_rows,
    start_encoding_process,
)
from amos_fairseq.text.inside_out import prepared_data
from amos_fairseq.text.processes import InOrder, number_of_processes, process_pool
from amos_fairseq.text.tokenization import Tokenizer, load_tokenizer
from amos_fairseq.text.workspace import Sample, Workspace

_SHOWN_BROKEN_LINES = 5


class GlueWorkspace(Workspace):
    """``OUT``: ``tokenizer/`` and a folder for each task, which is either complete or absent."""

    def __init__(self, out: Path, tokenizer: Tokenizer) -> None:
        super().__init__(out)
        self._tokenizer = tokenizer
        self.tokenizer = self.root / TOKENIZER_DIRECTORY  # a copy for the duration of the run

    def check_out(self) -> None:
        _refuse_comma(self.out)
        super().check_out()
        if (self.out / TOKENIZER_DIRECTORY).is_dir():
            if load_tokenizer(self.out / TOKENIZER_DIRECTORY).sha256 != self._tokenizer.sha256:
                raise UserError(f"{self.out} was made with another tokenizer: give another OUT, or remove it")
        elif self.out.exists() and {path.name for path in self.out.iterdir()} - {self.hidden}:
            raise UserError(
                f"OUT {self.out} is not empty and contains no GLUE data of amos prepare: give another directory"
            )

    def open(self) -> None:
        """Remove what a killed run left."""
        for path in self.root.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        try:
            self._tokenizer.save(self.tokenizer)
        except BaseException:
            self.discard()
            raise

    def read_record(self, task: str) -> dict[str, Any] | None:
        """Return ``task.json`` of a finished task, or None.

        Raises:
            UserError: the directory was not written by this command and must not be replaced.
        """
        directory = self.out / task
        if not directory.exists():
            return None
        hint = f"{directory} was not written by amos prepare; give another OUT, or remove it"
        record = strangers.read_json(directory / TASK_FILE, hint)
        if record.get("task") == task:
            return record
        raise UserError(f"{directory / TASK_FILE} is not of {task}: {hint}")

    def publish(self, record: dict[str, Any]) -> None:
        """Replace an earlier version of a task by the finished one; the tokenizer is published before the first task."""
        unfinished = self.root / f"{record['task']}.unfinished"
        write_text(unfinished / TASK_FILE, json_text(record))
        if not (self.out / TOKENIZER_DIRECTORY).exists():
            copy = self.root / "tokenizer.copy"
            self._tokenizer.save(copy)
            copy.rename(self.out / TOKENIZER_DIRECTORY)
        target = self.out / record["task"]
        if target.exists():
            target.rename(self.root / f"{target.name}.replaced")
        unfinished.rename(target)


def run(given: argparse.Namespace) -> None:
    """Write the tasks' files in GLUE_DIR to OUT; finished tasks made from the same files are skipped.

    Raises:
        UserError: bad input; tasks that are finished stay, and nothing else.
    """
    # Check as much as possible before any work.
    files = _files_of_tasks(given.glue, given.tasks)
    if given.max_train_rows is not None and given.max_train_rows < 1:
        raise UserError(f"--max-train-rows {given.max_train_rows} must be at least 1")
    sample, tokenizer = Sample(given.max_train_rows, given.seed), load_tokenizer(given.tokenizer)
    workers = number_of_processes(given.workers)
    with (
        GlueWorkspace(given.out, tokenizer) as work,
        process_pool(workers, start_encoding_process, work.tokenizer) as in_order,
    ):
        for name, sources in files.items():
            if _is_finished(work, TASKS[name], sources, tokenizer, sample):
                say(f"{name} is finished already, with these files and settings: skipped")
            else:
                directory = work.unfinished(name)
                encoder = Encoder(tokenizer, work.tokenizer, in_order)
                work.publish(_prepare_task(directory, TASKS[name], sources, sample, encoder))
    command = f"fairseq-train {given.out}/TASK --user-dir amos_fairseq --task sentence_prediction ..."
    say(f"done: {command}; counts in TASK/task.json")


def prepare_glue_inside(out: Path, glue: Path, tasks: Sequence[str], tokenizer: Tokenizer) -> Path:
    """Return what ``amos prepare glue`` makes of the tasks' files in GLUE_DIR, inside of OUT of ``amos glue``.

    Tasks of earlier calls stay beside them.

    Raises:
        UserError: bad input; or see :func:`~amos_fairseq.text.inside_out.prepared_data`.
    """
    _refuse_comma(out)
    files = {name: find_files(glue, TASKS[name]) for name in tasks}  # first all: a missing one is reported at once
    of_all_tasks = [f"runs/{name}" for name in (*TASKS, "multi")]
    place = prepared_data(out, f"glue/{TOKENIZER_DIRECTORY}", {}, tokenizer, {}, tokenizer.save, of_all_tasks)
    for name, sources in files.items():

        def write(directory: Path, name: str = name, sources: dict[str, Path] = sources) -> None:
            with process_pool(number_of_processes(None), start_encoding_process, place) as in_order:
                encoder = Encoder(tokenizer, place, in_order)
                record = _prepare_task(directory, TASKS[name], sources, Sample(None, seed=1), encoder)
            write_text(directory / TASK_FILE, json_text(record))

        tests = list(filter(is_test, sources))
        prepared_data(
            out, f"glue/{name}", sources, tokenizer, {}, write, [f"runs/{name}", "runs/multi"], unscored=tests
        )
    return place.parent


def _refuse_comma(out: Path) -> None:
    if "," in str(out):
        raise UserError(f"OUT {out}: fairseq separates files by commas, choose a name without commas")


def _files_of_tasks(glue: Path, names: str) -> dict[str, dict[str, Path]]:
    """Return the files of the requested tasks by split. ``ALL`` omits, with a message, the tasks without any file."""
    tasks = [TASKS[name] for name in parse_tasks(names, TASKS, TASKS)]
    if not glue.is_dir():
        raise UserError(f"GLUE_DIR {glue} is not a directory: give the one that contains CoLA, SST-2, ...")
    missing: list[str] = []
    if len(tasks) == len(TASKS):
        missing = [task.name for task in tasks if not has_any_file(glue, task)]
        tasks = [task for task in tasks if task.name not in missing]
        if not tasks:
            raise UserError(f"GLUE_DIR {glue} contains no task: expected directories such as CoLA and SST-2")
    files = {task.name: find_files(glue, task) for task in tasks}
    if missing:
        say(f"not in {glue}, so not prepared: {', '.join(missing)}")
    return files


class Encoder(NamedTuple):
    """A tokenizer, the folder that it is saved in, and the processes that have loaded it."""

    tokenizer: Tokenizer
    directory: Path
    in_order: InOrder


def _prepare_task(
    directory: Path, task: GlueTask, sources: dict[str, Path], sample: Sample, encoder: Encoder
) -> dict[str, Any]:
    """Write everything of a task except ``task.json`` into an empty folder, and return the content of that file."""
    tables = _read(task, sources)
    splits = {split: _describe_source(task, split, sources[split], table) for split, table in tables.items()}
    if "train" in tables:
        rows = tables["train"].rows
        tables["train"].rows = [rows[index] for index in sample.choose(len(rows))]
    inputs = [directory / f"input{number}" for number in range(len(task.texts))]
    for path in inputs:
        path.mkdir()
        shutil.copyfile(encoder.directory / DICTIONARY_FILE, path / DICTIONARY_FILE)
    with progress_bar(sum(len(table.rows) for table in tables.values()), f"{task.name}: encode", "row", delay=2) as bar:
        for split, table in tables.items():
            prefixes = [path / split for path in inputs]
            counts = encode_rows(
                [row.texts for row in table.rows], prefixes, encoder.tokenizer, encoder.in_order, bar.update
            )
            splits[split].update(rows=len(table.rows), **counts)
    write_glue_labels(directory, task, {split: table.rows for split, table in tables.items()})
    for split, table in tables.items():
        if is_test(split):
            ids = "".join(f"{row.id}\n" for row in table.rows)
            (directory / f"{split}.ids").write_text(ids, encoding="utf-8")
    for split, described in splits.items():
        _report(f"{task.name} {split}", described)
    return {
        "task": task.name,
        "kind": kind_of(task),
        "num_classes": task.num_classes,
        "labels": list(task.labels),
        **sample.describe("max_train_rows"),
        "tokenizer_sha256": encoder.tokenizer.sha256,
        "splits": splits,
        "files": _sizes(directory),
        "sha256": files_sha256(directory),
    }


def _read(task: GlueTask, sources: dict[str, Path]) -> dict[str, GlueTable]:
    with progress_bar(sum(path.stat().st_size for path in sources.values()), f"{task.name}: read", "B", delay=2) as bar:
        return {split: read_table(path, task, split, bar.update) for split, path in sources.items()}


def _describe_source(task: GlueTask, split: str, path: Path, table: GlueTable) -> dict[str, Any]:
    return {
        "source": path.name,
        "sha256": table.sha256,
        "source_rows": len(table.rows),
        "official_rows": task.official_rows[split],
        "broken": len(table.broken_lines),
        "broken_lines": table.broken_lines,
    }


def _report(name: str, described: dict[str, Any]) -> None:
    rows, broken = described["rows"], described["broken_lines"]
    longer = ", ".join(f"{count:,} than {most}" for most, count in described["longer_than"].items() if count)
    of = f" of {described['source_rows']}" if rows < described["source_rows"] else ""
    say(
        f"{name}: {rows}{of} rows; longest {described['longest']} tokens"
        + (f" (longer: {longer}; a model of that length reads them cut)" if longer else "")
        + f"; {described['unknown_share']:.3%} unknown pieces"
    )
    if described["source_rows"] != described["official_rows"]:
        say(
            f"{name}: the official file has {described['official_rows']} rows, {described['source']} has "
            f"{described['source_rows']}: scores are not comparable with published ones"
        )
    if broken:
        shown = ", ".join(map(str, broken[:_SHOWN_BROKEN_LINES])) + (
            ", ..." if len(broken) > _SHOWN_BROKEN_LINES else ""
        )
        say(f"{name}: {len(broken)} broken lines of {described['source']} skipped (lines {shown})")


def _is_finished(
    work: GlueWorkspace, task: GlueTask, sources: dict[str, Path], tokenizer: Tokenizer, sample: Sample
) -> bool:
    record = work.read_record(task.name)
    if record is None or record.get("tokenizer_sha256") != tokenizer.sha256 or record.get("kind") != kind_of(task):
        return False
    if any(record.get(name) != value for name, value in sample.describe("max_train_rows").items()):
        return False
    present = files_sha256(work.out / task.name)
    hashes = {"sha256": {}} | record  # records of an earlier version have none
    try:
        if any(present.get(name) != sha256 for name, sha256 in strangers.field(hashes, "sha256", dict).items()):
            return False
        known = {split: facts["sha256"] for split, facts in strangers.field(record, "splits", dict).items()}
    except (ValueError, KeyError, TypeError):
        return False  # the record is damaged
    if known.keys() != sources.keys() or record.get("files") != _sizes(work.out / task.name):
        return False
    return all(file_sha256(path) == known[split] for split, path in sources.items())


def kind_of(task: GlueTask) -> str:
    """Return the kind of label in ``task.json``."""
    return "number" if task.is_regression else "classes"


def _sizes(directory: Path) -> dict[str, int]:
    """Return the size of each file of a task by relative name, to notice missing and truncated files."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != TASK_FILE]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}


def write_glue_labels(directory: Path, task: GlueTask, rows: dict[str, list[GlueRow]]) -> None:
    """Write ``directory/label``: binarized, with a ``dict.txt`` in the order of the classes; for a regression as text.

    A label is a line like any other: ``sentence_prediction`` removes its ``</s>``. fairseq reads the targets of a regression
    from ``SPLIT.label``, one number per line.
    """
    target = directory / "label"
    target.mkdir()
    labels = {split: [row.label for row in rows[split]] for split in rows if not is_test(split)}
    if task.is_regression:
        for split, values in labels.items():
            (target / f"{split}.label").write_text("".join(f"{value}\n" for value in values), encoding="utf-8")
        return
    classes = "".join(f"{label} 1\n" for label in task.labels)
    (target / DICTIONARY_FILE).write_text(classes, encoding="utf-8")
    ids = {label: index for index, label in enumerate(task.labels, NUM_FAIRSEQ_SYMBOLS)}
    for split, values in labels.items():
        with BinarizedFile(target / split, NUM_FAIRSEQ_SYMBOLS + len(ids)) as file:
            lines = np.array([index for value in values for index in (ids[value], END_ID)], dtype=np.int32)
            file.add_lines(lines, [2] * len(values))
