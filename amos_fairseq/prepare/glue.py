"""``amos prepare glue``: convert GLUE's files to the input of fairseq's ``sentence_prediction``.

For each task: read the tables -> encode -> publish.
"""

import argparse
import contextlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq import strangers
from amos_fairseq.data.glue_tasks import TASKS, GlueTask, is_test, parse_tasks
from amos_fairseq.errors import UserError
from amos_fairseq.files import json_text, write_text
from amos_fairseq.fingerprint import DICTIONARY_FILE, TOKENIZER_DIRECTORY, file_sha256, files_sha256
from amos_fairseq.prepare.binarizing import (
    END_ID,
    NUM_FAIRSEQ_SYMBOLS,
    UNKNOWN_ID,
    BinarizedFile,
    encode_lines,
    start_encoding_process,
)
from amos_fairseq.prepare.glue_tables import GlueRow, GlueTable, find_files, has_any_file, read_table
from amos_fairseq.prepare.processes import number_of_processes, ordered_results, process_pool
from amos_fairseq.prepare.workspace import Sample, Workspace
from amos_fairseq.terminal import progress_bar, say
from amos_fairseq.tokenization import Tokenizer, load_tokenizer

TASK_FILE = "task.json"
# Maximum lengths of usual encoders. Fine-tuning cuts rows that are longer than the encoder's; here they are counted.
USUAL_MAX_POSITIONS = (64, 128, 256, 512)
_BATCH_ROWS = 1000
_SHOWN_BROKEN_LINES = 5


class GlueWorkspace(Workspace):
    """``OUT``: ``tokenizer/`` and a folder for each task, which is either complete or absent."""

    def __init__(self, out: Path, tokenizer: Tokenizer) -> None:
        super().__init__(out)
        self._tokenizer = tokenizer
        self.tokenizer = self.root / TOKENIZER_DIRECTORY  # a copy for the duration of the run

    def check_out(self) -> None:
        if "," in str(self.out):
            raise UserError(f"OUT {self.out}: fairseq separates files by commas, choose a name without commas")
        super().check_out()
        if (self.out / TOKENIZER_DIRECTORY).is_dir():
            if load_tokenizer(self.out / TOKENIZER_DIRECTORY).sha256 != self._tokenizer.sha256:
                raise UserError(f"{self.out} was made with another tokenizer: give another OUT, or remove it")
        elif self.out.exists() and {path.name for path in self.out.iterdir()} - {self.hidden}:
            raise UserError(
                f"OUT {self.out} is not empty and contains no GLUE data of prepare.sh: give another directory"
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
        hint = f"{directory} was not written by prepare.sh; give another OUT, or remove it"
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
    """Check the arguments and prepare the tasks; raise :class:`UserError` for bad input."""
    # Check as much as possible before any work.
    tasks = _tasks_to_prepare(given.glue, given.tasks)
    if given.max_train_rows is not None and given.max_train_rows < 1:
        raise UserError(f"--max-train-rows {given.max_train_rows} must be at least 1")
    sample, tokenizer = Sample(given.max_train_rows, given.seed), load_tokenizer(given.tokenizer)
    prepare_glue(given.glue, tasks, tokenizer, given.out, sample, number_of_processes(given.workers))


def _tasks_to_prepare(glue: Path, names: str) -> list[GlueTask]:
    """Return the requested tasks. ``ALL`` omits, with a message, the tasks without any file."""
    tasks = [TASKS[name] for name in parse_tasks(names, TASKS, TASKS)]
    if not glue.is_dir():
        raise UserError(f"GLUE_DIR {glue} is not a directory: give the one that contains CoLA, SST-2, ...")
    missing: list[str] = []
    if len(tasks) == len(TASKS):
        missing = [task.name for task in tasks if not has_any_file(glue, task)]
        tasks = [task for task in tasks if task.name not in missing]
        if not tasks:
            raise UserError(f"GLUE_DIR {glue} contains no task: expected directories such as CoLA and SST-2")
    for task in tasks:
        find_files(glue, task)
    if missing:
        say(f"not in {glue}, so not prepared: {', '.join(missing)}")
    return tasks


def prepare_glue(
    glue: Path, tasks: list[GlueTask], tokenizer: Tokenizer, out: Path, sample: Sample, workers: int
) -> None:
    """Write the tasks' files in ``glue`` to ``out``; finished tasks made from the same files are skipped.

    Raises:
        UserError: bad input; tasks that are finished stay, and nothing else.
    """
    files = {task.name: find_files(glue, task) for task in tasks}  # missing files are reported before any work
    with (
        GlueWorkspace(out, tokenizer) as work,
        process_pool(workers, start_encoding_process, work.tokenizer) as pool,
    ):
        for task in tasks:
            sources = files[task.name]
            if _is_finished(work, task, sources, tokenizer, sample):
                say(f"{task.name} is finished already, with these files and settings: skipped")
                continue
            work.publish(_prepare_task(work, task, sources, tokenizer, sample, pool, workers))
    say(
        f"done: fairseq-train {out}/TASK --user-dir amos_fairseq --task sentence_prediction ...; counts in TASK/task.json"
    )


def _prepare_task(
    work: GlueWorkspace,
    task: GlueTask,
    sources: dict[str, Path],
    tokenizer: Tokenizer,
    sample: Sample,
    pool: Executor,
    workers: int,
) -> dict[str, Any]:
    """Write everything of a task except ``task.json``, and return the content of that file."""
    directory = work.unfinished(task.name)
    tables = _read(task, sources)
    splits = {split: _describe_source(task, split, sources[split], table) for split, table in tables.items()}
    if "train" in tables:
        rows = tables["train"].rows
        tables["train"].rows = [rows[index] for index in sample.choose(len(rows))]
    inputs = [directory / f"input{number}" for number in range(len(task.texts))]
    for path in inputs:
        path.mkdir()
        shutil.copyfile(work.tokenizer / DICTIONARY_FILE, path / DICTIONARY_FILE)
    with progress_bar(sum(len(table.rows) for table in tables.values()), f"{task.name}: encode", "row", delay=2) as bar:
        for split, table in tables.items():
            prefixes = [path / split for path in inputs]
            counts = encode_rows(table.rows, prefixes, tokenizer, pool, workers, bar.update)
            splits[split].update(rows=len(table.rows), **counts.describe())
    write_glue_labels(directory, task, {split: table.rows for split, table in tables.items()})
    for split, table in tables.items():
        if is_test(split):
            ids = "".join(f"{row.id}\n" for row in table.rows)
            (directory / f"{split}.ids").write_text(ids, encoding="utf-8")
    for split, described in splits.items():
        _report(task, split, described, tables[split].broken_lines)
    return {
        "task": task.name,
        "kind": "regression" if task.is_regression else "classification",
        "num_classes": task.num_classes,
        "labels": list(task.labels),
        **sample.describe("max_train_rows"),
        "tokenizer_sha256": tokenizer.sha256,
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


def _report(task: GlueTask, split: str, described: dict[str, Any], broken: list[int]) -> None:
    rows = described["rows"]
    longer = ", ".join(f"{count:,} than {most}" for most, count in described["longer_than"].items() if count)
    of = f" of {described['source_rows']}" if rows < described["source_rows"] else ""
    say(
        f"{task.name} {split}: {rows}{of} rows; longest {described['longest']} tokens"
        + (f" (longer: {longer}; a model of that length reads them cut)" if longer else "")
        + f"; {described['unknown_share']:.3%} unknown pieces"
    )
    if described["source_rows"] != described["official_rows"]:
        say(
            f"{task.name} {split}: the official file has {described['official_rows']} rows, {described['source']} has "
            f"{described['source_rows']}: scores are not comparable with published ones"
        )
    if broken:
        shown = ", ".join(map(str, broken[:_SHOWN_BROKEN_LINES])) + (
            ", ..." if len(broken) > _SHOWN_BROKEN_LINES else ""
        )
        say(f"{task.name} {split}: {len(broken)} broken lines of {described['source']} skipped (lines {shown})")


def _is_finished(
    work: GlueWorkspace, task: GlueTask, sources: dict[str, Path], tokenizer: Tokenizer, sample: Sample
) -> bool:
    record = work.read_record(task.name)
    if record is None or record.get("tokenizer_sha256") != tokenizer.sha256:
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


def _sizes(directory: Path) -> dict[str, int]:
    """Return the size of each file of a task by relative name, to notice missing and truncated files."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != TASK_FILE]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}


@dataclass
class RowCounts:
    """``pieces[k]``: pieces of text k, without ``</s>``; ``unknown``: those of them that are not in ``dict.txt``.

    ``longest`` and ``longer`` (number of rows longer than each of ``USUAL_MAX_POSITIONS``) count tokens as in fine-tuning:
    ``<s> A </s>`` or ``<s> A </s> B </s>``. Recipes with a second separator have one token more in a pair.
    """

    pieces: list[int]
    rows: int = 0
    unknown: int = 0
    longest: int = 0
    longer: list[int] = field(default_factory=lambda: [0] * len(USUAL_MAX_POSITIONS))

    def add(self, ids_of_texts: list[list[int]]) -> None:
        lengths = [len(ids) for ids in ids_of_texts]
        self.pieces = [total + length for total, length in zip(self.pieces, lengths, strict=True)]
        tokens = 1 + sum(length + 1 for length in lengths)
        self.rows += 1
        self.longest = max(self.longest, tokens)
        self.longer = [count + (tokens > most) for count, most in zip(self.longer, USUAL_MAX_POSITIONS, strict=True)]
        self.unknown += sum(ids.count(UNKNOWN_ID) for ids in ids_of_texts)

    def merge(self, other: "RowCounts") -> None:
        self.pieces = [a + b for a, b in zip(self.pieces, other.pieces, strict=True)]
        self.rows += other.rows
        self.unknown += other.unknown
        self.longest = max(self.longest, other.longest)
        self.longer = [a + b for a, b in zip(self.longer, other.longer, strict=True)]

    def describe(self) -> dict[str, Any]:
        """Return the counts for ``task.json``."""
        return {
            "longest": self.longest,
            "longer_than": {str(most): count for most, count in zip(USUAL_MAX_POSITIONS, self.longer, strict=True)},
            "unknown_share": self.unknown / max(1, sum(self.pieces)),
        }


def encode_rows(
    rows: list[GlueRow],
    prefixes: list[Path],
    tokenizer: Tokenizer,
    pool: Executor,
    processes: int,
    on_done: Callable[[int], object],
) -> RowCounts:
    """Binarize text k of every row into ``prefixes[k]``: a line for each row, ended by ``</s>``.

    ``on_done`` is called with the number of rows newly encoded.
    """
    total = RowCounts([0] * len(prefixes))
    with contextlib.ExitStack() as stack:
        num_symbols = len(tokenizer) + NUM_FAIRSEQ_SYMBOLS
        files = [stack.enter_context(BinarizedFile(prefix, num_symbols)) for prefix in prefixes]
        for texts, counts in ordered_results(pool, processes, encode_batch, _batches(rows)):
            for file, (ids, lengths) in zip(files, texts, strict=True):
                file.add_lines(ids, lengths)
            total.merge(counts)
            on_done(counts.rows)
    return total


def encode_batch(batch: list[tuple[str, ...]]) -> tuple[list[tuple[np.ndarray, list[int]]], RowCounts]:
    """Return the ids and lengths of the lines of each text of the rows, and the counts of the batch."""
    columns = [encode_lines(list(column)) for column in zip(*batch, strict=True)]
    counts = RowCounts([0] * len(columns))
    for row in zip(*columns, strict=True):
        counts.add(list(row))
    ids = [np.array([index for line in lines for index in (*line, END_ID)], dtype=np.int32) for lines in columns]
    return [(of_text, [len(line) + 1 for line in lines]) for of_text, lines in zip(ids, columns, strict=True)], counts


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


def _batches(rows: list[GlueRow]) -> Iterator[list[tuple[str, ...]]]:
    for start in range(0, len(rows), _BATCH_ROWS):
        yield [row.texts for row in rows[start : start + _BATCH_ROWS]]
