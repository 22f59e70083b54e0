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

    A table has the rows of the official file, numbered from 0: the name of the class, or a similarity from 0 to 5. The server
    requires every file and every row: those without a prediction, such as broken lines, which ``amos prepare`` leaves out, have
    the first class, or the middle of the scale. There is a notice for each such file.
    """
    tables, notices = {}, []
    for name, task in TASKS.items():
        summary = summaries.get(INTERMEDIATE_TASK if name == DIAGNOSTIC else name)
        loaded = prepared = None
        if summary is not None and has_test_set(data, name):
            loaded, prepared = load_checkpoint(best_checkpoint(out, summary.best)), read_glue_data(data, name)
        for split, file in task.test_files.items():
            predicted: dict[str, str] = {}
            if prepared is not None and split in prepared.record["splits"]:
                values = prepared.predict(loaded, split, max_positions, device, stop)
                if prepared.kind == "number":
                    spelled = [f"{value:.3f}" for value in values.clip(0, LARGEST_SCORE)]
                else:
                    spelled = prepared.spell(values)
                predicted = dict(zip(prepared.ids(split), spelled, strict=True))
            constant, ids = task.labels[0] if task.labels else "2.500", list(map(str, range(task.official_rows[split])))
            tables[file] = {index: predicted.get(index, constant) for index in ids}
            if missing := sum(index not in predicted for index in ids):
                notices.append(
                    f"{file}: {missing:,} of {len(ids):,} rows have no prediction and are filled with a constant"
                )
    archive = out / ARCHIVE
    with whole_file(str(archive)) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as zipped:
        for file, table in tables.items():
            rows = [f"{index}\t{prediction}\n" for index, prediction in table.items()]
            zipped.writestr(file, "index\tprediction\n" + "".join(rows))
    return archive, notices
