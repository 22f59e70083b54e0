"""The archive that GLUE's leaderboard takes: a zip of one table per test set.

Each file has the header ``index``, ``prediction`` and a row per line of the test file, in its order: the name of the class
(numbers for CoLA, SST-2, MRPC, QQP and WNLI), or a similarity from 0 to 5. The server wants every file and every row; a test
set that nothing was predicted for, and a broken line of one, is filled with a constant, which is said.
"""

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event

import numpy as np

from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file
from amos_fairseq.finetuning.glue_benchmark import predict
from amos_fairseq.finetuning.glue_data import GlueData, read_glue_data
from amos_fairseq.finetuning.glue_tasks import DIAGNOSTIC, DIAGNOSTIC_ROWS, TASKS
from amos_fairseq.finetuning.statistics import TaskSummary

ARCHIVE = "glue_submission.zip"
LOWEST, HIGHEST = 0.0, 5.0
# One class of each task, for files that are filled: the middle of the scale, or the first name.
FILLINGS = {"STS-B": "2.500", "MNLI": "entailment", "QNLI": "entailment", "RTE": "entailment", "AX": "entailment"}
DEFAULT_FILLING = "0"


def write_submission(
    out: Path, data: Path, summaries: Mapping[str, TaskSummary], max_positions: int, device: str, stop: Event
) -> tuple[Path, list[str]]:
    """Predict every test set with the best dev run of its task and write the archive.

    Returns:
        Its path, and a line for each file that was filled with a constant, wholly or where lines are broken.

    Raises:
        UserError: a best run's checkpoint is gone.
        Stopped: ``stop`` is set.
    """
    files: dict[str, str] = {}
    notices: list[str] = []
    for task, splits in test_sets().items():
        summary = summaries.get("MNLI" if task == DIAGNOSTIC else task)
        prepared = prepared_test(data, task)
        if summary is not None and prepared is not None:
            checkpoint = best_checkpoint(out, summary)
            present = [split for split in splits if prepared.has(split)]
            predicted = predict(prepared, checkpoint, present, max_positions, device, stop)
            for split in present:
                rows, broken = with_broken_lines(prepared, split, spell(prepared, predicted[split]))
                files[splits[split]] = table(*zip(*rows, strict=True))
                notices += [f"{splits[split]}: {broken}"] if broken else []
    filled = dict(fillings(files))
    archive = out / ARCHIVE
    with whole_file(str(archive)) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in (files | filled).items():
            zipped.writestr(name, content)
    return archive, notices + [f"{name} is filled with a constant: no run or no prepared test file" for name in filled]


def check_test_files(data: Path, tasks: Sequence[str]) -> None:
    """Raise :class:`UserError` unless a test file of one of the tasks is prepared: the archive would hold constants only."""
    if not any(prepared_test(data, task) for task in tasks):
        raise UserError(
            f"--write-test: {data} holds no test set of {', '.join(tasks)}: prepare them from files with test.tsv"
        )


def official_rows(task: str, split: str) -> int:
    return DIAGNOSTIC_ROWS if task == DIAGNOSTIC else TASKS[task].official_rows[split]


def test_sets() -> dict[str, dict[str, str]]:
    """Task -> split -> file of the archive."""
    return {name: task.test_files for name, task in TASKS.items()} | {DIAGNOSTIC: {"test": f"{DIAGNOSTIC}.tsv"}}


def prepared_test(data: Path, task: str) -> GlueData | None:
    if not (data / task / "task.json").is_file():
        return None
    prepared = read_glue_data(data, task)
    return prepared if any(prepared.has(split) for split in test_sets()[task]) else None


def best_checkpoint(out: Path, summary: TaskSummary) -> Path:
    """The checkpoint of the run with the best dev score (AMOS Table 5: "the best development set model")."""
    file = out / summary.best.directory / summary.best.checkpoint
    if not file.is_file():
        raise UserError(
            f"{file} is gone, and with it the best run of {summary.task}: delete {file.parent} and run it again"
        )
    return file


def spell(data: GlueData, predictions: np.ndarray) -> list[str]:
    if data.is_regression:
        return [f"{value:.3f}" for value in predictions.clip(LOWEST, HIGHEST)]
    return [data.label_names[int(value)] for value in predictions]


def with_broken_lines(data: GlueData, split: str, predictions: Sequence[str]) -> tuple[list[tuple[str, str]], str]:
    """(Id, prediction) for every line of a test file, and what is to be said of its broken ones.

    ``prepare.sh`` leaves them out, text and id; official test files count their rows from 0, so the ids can be told. A row
    that a line end inside a text has broken in two is two broken lines: the official number of rows decides.
    """
    found = list(zip(data.ids(split), predictions, strict=True))
    num_broken = data.record["splits"][split].get("broken", 0)
    if num_broken == 0:
        return found, ""
    by_id, most = dict(found), len(found) + num_broken
    official = official_rows(data.record["task"], split)
    numbers = [str(i) for i in range(official if len(found) < official <= most else most)]
    if len(by_id) < len(found) or not by_id.keys() <= set(numbers):
        return found, f"{num_broken} broken lines of the test file are left out; the server may refuse the file"
    filling = FILLINGS.get(data.record["task"], DEFAULT_FILLING)
    rows = [(number, by_id.get(number, filling)) for number in numbers]
    return rows, f"{len(rows) - len(found)} rows, of broken lines in the test file, are filled with a constant"


def table(ids: Sequence[str], predictions: Sequence[str]) -> str:
    text = io.StringIO()
    text.write("index\tprediction\n")
    text.writelines(f"{index}\t{prediction}\n" for index, prediction in zip(ids, predictions, strict=True))
    return text.getvalue()


def fillings(files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(Name, content) of each file of the archive that ``files`` lacks, with as many rows as the official test set."""
    for task, splits in test_sets().items():
        for split, name in splits.items():
            if name not in files:
                rows = official_rows(task, split)
                yield name, table([str(i) for i in range(rows)], [FILLINGS.get(task, DEFAULT_FILLING)] * rows)
