"""``amos prepare glue``: each of GLUE's tasks is a table like those of ``amos classify``, with given columns and labels."""

import argparse
import dataclasses
import functools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.downstream.texts.glue.tasks import (
    AVERAGED,
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
from amos_fairseq.inputs.files import OnRead, ignore, print_what_was_read
from amos_fairseq.inputs.rows import TASK_FILE, LabeledRows, LabelSpace, number_of, read_rows
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.text.encoding import describe_unknown
from amos_fairseq.text.prepared_data import Sample, description_of, fill_out, prepared_data, write_manifest
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import Tokenizer

ID_COLUMNS = ("index", "id")  # what the leaderboard calls a row
# Readers of QQP count its broken lines differently; a rebuilt or truncated file differs by more.
ROWS_TOLERANCE = 0.001


def run(arguments: argparse.Namespace) -> None:
    """Write the tasks' files in GLUE_DIR to OUT; finished tasks made from the same files are skipped."""
    out, glue = arguments.out, arguments.glue
    names = tasks_in(glue, arguments.tasks, TASKS, TASKS, lambda task: has_any_file(glue, TASKS[task]), "prepared")
    files = {name: find_files(glue, TASKS[name]) for name in names}  # first all: a missing one is reported at once
    sample, tokenizer = Sample(arguments.max_train_rows, arguments.seed), load_tokenizer(arguments.tokenizer)
    for name, sources in files.items():
        preparation = GluePreparation(TASKS[name], sources, sample, tokenizer, arguments.workers)
        fill_out(out / name, preparation.description, TASK_FILE, preparation.write)
    command = f"fairseq-train {shlex.quote(str(out))}/TASK --user-dir amos_fairseq --task sentence_prediction ..."
    say(f"done: {command}; counts in TASK/{TASK_FILE}")


def prepare_glue_inside(out: Path, glue: Path, name: str, tokenizer: Tokenizer) -> Path:
    """Return what ``amos prepare glue`` makes of a task's files in GLUE_DIR, inside of OUT of ``amos glue``."""
    task = TASKS[name]
    preparation = GluePreparation(task, find_files(glue, task), Sample(None, seed=1), tokenizer)
    return prepared_data(out, name, preparation.description, preparation.write)


def read_split(path: Path, task: GlueTask, split: str, on_read: OnRead = ignore) -> LabeledRows:
    """Read every row of an official file, in order, also those without a text; lines with more or fewer columns are counted.
    Quotes are ordinary characters, also in QQP, which was written with those of CSV: Hugging Face's processors read it so."""
    has_header = task.has_header(split)
    texts, label = (task.texts, task.label) if has_header else (("4",), "2")
    if is_test(split):
        return read_rows(path, texts, None, has_header, False, ID_COLUMNS, on_read)
    rows = read_rows(path, texts, label, has_header, quotes=False, on_read=on_read)
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


@dataclass
class GluePreparation:
    """The files of a task by split, and how they are prepared; ``sample`` chooses the training rows."""

    task: GlueTask
    sources: Mapping[str, Path]
    sample: Sample
    tokenizer: Tokenizer
    workers: int | None = None

    @functools.cached_property
    def description(self) -> dict[str, Any]:
        return description_of(self.sources, self.tokenizer, self.sample.describe("max_train_rows"))

    def write(self, directory: Path) -> None:
        """Write the data of the task into an empty folder."""
        task, size = self.task, sum(path.stat().st_size for path in self.sources.values())
        with progress_bar(size, f"{task.name}: read", "B", delay=2) as bar:
            tables = {split: read_split(path, task, split, bar.update) for split, path in self.sources.items()}
        for split, rows in tables.items():
            report_rows(self.sources[split], task, split, rows)
        space, chosen = LabelSpace("number" if task.is_regression else "classes", task.labels), dict(tables)
        if "train" in tables:
            chosen["train"] = tables["train"].choose(self.sample.choose(len(tables["train"])))
        tests = list(filter(is_test, tables))
        record = write_task(directory, task.name, space, chosen, self.tokenizer, self.workers, with_ids=tests)
        for split, facts in record["splits"].items():
            broken = tables[split].broken_lines
            facts |= {"source_rows": len(tables[split]), "official_rows": task.official_rows[split]}
            facts |= {"broken": len(broken), "broken_lines": broken, "suffix": task.suffix(split)}
            rows = f"{facts['rows']} of {facts['source_rows']} rows"
            say(f"{task.name} {split}: {rows}; longest {facts['longest']} tokens; {describe_unknown(facts)}")
        record |= {"scores": list(task.scores), "in_average": task.name in AVERAGED, "head": task.head}
        record["notes"] = list(unofficial(record["splits"]))
        write_manifest(directory / TASK_FILE, self.description | record)


def unofficial(splits: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a footnote for each file with another number of rows than the official one."""
    for split, facts in splits.items():
        official, rows = facts["official_rows"], facts["source_rows"]
        if abs(rows - official) > ROWS_TOLERANCE * official and not is_test(split):
            yield (
                f"the {split} file ({facts['source']}) has {rows:,} rows, the official one {official:,}; the scores are not "
                "comparable with published ones"
            )


def report_rows(path: Path, task: GlueTask, split: str, rows: LabeledRows) -> None:
    """Print what was read of an official file."""
    columns = [*task.texts, *([] if is_test(split) else [task.label])]
    left_out = {"with another number of columns": len(rows.broken_lines)}
    first = " | ".join(rows.texts[0])
    label = "" if is_test(split) else f" -> {rows.labels[0]}"
    print_what_was_read(path, "TSV", columns, len(rows), left_out, first + label)
