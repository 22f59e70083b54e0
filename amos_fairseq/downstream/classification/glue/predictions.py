"""Predictions and scores of GLUE's splits with a fine-tuned checkpoint, and the archive for the leaderboard."""

import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.downstream.classification.glue.data import GlueData, read_glue_data
from amos_fairseq.downstream.classification.glue.tasks import (
    DIAGNOSTIC,
    INTERMEDIATE_TASK,
    LARGEST_SCORE,
    TASK_FILE,
    TASKS,
    GlueTask,
    is_test,
)
from amos_fairseq.downstream.classification.labeling import predict_logits, spell_predictions
from amos_fairseq.downstream.classification.scores import correlation, predictions_of, text_scores
from amos_fairseq.downstream.results import TaskSummary, best_checkpoint
from amos_fairseq.files import whole_file, write_text

ARCHIVE = "glue_submission.zip"
POSITIVE_CLASS = 1  # "1" of MRPC and QQP: a paraphrase


def predict(
    data: GlueData, loaded: LoadedCheckpoint, split: str, max_positions: int, device: str, stop: threading.Event
) -> np.ndarray:
    """Predict a split with a fine-tuned checkpoint: class indices [N] int64, or values of a regression [N] float64.

    The diagnostic set is predicted by the head of MNLI.
    """
    rows = data.inputs(split, max_positions, loaded.separator)
    task = INTERMEDIATE_TASK if data.name == DIAGNOSTIC else data.name
    logits = predict_logits(loaded, [rows[index] for index in range(len(rows))], device, stop, task)
    return predictions_of(data.record["kind"], logits)


def write_prediction_table(file: Path, data: GlueData, split: str, predictions: np.ndarray, labels: np.ndarray) -> None:
    rows = zip(data.ids(split), spell(data, predictions), spell(data, labels), strict=True)
    write_text(file, "index\tprediction\tlabel\n" + "".join("\t".join(row) + "\n" for row in rows))


def spell(data: GlueData, values: np.ndarray) -> list[str]:
    """Return predictions or labels as cells of a table: classes by name, values of STS-B with four decimals, others as those of
    ``amos classify``."""
    if data.name in TASKS and data.is_regression:
        return [f"{value:.4f}" for value in values]
    return spell_predictions(data.record["kind"], data.label_names, values)


def score_split(data: GlueData, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Score one dev split: GLUE's by :func:`score`, tasks of one's own by
    :func:`~amos_fairseq.downstream.classification.scores.text_scores`."""
    if data.name in TASKS:
        return score(TASKS[data.name], predictions, labels)
    return text_scores(data.record["kind"], predictions, labels)


def score(task: GlueTask, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Score one dev split with scikit-learn and scipy, in percent.

    Args:
        predictions, labels: [N] class indices, or values of a regression.

    Returns:
        ``matthews`` and ``accuracy`` for CoLA; ``spearman`` and ``pearson`` for STS-B; ``accuracy`` for the others, with
        ``f1`` of the positive class for MRPC and QQP.
    """
    if task.main_score == "spearman":
        return {
            "spearman": 100 * correlation(spearmanr, predictions, labels),
            "pearson": 100 * correlation(pearsonr, predictions, labels),
        }
    scores = {"accuracy": 100 * float(accuracy_score(labels, predictions))}
    if task.main_score == "matthews":
        scores = {"matthews": 100 * float(matthews_corrcoef(labels, predictions)), **scores}
    if task.with_f1:
        # 0 if neither labels nor predictions have a positive, as for any model that finds no positive.
        scores["f1"] = 100 * float(f1_score(labels, predictions, pos_label=POSITIVE_CLASS, zero_division=0))
    return scores


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

    A table has the header ``index``, ``prediction`` and one row per line of the test file, in its order: the name of the class
    (numbers for CoLA, SST-2, MRPC, QQP and WNLI), or a similarity from 0 to 5. The server requires every file and every row:
    test sets without predictions and broken lines are filled with the first class, or the middle of the scale.

    Returns:
        The path of the archive, and a notice for each file that is completely or partly filled.
    """
    tables, notices = {}, []
    for name, task in TASKS.items():
        summary = summaries.get(INTERMEDIATE_TASK if name == DIAGNOSTIC else name)
        loaded = prepared = None
        if summary is not None and has_test_set(data, name):
            loaded, prepared = load_checkpoint(best_checkpoint(out, summary.best)), read_glue_data(data, name)
        for split, file in task.test_files.items():
            constant, official = task.labels[0] if task.labels else "2.500", task.official_rows[split]
            if prepared is None or not prepared.has(split):
                tables[file] = {str(index): constant for index in range(official)}
                notices.append(f"{file} is filled with a constant: no run or no prepared test file")
                continue
            predictions = predict(prepared, loaded, split, max_positions, device, stop)
            spelled = spell(prepared, predictions)
            if prepared.is_regression:
                spelled = [f"{value:.3f}" for value in predictions.clip(0, LARGEST_SCORE)]
            tables[file] = dict(zip(prepared.ids(split), spelled, strict=True))
            broken = prepared.record["splits"][split].get("broken", 0)
            if broken:
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
