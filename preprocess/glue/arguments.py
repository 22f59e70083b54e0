"""The flags of ``prepare.sh`` and what they mean together."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional

from amos_fairseq.errors import UserError
from amos_fairseq.tokenization import Tokenizer, load_tokenizer
from preprocess.glue.tables import find_files, has_any_file
from preprocess.glue.tasks import TASKS, GlueTask, parse_tasks

_DESCRIPTION = f"""GLUE's official TSV files to what fairseq's sentence_prediction reads.

Tasks: {", ".join(TASKS)}. Files are UTF-8, plain or as .gz, .xz or .zst; test files may be absent. OUT gets
tokenizer/ and a directory for each task; a task that is finished is left alone while its files, the tokenizer and the
settings are the same, and made again otherwise. preprocess/glue/README.md describes both layouts."""


@dataclass(frozen=True)
class Settings:
    """What decides on the content of a task, besides its files and the tokenizer. ``max_train_rows`` None: all."""

    max_train_rows: Optional[int]
    seed: int

    def describe(self) -> Dict[str, Any]:
        """For ``task.json``. The seed matters only where rows are chosen."""
        return {"max_train_rows": self.max_train_rows, "seed": None if self.max_train_rows is None else self.seed}


@dataclass(frozen=True)
class Arguments:
    """``absent``: tasks that ``ALL`` leaves out, because nothing of them is there."""

    glue: Path
    tasks: List[GlueTask]
    absent: List[str]
    tokenizer: Tokenizer
    out: Path
    settings: Settings
    workers: int


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "prepare.sh", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("glue", type=Path, metavar="GLUE_DIR", help="directory of the official download: CoLA/train.tsv, ...")
    add("tasks", metavar="TASK|ALL", help="a task, several with commas between, or ALL that are in GLUE_DIR")
    add(
        "tokenizer",
        type=Path,
        metavar="TOKENIZER_DIR",
        help="tokenizer directory of a corpus or run, or tokenizer.json",
    )
    add("out", type=Path, metavar="OUT", help="directory of the result")
    add("--workers", type=int, default=None, help="processes; the result is the same (default: all processors)")
    add("--max-train-rows", type=int, default=None, metavar="N", help="take no more training rows (default: all)")
    add("--seed", type=int, default=1, help="chooses the rows for --max-train-rows (default: %(default)s)")
    return parser


def read_arguments(given: argparse.Namespace) -> Arguments:
    """Check what can be checked before any work.

    Raises:
        UserError: a task is unknown, a directory or file is missing, a number is out of range.
    """
    tasks = parse_tasks(given.tasks)
    if not given.glue.is_dir():
        raise UserError(f"GLUE_DIR {given.glue} is not a directory: give the one that holds CoLA, SST-2, ...")
    absent: List[str] = []
    if len(tasks) == len(TASKS):
        absent = [task.name for task in tasks if not has_any_file(given.glue, task)]
        tasks = [task for task in tasks if task.name not in absent]
        if not tasks:
            raise UserError(f"GLUE_DIR {given.glue} holds no task: expected directories such as CoLA and SST-2")
    for task in tasks:
        find_files(given.glue, task)
    if given.max_train_rows is not None and given.max_train_rows < 1:
        raise UserError(f"--max-train-rows {given.max_train_rows} must be at least 1")
    settings = Settings(given.max_train_rows, given.seed)
    tokenizer = load_tokenizer(given.tokenizer)
    return Arguments(given.glue, tasks, absent, tokenizer, given.out, settings, _workers(given.workers))


def _workers(number: Optional[int]) -> int:
    if number is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if number < 1:
        raise UserError(f"--workers {number} must be at least 1")
    return number
