"""``amos prepare glue-download``: GLUE from the hub's Parquet files, written as the official tables.

The hub's ``nyu-mll/glue`` was made from the official files with Hugging Face's reader: the same rows in the same order, as
:attr:`~amos_fairseq.downstream.texts.glue.tasks.GlueTask.official_rows` counts them. What it changes is changed
back here: labels are numbers in the order of the classes, -1 in test sets; scores are float32; columns have other names.
MRPC has its dev set already, which is part of its authors' training file.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.downstream.texts.glue.tasks import DIAGNOSTIC, TASKS, GlueTask, is_test, parse_tasks
from amos_fairseq.errors import UserError
from amos_fairseq.files import explain_write_errors, whole_folder
from amos_fairseq.inputs.arrow_files import open_arrow
from amos_fairseq.output.terminal import say

REPOSITORY = "nyu-mll/glue"
REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
# Columns of texts that have other names on the hub; its folders are named cola, sst2, stsb, ...
HUB_TEXTS = {"MRPC": ("sentence1", "sentence2"), **dict.fromkeys(("MNLI", "AX"), ("premise", "hypothesis"))}


def run(arguments: argparse.Namespace) -> None:
    """Download the files of the tasks and write them into OUT; tasks that are there are skipped."""
    tasks = [TASKS[name] for name in parse_tasks(",".join(arguments.tasks) or "ALL", TASKS, TASKS)]
    for task in tasks:
        names = {split: Path(places[0]) for split, places in task.files.items()}
        folder = arguments.out / names["test"].parent
        if all((arguments.out / name).is_file() for name in names.values()):
            say(f"{task.name} is already there: skipped", "download")
            continue
        if folder.exists():
            raise UserError(f"{folder} exists, but lacks official files of {task.name}: remove it or give another OUT")
        snapshot = fetch(hub_folder(task))
        with (
            explain_write_errors(folder, "make room, permit writing, or give another OUT"),
            whole_folder(folder) as unfinished,
        ):
            for split, name in names.items():
                lines = official_lines(task, split, snapshot)
                (unfinished / name.name).write_text("".join(lines), encoding="utf-8", newline="\n")
        say(f"{task.name}: {', '.join(sorted(path.name for path in folder.iterdir()))}", "download")


def hub_folder(task: GlueTask) -> str:
    return task.name.lower().replace("-", "")


def fetch(folder: str) -> Path:
    """Return the user's cached copy of the repository with the Parquet files of ``folder``; an interrupted one is continued."""
    from huggingface_hub import snapshot_download

    try:
        copy = snapshot_download(
            REPOSITORY, repo_type="dataset", revision=REVISION, allow_patterns=[f"{folder}/*.parquet"]
        )
    except Exception as error:  # which class a lost connection has depends on the version of huggingface_hub
        raise UserError(
            f"{REPOSITORY} could not be downloaded ({error!s:.300}): check the connection and repeat the command, or copy the "
            "official files by hand (docs/glue.md)"
        ) from error
    return Path(copy)


def official_lines(task: GlueTask, split: str, snapshot: Path) -> Iterator[str]:
    """Yield the lines of an official file, with the columns that ``amos prepare glue`` reads. Refuse another number of rows
    than the official file has, and a text with a tab or a line end."""
    folder, columns = snapshot / hub_folder(task), HUB_TEXTS.get(task.name, task.texts)
    name = "test" if task.name == DIAGNOSTIC else Path(task.files[split][0]).stem.replace("dev", "validation")
    files = sorted(folder.glob(f"{name}-*.parquet"))
    if not files:
        raise UserError(f"{folder} has no {name}-*.parquet: {REPOSITORY} is not as expected")
    if is_test(split):
        yield "\t".join(["id" if task.name == "QQP" else "index", *task.texts]) + "\n"
    elif task.has_header(split):
        yield "\t".join([*task.texts, task.label]) + "\n"
    num_rows = 0
    for file in files:
        with open_arrow(file) as (_, _, _, batches):
            for row in (row for batch in batches for row in batch.to_pylist()):
                yield "\t".join(_fields(task, split, [row[column] for column in columns], row)) + "\n"
                num_rows += 1
    if num_rows != task.official_rows[split]:
        raise UserError(
            f"{task.name} {split}: {REPOSITORY} has {num_rows:,} rows, the official file {task.official_rows[split]:,}: "
            "remove the copy in the cache of huggingface_hub, and repeat the command"
        )


def _fields(task: GlueTask, split: str, texts: list[str], row: dict[str, Any]) -> list[str]:
    if any("\t" in text or "\n" in text for text in texts):
        raise ValueError(f"row {row['idx']} has a text with a tab or a line end")
    if is_test(split):
        return [str(row["idx"]), *texts]
    label = row["label"]
    if task.is_regression:
        name = str(np.float32(label))  # 3.8, and not 3.799999952316284
    elif 0 <= label < len(task.labels):
        name = task.labels[label]
    else:
        raise ValueError(f"row {row['idx']} has the label {label}")
    # CoLA's four columns without names: source, label, mark, sentence.
    return [*texts, name] if task.has_header(split) else ["", name, "", *texts]
