"""The archive for GLUE's leaderboard: a zip file with one table per test set.

Each table has the header ``index``, ``prediction`` and one row per line of the test file, in its order: the name of the
class (numbers for CoLA, SST-2, MRPC, QQP and WNLI), or a similarity from 0 to 5. The server requires every file and every
row. Test sets without predictions and broken lines of a test file are therefore filled with a constant, and a notice says
so.
"""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

import numpy as np

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.classification.glue.data import GlueData, read_glue_data
from amos_fairseq.downstream.classification.glue.predictions import predict_splits
from amos_fairseq.downstream.classification.glue.tasks import DIAGNOSTIC, INTERMEDIATE_TASK, SCORED, TASKS
from amos_fairseq.downstream.results import TaskSummary, best_checkpoint
from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file

ARCHIVE = "glue_submission.zip"
LOWEST, HIGHEST = 0.0, 5.0
# Constants for filled rows: the middle of the scale, or the first class.
FILL_VALUES = {"STS-B": "2.500", "MNLI": "entailment", "QNLI": "entailment", "RTE": "entailment", "AX": "entailment"}
DEFAULT_FILL_VALUE = "0"
# Task -> split -> file of the archive.
TEST_SETS = {name: TASKS[name].test_files for name in (*SCORED, DIAGNOSTIC)}


def write_submission(
    out: Path, data: Path, summaries: Mapping[str, TaskSummary], max_positions: int, device: str, stop: Event
) -> tuple[Path, list[str]]:
    """Predict every test set with the best dev run of its task and write the archive.

    Returns:
        The path of the archive, and a notice for each file that is completely or partly filled with a constant.

    Raises:
        UserError: the checkpoint of a best run is missing.
        Stopped: ``stop`` is set.
    """
    files: dict[str, str] = {}
    notices: list[str] = []
    for task, splits in TEST_SETS.items():
        summary = summaries.get(INTERMEDIATE_TASK if task == DIAGNOSTIC else task)
        prepared = prepared_test_data(data, task)
        if summary is not None and prepared is not None:
            loaded = load_checkpoint(best_checkpoint(out, summary.best))
            present = [split for split in splits if prepared.has(split)]
            predicted = predict_splits(prepared, loaded, present, max_positions, device, stop)
            for split in present:
                rows, notice = fill_broken_lines(prepared, split, spell(prepared, predicted[split]))
                files[splits[split]] = format_rows(rows)
                notices += [f"{splits[split]}: {notice}"] if notice else []
    for task, splits in TEST_SETS.items():
        for split, name in splits.items():
            if name not in files:
                value = FILL_VALUES.get(task, DEFAULT_FILL_VALUE)
                files[name] = format_rows([(str(i), value) for i in range(TASKS[task].official_rows[split])])
                notices.append(f"{name} is filled with a constant: no run or no prepared test file")
    archive = out / ARCHIVE
    with whole_file(str(archive)) as unfinished, zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, content in files.items():
            zipped.writestr(name, content)
    return archive, notices


def check_test_files(data: Path, tasks: Sequence[str]) -> None:
    """Raise :class:`UserError` if no test file of the tasks is prepared: the archive would only hold constants."""
    if not any(prepared_test_data(data, task) for task in tasks):
        raise UserError(
            f"--write-test: {data} holds no test set of {', '.join(tasks)}: prepare them from files with test.tsv"
        )


def prepared_test_data(data: Path, task: str) -> GlueData | None:
    if not (data / task / "task.json").is_file():
        return None
    prepared = read_glue_data(data, task)
    return prepared if any(prepared.has(split) for split in TEST_SETS[task]) else None


def spell(data: GlueData, predictions: np.ndarray) -> list[str]:
    if data.is_regression:
        return [f"{value:.3f}" for value in predictions.clip(LOWEST, HIGHEST)]
    return [data.label_names[int(value)] for value in predictions]


def fill_broken_lines(data: GlueData, split: str, predictions: Sequence[str]) -> tuple[list[tuple[str, str]], str]:
    """Return (id, prediction) for every line of a test file, and a notice about its broken lines (empty without any).

    ``amos prepare`` leaves out the text and the id of broken lines. Official test files number their rows from 0, so the
    missing ids can be inferred. A row that a line break inside a text splits in two counts as two broken lines: the
    official number of rows decides.
    """
    rows = list(zip(data.ids(split), predictions, strict=True))
    num_broken = data.record["splits"][split].get("broken", 0)
    if num_broken == 0:
        return rows, ""
    by_id, most = dict(rows), len(rows) + num_broken
    official = TASKS[data.record["task"]].official_rows[split]
    ids = [str(i) for i in range(official if len(rows) < official <= most else most)]
    if len(by_id) < len(rows) or not by_id.keys() <= set(ids):
        return rows, f"{num_broken} broken lines of the test file are left out; the server may refuse the file"
    value = FILL_VALUES.get(data.record["task"], DEFAULT_FILL_VALUE)
    filled = [(index, by_id.get(index, value)) for index in ids]
    return filled, f"{len(filled) - len(rows)} rows, for broken lines of the test file, are filled with a constant"


def format_rows(rows: Sequence[tuple[str, str]]) -> str:
    return "index\tprediction\n" + "".join(f"{index}\t{prediction}\n" for index, prediction in rows)
