"""The table of GLUE, a row with the tasks of a checkpoint, their average, and SQuAD; and the archive for its leaderboard,
predictions of the test sets by the best run of each task."""

import statistics
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.texts.command import HEADINGS, TextData
from amos_fairseq.downstream.texts.glue.tasks import AVERAGED, LARGEST_SCORE, SCORED, TASKS, is_test
from amos_fairseq.experiments.records import NO_CONSTANTS, ConstantScores, Summaries, Summary, format_spread
from amos_fairseq.files import whole_file
from amos_fairseq.output.tables import MISSING, Table, format_score

CONSTANT = "most frequent class, or mean"


def average(medians: Mapping[str, float]) -> tuple[str, float | None]:
    """Return name and value of the mean of the tasks' medians, with MNLI's matched set as in AMOS Table 1.

    If some of the eight tasks are missing, the name states the number of tasks. WNLI never counts.
    """
    counted = [medians[task] for task in AVERAGED if task in medians]
    if not counted:
        return "AVG", None
    name = "AVG" if len(counted) == len(AVERAGED) else f"AVG of {len(counted)}"
    return name, statistics.fmean(counted)


def glue_table(
    row_name: str,
    summaries: Summaries,
    constants: Mapping[str, ConstantScores],
    squad: Summary | None,
    notes: Sequence[str],
    names: Sequence[str] = SCORED,
) -> Table:
    """Build the table with the rows of the checkpoint and of constant predictions; ``squad``: ``squad.json`` for the same
    checkpoint."""
    columns, row, constant_row, constant_scores = [""], [row_name], [CONSTANT], {}
    for task in names:
        if task in summaries:
            score, scores = summaries[task].main_score, summaries[task].scores
            columns.append(task_heading(task, score))
            shown = [each for each in (score, f"{score}_mm") if each in scores]
            row.append(" / ".join(format_spread(scores[each]) for each in shown) or MISSING)
            of_constant = next(iter(constants.get(task, NO_CONSTANTS).scores.values()), {})
            constant_row.append(" / ".join(format_score(of_constant.get(each)) for each in shown) or MISSING)
            if score in of_constant:
                constant_scores[task] = of_constant[score]
    average_name, value = average({task: summary.main.median for task, summary in summaries.items()})
    columns, row = [*columns, average_name], [*row, format_score(value)]
    constant_row.append(format_score(average(constant_scores)[1]))
    if squad and squad.tasks:
        task = next(iter(squad.tasks))  # of the version that was run last
        columns += [f"{task} {score}" for score in ("EM", "F1")]
        row += [format_spread(squad.tasks[task].scores.get(name)) for name in ("em", "f1")]
        constant_row += [MISSING, MISSING]
    return Table("GLUE dev", columns, [row, constant_row], notes)


def task_heading(task: str, score: str) -> str:
    if task == "MNLI":
        return "MNLI m/mm"
    return task if score == "accuracy" else f"{task} ({HEADINGS[score]})"


ARCHIVE = "glue_submission.zip"


def has_test_set(data: TextData) -> bool:
    return any(map(is_test, data.record["splits"]))


def write_submission(
    out: Path,
    prepared: Mapping[str, TextData],
    summaries: Summaries,
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
        summary, data, loaded = summaries.get(task.head), prepared.get(name), None
        if summary is not None and data is not None and has_test_set(data):
            loaded = load_checkpoint(summary.best.checkpoint_in(out))
        for split, file in task.test_files.items():
            predicted: dict[str, str] = {}
            if loaded is not None and split in data.record["splits"]:
                values = data.predict(loaded, split, max_positions, device, stop)
                if data.kind == "number":
                    spelled = [f"{value:.3f}" for value in values.clip(0, LARGEST_SCORE)]
                else:
                    spelled = data.spell(values)
                predicted = dict(zip(data.ids(split), spelled, strict=True))
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
