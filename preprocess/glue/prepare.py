"""GLUE's files to what fairseq's ``sentence_prediction`` reads; see ``prepare.sh --help``.

for each task: read the tables -> encode -> fairseq-preprocess -> publish
"""

import random
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Dict, List, Optional

from amos_fairseq.data.fingerprint import file_sha256
from amos_fairseq.errors import report_user_errors
from amos_fairseq.tokenization import Tokenizer
from preprocess.common.command import ending_in_one_line, progress_bar, say
from preprocess.common.processes import end_children_with_this_process, process_pool
from preprocess.glue.arguments import Settings, build_parser, read_arguments
from preprocess.glue.encoding import USUAL_MAX_POSITIONS, Counts, encode_rows, start_encoding_process
from preprocess.glue.tables import Table, find_files, read_table
from preprocess.glue.tasks import GlueTask
from preprocess.glue.workspace import Workspace

_SHOWN_BROKEN_LINES = 5


def prepare(
    glue: Path, tasks: List[GlueTask], tokenizer: Tokenizer, out: Path, settings: Settings, workers: int
) -> None:
    """Make ``out`` of the tasks' files in ``glue``; tasks that are there already, of the same files, are left alone.

    Raises:
        UserError: bad input; tasks that were finished before stay, and nothing else.
    """
    files = {task.name: find_files(glue, task) for task in tasks}  # what is absent is said before any work
    with (
        Workspace(out, tokenizer) as work,
        process_pool(workers, start_encoding_process, str(work.tokenizer)) as pool,
    ):
        for task in tasks:
            sources = files[task.name]
            if _is_finished(work, task, sources, tokenizer, settings):
                say(f"{task.name} is finished already, with these files and settings: left alone")
                continue
            work.publish(task.name, _prepare_task(work, task, sources, tokenizer, settings, pool, workers))
    say(
        f"done: fairseq-train {out}/TASK --user-dir amos_fairseq --task sentence_prediction ...; facts in TASK/task.json"
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
    """Everything of a task but ``task.json``, whose content is returned."""
    directory = work.unfinished(task.name)
    tables = _read(task, sources)
    splits = {split: _describe_source(task, split, sources[split], table) for split, table in tables.items()}
    if "train" in tables and settings.max_train_rows is not None:
        tables["train"].rows = _sample(tables["train"].rows, settings)
    counts, encoded = {}, {}
    with progress_bar(sum(len(table.rows) for table in tables.values()), f"{task.name}: encode", "row", delay=2) as bar:
        for split, table in tables.items():
            encoded[split] = [directory / f"{split}.{number}.pieces" for number in range(len(task.texts))]
            counts[split] = encode_rows(table.rows, encoded[split], pool, workers, bar.update)
            splits[split].update(rows=len(table.rows), **counts[split].describe())
    _binarize(directory, task, tables, counts, encoded, work.tokenizer / "dict.txt", workers)
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
    }


def _read(task: GlueTask, sources: Dict[str, Path]) -> Dict[str, Table]:
    with progress_bar(sum(path.stat().st_size for path in sources.values()), f"{task.name}: read", "B", delay=2) as bar:
        return {split: read_table(path, task, split, bar.update) for split, path in sources.items()}


def _sample(rows: List[Any], settings: Settings) -> List[Any]:
    """The first rows of a seeded shuffle, in the order of the file."""
    if len(rows) <= settings.max_train_rows:
        return rows
    chosen = random.Random(settings.seed).sample(range(len(rows)), settings.max_train_rows)
    return [rows[index] for index in sorted(chosen)]


def _binarize(
    directory: Path,
    task: GlueTask,
    tables: Dict[str, Table],
    counts: Dict[str, Counts],
    encoded: Dict[str, List[Path]],
    dictionary: Path,
    workers: int,
) -> None:
    from preprocess.glue import binarizing  # fairseq: seconds to import

    rows = {split: table.rows for split, table in tables.items()}
    with progress_bar(binarizing.expected_ids(counts), f"{task.name}: binarize", "token", delay=2) as bar:
        binarizing.binarize_texts(directory, encoded, counts, dictionary, workers, bar.update)
        binarizing.binarize_labels(directory, task, rows, workers, bar.update)
    binarizing.check_task(directory, task, rows, counts)
    for split in rows:
        if split.startswith("test"):
            ids = "".join(f"{row.id}\n" for row in rows[split])
            (directory / f"{split}.ids").write_text(ids, encoding="utf-8")


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
    rows, longer = described["rows"], described[f"longer_than_{USUAL_MAX_POSITIONS}"]
    of = f" of {described['source_rows']}" if rows < described["source_rows"] else ""
    say(
        f"{task.name} {split}: {rows}{of} rows; longest {described['longest']} tokens, {longer} "
        f"({longer / rows:.2%}) longer than {USUAL_MAX_POSITIONS}; {described['unknown_share']:.3%} unknown pieces"
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
        say(f"{task.name} {split}: {len(broken)} broken lines of {described['source']} left out (lines {shown})")


def _is_finished(
    work: Workspace, task: GlueTask, sources: Dict[str, Path], tokenizer: Tokenizer, settings: Settings
) -> bool:
    record = work.read_record(task.name)
    if record is None or record.get("tokenizer_sha256") != tokenizer.sha256:
        return False
    if any(record.get(name) != value for name, value in settings.describe().items()):
        return False
    known = {split: facts["sha256"] for split, facts in record["splits"].items()}
    if known.keys() != sources.keys() or record["files"] != _sizes(work.out / task.name):
        return False
    return all(file_sha256(path) == known[split] for split, path in sources.items())


def _sizes(directory: Path) -> Dict[str, int]:
    """Bytes of what was made of a task, by relative name: a file that is lost or cut short is seen."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "task.json"]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}


@report_user_errors()
def main(arguments: Optional[List[str]] = None) -> None:
    """The command. Exit status 1 and one line on a user's mistake, 130 after Ctrl-C."""
    with ending_in_one_line("finished tasks are left alone"):
        given = read_arguments(build_parser().parse_args(arguments))
        if given.absent:
            say(f"not in {given.glue}, so not prepared: {', '.join(given.absent)}")
        prepare(given.glue, given.tasks, given.tokenizer, given.out, given.settings, given.workers)


if __name__ == "__main__":
    end_children_with_this_process()
    main()
