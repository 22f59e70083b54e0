"""``amos prepare glue``: each of GLUE's tasks is a table like those of ``amos classify``, with given columns and labels."""

import argparse
import dataclasses
import functools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.downstream.labeled_task import TASK_FILE
from amos_fairseq.downstream.texts.glue.tasks import (
    LARGEST_SCORE,
    TASKS,
    GlueTask,
    find_files,
    has_any_file,
    is_test,
    tasks_in,
)
from amos_fairseq.downstream.texts.prepare import write_task
from amos_fairseq.errors import UserError
from amos_fairseq.files import TOKENIZER_DIRECTORY, json_text, refuse_link, whole_folder
from amos_fairseq.inputs.labels import LabelSpace, number_of
from amos_fairseq.inputs.rows import LabeledRows, read_rows
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import describe_loss, number_of_processes
from amos_fairseq.text.prepared_data import Sample, prepare_folder, prepared_data
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import Tokenizer

ID_COLUMNS = ("index", "id")  # what the leaderboard calls a row
_SHOWN_BROKEN_LINES = 5
OnRead = Callable[[int], object]


def run(arguments: argparse.Namespace) -> None:
    """Write the tasks' files in GLUE_DIR to OUT; finished tasks made from the same files are skipped."""
    out, glue = arguments.out, arguments.glue
    if not glue.is_dir():
        raise UserError(f"GLUE_DIR {glue} is not a directory: give the one that contains CoLA, SST-2, ...")
    names = tasks_in(glue, arguments.tasks, TASKS, TASKS, lambda task: has_any_file(glue, TASKS[task]), "prepared")
    files = {name: find_files(glue, TASKS[name]) for name in names}  # first all: a missing one is reported at once
    if arguments.max_train_rows is not None and arguments.max_train_rows < 1:
        raise UserError(f"--max-train-rows {arguments.max_train_rows} must be at least 1")
    sample, tokenizer = Sample(arguments.max_train_rows, arguments.seed), load_tokenizer(arguments.tokenizer)
    number_of_processes(arguments.workers)  # before any work
    _check_out(out, tokenizer)
    if not (out / TOKENIZER_DIRECTORY).exists():
        with whole_folder(out / TOKENIZER_DIRECTORY) as unfinished:
            tokenizer.save(unfinished)
    settings = sample.describe("max_train_rows")
    for name, sources in files.items():
        write = functools.partial(write_glue_task, TASKS[name], sources, sample, tokenizer, arguments.workers)
        if not prepare_folder(out / name, sources, tokenizer, settings, write):
            say(f"{name} is finished already, with these files and settings: skipped")
    command = f"fairseq-train {shlex.quote(str(out))}/TASK --user-dir amos_fairseq --task sentence_prediction ..."
    say(f"done: {command}; counts in TASK/task.json")


def _check_out(out: Path, tokenizer: Tokenizer) -> None:
    _refuse_comma(out)
    refuse_link(out / TOKENIZER_DIRECTORY)
    if out.exists() and not out.is_dir():
        raise UserError(f"OUT {out} is not a directory")
    if (out / TOKENIZER_DIRECTORY).is_dir():
        if load_tokenizer(out / TOKENIZER_DIRECTORY).sha256 != tokenizer.sha256:
            raise UserError(f"{out} was made with another tokenizer: give another OUT, or remove it")
    elif out.exists() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise UserError(f"OUT {out} is not empty and contains no GLUE data of amos prepare: give another directory")


def prepare_glue_inside(out: Path, glue: Path, tasks: Sequence[str], tokenizer: Tokenizer) -> Path:
    """Return what ``amos prepare glue`` makes of the tasks' files in GLUE_DIR, inside of OUT of ``amos glue``.

    Tasks of earlier calls stay beside them. See :func:`~amos_fairseq.text.prepared_data.prepared_data`.
    """
    _refuse_comma(out)
    files = {name: find_files(glue, TASKS[name]) for name in tasks}
    of_all_tasks = [f"runs/{name}" for name in (*TASKS, "multi")]
    place = prepared_data(out, f"glue/{TOKENIZER_DIRECTORY}", {}, tokenizer, {}, tokenizer.save, of_all_tasks)
    for name, sources in files.items():
        write = functools.partial(write_glue_task, TASKS[name], sources, Sample(None, seed=1), tokenizer, None)
        used_by, tests = [f"runs/{name}", "runs/multi"], list(filter(is_test, sources))
        prepared_data(out, f"glue/{name}", sources, tokenizer, {}, write, used_by, unscored=tests)
    return place.parent


def _refuse_comma(out: Path) -> None:
    if "," in str(out):
        raise UserError(f"OUT {out}: fairseq separates files by commas, choose a name without commas")


def read_split(path: Path, task: GlueTask, split: str, on_read: OnRead = lambda size: None) -> LabeledRows:
    """Read every row of an official file, in order, also those without a text; lines with more or fewer columns are counted.

    Quotes are ordinary characters, also in QQP, which was written with those of CSV: Hugging Face's processors read it so.
    """
    has_header = task.has_header(split)
    texts, label = (task.texts, task.label) if has_header else (("4",), "2")
    if is_test(split):
        return read_rows(path, texts, None, has_header, id_columns=ID_COLUMNS, on_read=on_read)
    rows = read_rows(path, texts, label, has_header, on_read=on_read)
    expected = f"a number from 0 to {LARGEST_SCORE:g}" if task.is_regression else f"one of {', '.join(task.labels)}"
    labels = []
    for line, value in zip(rows.ids, rows.labels, strict=True):
        text = (value or "").strip()
        number = number_of(text)
        is_score = task.is_regression and number is not None and 0 <= number <= LARGEST_SCORE
        if not is_score and text not in task.labels:
            raise UserError(f"{path}, line {line}: label {text[:60]!r} is not {expected}, as in {task.name}")
        labels.append(float(text) if task.is_regression else text)
    return dataclasses.replace(rows, labels=labels)


def write_glue_task(
    task: GlueTask,
    sources: Mapping[str, Path],
    sample: Sample,
    tokenizer: Tokenizer,
    workers: int | None,
    directory: Path,
) -> None:
    """Write the data of a task into an empty folder, beside that of the tokenizer; ``sample`` chooses the training rows."""
    with progress_bar(sum(path.stat().st_size for path in sources.values()), f"{task.name}: read", "B", delay=2) as bar:
        tables = {split: read_split(path, task, split, bar.update) for split, path in sources.items()}
    space = LabelSpace("number" if task.is_regression else "classes", task.labels)
    chosen = dict(tables)
    if "train" in tables:
        chosen["train"] = tables["train"].choose(sample.choose(len(tables["train"])))
    tests, tokenizer_folder = list(filter(is_test, tables)), directory.parent / TOKENIZER_DIRECTORY
    record = write_task(directory, task.name, space, chosen, tokenizer, tokenizer_folder, workers, with_ids=tests)
    for split, facts in record["splits"].items():
        broken = tables[split].broken_lines
        facts |= {"source_rows": len(tables[split]), "official_rows": task.official_rows[split]}
        facts |= {"broken": len(broken), "broken_lines": broken}
        _report(f"{task.name} {split}", facts)
    record |= sample.describe("max_train_rows")
    (directory / TASK_FILE).write_text(json_text(record), encoding="utf-8")


def _report(name: str, facts: dict[str, Any]) -> None:
    longer = ", ".join(f"{count:,} over {most}" for most, count in facts["longer_than"].items() if count)
    counted = f" (rows of more: {longer}; with one </s> between two texts)" if longer else ""
    rows = f"{facts['rows']} of {facts['source_rows']} rows"
    say(f"{name}: {rows}; longest {facts['longest']} tokens{counted}; {describe_loss(facts)}")
    if facts["source_rows"] != facts["official_rows"]:
        say(
            f"{name}: the official file has {facts['official_rows']} rows: scores are not comparable with published ones"
        )
    if facts["broken"]:
        more = ", ..." if facts["broken"] > _SHOWN_BROKEN_LINES else ""
        lines = ", ".join(map(str, facts["broken_lines"][:_SHOWN_BROKEN_LINES])) + more
        say(f"{name}: {facts['broken']} broken lines of {facts['source']} skipped (lines {lines})")
