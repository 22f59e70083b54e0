"""Convert GLUE's files to the input of fairseq's ``sentence_prediction``; see ``prepare.sh --help``.

For each task: read the tables -> encode -> publish.
"""

import argparse
import random
import shutil
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.fingerprint import DICTIONARY_FILE, file_sha256, files_sha256
from amos_fairseq.preprocess.common.command import ending_in_one_line, number_of_processes, progress_bar, say
from amos_fairseq.preprocess.common.processes import end_children_with_this_process, process_pool
from amos_fairseq.preprocess.glue.encoding import encode_rows, start_encoding_process, write_labels
from amos_fairseq.preprocess.glue.tables import Table, find_files, has_any_file, read_table
from amos_fairseq.preprocess.glue.tasks import TASKS, GlueTask, is_test, parse_tasks
from amos_fairseq.preprocess.glue.workspace import Workspace
from amos_fairseq.strangers import field
from amos_fairseq.tokenization import load_tokenizer
from amos_fairseq.tokenization.tokenizer import Tokenizer

_DESCRIPTION = f"""Convert GLUE's official TSV files to the input of fairseq's sentence_prediction.

Tasks: {", ".join(TASKS)}. Files are UTF-8, plain or as .gz, .xz or .zst; test files may be missing. OUT gets
tokenizer/ and a directory for each task. A finished task is skipped while its files, the tokenizer and the
settings are the same, and made again otherwise. docs/glue_data.md describes both layouts."""
_SHOWN_BROKEN_LINES = 5


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of a task. ``max_train_rows`` None: all rows."""

    max_train_rows: Optional[int]
    seed: int

    def describe(self) -> Dict[str, Any]:
        """Return the settings for ``task.json``. The seed matters only if rows are sampled."""
        return {"max_train_rows": self.max_train_rows, "seed": None if self.max_train_rows is None else self.seed}


def prepare(
    glue: Path, tasks: List[GlueTask], tokenizer: Tokenizer, out: Path, settings: Settings, workers: int
) -> None:
    """Write the tasks' files in ``glue`` to ``out``; finished tasks made from the same files are skipped.

    Raises:
        UserError: bad input; tasks that are finished stay, and nothing else.
    """
    files = {task.name: find_files(glue, task) for task in tasks}  # missing files are reported before any work
    with (
        Workspace(out, tokenizer) as work,
        process_pool(workers, start_encoding_process, str(work.tokenizer)) as pool,
    ):
        for task in tasks:
            sources = files[task.name]
            if _is_finished(work, task, sources, tokenizer, settings):
                say(f"{task.name} is finished already, with these files and settings: skipped")
                continue
            work.publish(task.name, _prepare_task(work, task, sources, tokenizer, settings, pool, workers))
    say(
        f"done: fairseq-train {out}/TASK --user-dir amos_fairseq --task sentence_prediction ...; counts in TASK/task.json"
    )


def _prepare_task(
    work: Workspace,
    task: GlueTask,
    sources: Dict[str, Path],
    tokenizer: Tokenizer,
    settings: Settings,
    pool: Executor,
    workers: int,
) -> Dict[str, Any]:
    """Write everything of a task except ``task.json``, and return the content of that file."""
    directory = work.unfinished(task.name)
    tables = _read(task, sources)
    splits = {split: _describe_source(task, split, sources[split], table) for split, table in tables.items()}
    if "train" in tables and settings.max_train_rows is not None:
        tables["train"].rows = _sample(tables["train"].rows, settings)
    inputs = [directory / f"input{number}" for number in range(len(task.texts))]
    for path in inputs:
        path.mkdir()
        shutil.copyfile(work.tokenizer / DICTIONARY_FILE, path / DICTIONARY_FILE)
    with progress_bar(sum(len(table.rows) for table in tables.values()), f"{task.name}: encode", "row", delay=2) as bar:
        for split, table in tables.items():
            prefixes = [path / split for path in inputs]
            counts = encode_rows(table.rows, prefixes, tokenizer, pool, workers, bar.update)
            splits[split].update(rows=len(table.rows), **counts.describe())
    write_labels(directory, task, {split: table.rows for split, table in tables.items()})
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
        **settings.describe(),
        "tokenizer_sha256": tokenizer.sha256,
        "splits": splits,
        "files": _sizes(directory),
        "sha256": files_sha256(directory),
    }


def _read(task: GlueTask, sources: Dict[str, Path]) -> Dict[str, Table]:
    with progress_bar(sum(path.stat().st_size for path in sources.values()), f"{task.name}: read", "B", delay=2) as bar:
        return {split: read_table(path, task, split, bar.update) for split, path in sources.items()}


def _sample(rows: List[Any], settings: Settings) -> List[Any]:
    """Return a random sample of the rows, in the order of the file."""
    if len(rows) <= settings.max_train_rows:
        return rows
    chosen = random.Random(settings.seed).sample(range(len(rows)), settings.max_train_rows)
    return [rows[index] for index in sorted(chosen)]


def _describe_source(task: GlueTask, split: str, path: Path, table: Table) -> Dict[str, Any]:
    return {
        "source": path.name,
        "sha256": table.sha256,
        "source_rows": len(table.rows),
        "official_rows": task.official_rows[split],
        "broken": len(table.broken_lines),
        "broken_lines": table.broken_lines,
    }


def _report(task: GlueTask, split: str, described: Dict[str, Any], broken: List[int]) -> None:
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
    work: Workspace, task: GlueTask, sources: Dict[str, Path], tokenizer: Tokenizer, settings: Settings
) -> bool:
    record = work.read_record(task.name)
    if record is None or record.get("tokenizer_sha256") != tokenizer.sha256:
        return False
    if any(record.get(name) != value for name, value in settings.describe().items()):
        return False
    present = files_sha256(work.out / task.name)
    hashes = {"sha256": {}} | record  # records of an earlier version have none
    try:
        if any(present.get(name) != sha256 for name, sha256 in field(hashes, "sha256", dict).items()):
            return False
        known = {split: facts["sha256"] for split, facts in field(record, "splits", dict).items()}
    except (ValueError, KeyError, TypeError):
        return False  # the record is damaged
    if known.keys() != sources.keys() or record.get("files") != _sizes(work.out / task.name):
        return False
    return all(file_sha256(path) == known[split] for split, path in sources.items())


def _sizes(directory: Path) -> Dict[str, int]:
    """Return the size of each file of a task by relative name, to notice missing and truncated files."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "task.json"]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "prepare.sh", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("glue", type=Path, metavar="GLUE_DIR", help="directory of the official download: CoLA/train.tsv, ...")
    add("tasks", metavar="TASK|ALL", help="a task, several separated by commas, or ALL that are in GLUE_DIR")
    add(
        "tokenizer",
        type=Path,
        metavar="TOKENIZER_DIR",
        help="tokenizer directory of a corpus or run, or tokenizer.json",
    )
    add("out", type=Path, metavar="OUT", help="output directory")
    add("--workers", type=int, default=None, help="processes; the result is the same (default: all processors)")
    add("--max-train-rows", type=int, default=None, metavar="N", help="sample at most N training rows (default: all)")
    add("--seed", type=int, default=1, help="samples the rows of --max-train-rows (default: %(default)s)")
    return parser


@report_user_errors()
def main(arguments: Optional[List[str]] = None) -> None:
    """Run the command. Exit with code 1 and one line on a user's mistake, with code 130 after Ctrl-C."""
    with ending_in_one_line("finished tasks are skipped"):
        given = build_parser().parse_args(arguments)
        # Check as much as possible before any work.
        tasks = _tasks_to_prepare(given.glue, given.tasks)
        if given.max_train_rows is not None and given.max_train_rows < 1:
            raise UserError(f"--max-train-rows {given.max_train_rows} must be at least 1")
        settings, tokenizer = Settings(given.max_train_rows, given.seed), load_tokenizer(given.tokenizer)
        prepare(given.glue, tasks, tokenizer, given.out, settings, number_of_processes(given.workers))


def _tasks_to_prepare(glue: Path, names: str) -> List[GlueTask]:
    """Return the requested tasks. ``ALL`` omits, with a message, the tasks without any file."""
    tasks = parse_tasks(names)
    if not glue.is_dir():
        raise UserError(f"GLUE_DIR {glue} is not a directory: give the one that contains CoLA, SST-2, ...")
    missing: List[str] = []
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


if __name__ == "__main__":
    end_children_with_this_process()
    main()
