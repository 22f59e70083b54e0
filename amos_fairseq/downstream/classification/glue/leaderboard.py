"""The archive for GLUE's leaderboard: predictions of the test sets by the best run of each task."""

import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.classification.benchmark import read_glue_data
from amos_fairseq.downstream.classification.glue.tasks import (
    DIAGNOSTIC,
    INTERMEDIATE_TASK,
    LARGEST_SCORE,
    TASK_FILE,
    TASKS,
    is_test,
)
from amos_fairseq.downstream.results import TaskSummary, best_checkpoint
from amos_fairseq.files import whole_file

ARCHIVE = "glue_submission.zip"


def has_test_set(data: Path, task: str) -> bool:
    """Return whether a test set of the task is among the prepared data."""
    return (data / task / TASK_FILE).is_file() and any(map(is_test, read_glue_data(data, task).record["splits"]))


def write_submission(
    out: Path,
    data: Path,
    summaries: Mapping[str, TaskSummary],
    max_positions: int,
    device: str,
    stop: threading.Event,
) -> tuple[Path, list[str]]:
    """Predict every test set with the best dev run of its task, and write a zip file with a table for each.

    A table has one row per line of the test file, in its order: the name of the class, or a similarity from 0 to 5. The server
    requires every file and every row: test sets without predictions and broken lines are filled with the first class, or the
    middle of the scale. There is a notice for each of them.
    """
    tables, notices = {}, []
    for name, task in TASKS.items():
        summary = summaries.get(INTERMEDIATE_TASK if name == DIAGNOSTIC else name)
        loaded = prepared = None
        if summary is not None and has_test_set(data, name):
            loaded, prepared = load_checkpoint(best_checkpoint(out, summary.best)), read_glue_data(data, name)
        for split, file in task.test_files.items():
            constant, official = task.labels[0] if task.labels else "2.500", task.official_rows[split]
            if prepared is None or split not in prepared.record["splits"]:
                tables[file] = {str(index): constant for index in range(official)}
                notices.append(f"{file} is filled with a constant: no run or no prepared test file")
                continue
            predictions = prepared.predict(loaded, split, max_positions, device, stop)
            if prepared.kind == "number":
                spelled = [f"{value:.3f}" for value in predictions.clip(0, LARGEST_SCORE)]
            else:
                spelled = prepared.spell(predictions)
            tables[file] = dict(zip(prepared.ids(split), spelled, strict=True))
            if broken := prepared.record["splits"][split].get("broken", 0):
                notices.append(f"{file}: {fill_broken_lines(tables[file], broken, official, constant)}")
    archive = out / ARCHIVE
    with whole_file(str(archive)) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as zipped:
        for file, table in tables.items():
            rows = [f"{index}\t{prediction}\n" for index, prediction in table.items()]
            zipped.writestr(file, "index\tprediction\n" + "".join(rows))
    return archive, notices


def fill_broken_lines(table: dict[str, str], broken: int, official: int, constant: str) -> str:
    """Add the rows of broken lines of a test file to its predictions by id; return a notice.

    ``amos prepare`` leaves out text and id of broken lines. Official files number their rows from 0. A row that a line break
    inside a text splits in two counts as two broken lines: the ``official`` number of rows decides.
    """
    size, most = len(table), len(table) + broken
    ids = [str(index) for index in range(official if size < official <= most else most)]
    if not table.keys() <= set(ids):
        return f"{broken} broken lines of the test file are left out; the server may refuse the file"
    filled = {index: table.get(index, constant) for index in ids}
    table.clear()
    table.update(filled)
    return f"{len(ids) - size} rows, for broken lines of the test file, are filled with a constant"
