"""``amos glue``: GLUE's tasks, fine-tuned one by one or in one model; the table of AMOS (a row with the tasks of a checkpoint,
their average, and SQuAD); and the leaderboard's archive, predictions of the test sets by the best run of each task."""

import argparse
import contextlib
import statistics
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.downstream.labeled_task import AVERAGE, check_epoch, rows_per_epoch
from amos_fairseq.downstream.texts.command import TextBenchmark, TextData, read_text_data
from amos_fairseq.downstream.texts.glue.prepare import prepare_glue_inside
from amos_fairseq.downstream.texts.glue.tasks import (
    AVERAGED,
    DIAGNOSTIC,
    LARGEST_SCORE,
    SCORED,
    TASKS,
    has_any_file,
    is_test,
    tasks_in,
)
from amos_fairseq.downstream.texts.scores import HEADINGS, average_score, predictions_of
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.benchmark import BenchmarkTask, Session, TaskRun, session_from, usable_folder
from amos_fairseq.experiments.records import (
    NO_CONSTANTS,
    ConstantScores,
    RunResult,
    Summaries,
    Summary,
    TaskSummary,
    content_sha256,
    divide,
    format_spread,
    read_summary,
    summarize_divided,
)
from amos_fairseq.experiments.table import run_and_print
from amos_fairseq.files import TOKENIZER_DIRECTORY, file_sha256, json_text, whole_file, write_text
from amos_fairseq.output.terminal import MISSING, Table, format_score, say
from amos_fairseq.untrusted import read_json

TEACHER_FILE = "teacher.npy"  # in the directory of a run
ARCHIVE = "glue_submission.zip"
CONSTANT = "most frequent class, or mean"
# What --write-train writes, and --teachers reads. TASK.tsv has a row for each training row, in their order: its number from 0
# on, and the probability of each label, or the number that is predicted. TASK.json beside it says which rows they are.
INDEX, NUMBER = "index", "score"  # columns
FOLDER = "train"  # in the directory of a run
MULTI = "multi"  # the name of the run of all tasks


def write_train_predictions(directory: Path, data: TextData, logits: np.ndarray) -> None:
    """Write ``TASK.tsv`` and ``TASK.json``; ``logits``: [N, outputs] in the order of the training rows."""
    values = softmax(logits, axis=1) if data.kind == "classes" else logits
    lines = ("\t".join([str(index), *(f"{value:.7g}" for value in row)]) for index, row in enumerate(values))
    directory.mkdir(exist_ok=True)
    file = directory / f"{data.name}.tsv"
    write_text(file, "\n".join(["\t".join([INDEX, *(data.label_names or [NUMBER])]), *lines, ""]))
    write_text(file.with_suffix(".json"), json_text(data.rows_identity()))


def read_predictions(file: Path, data: TextData) -> tuple[np.ndarray, str]:
    """Return the predictions of another model for the training rows of ``data``, [rows, outputs] float32, and their sha256."""
    is_same = read_json(file.with_suffix(".json"), "write it again with --write-train") == data.rows_identity()
    values = np.empty((0, 0))
    with contextlib.suppress(ValueError):  # of a damaged file
        values = np.loadtxt(file, delimiter="\t", skiprows=1, ndmin=2)[:, 1:]
    if not is_same or len(values) != data.num_train:
        raise UserError(f"{file} is damaged, or for other rows: give the same files, or repeat --write-train")
    if data.kind == "classes":  # seven digits are written
        values = values / values.sum(axis=1)[:, None]
    return values.astype(np.float32), file_sha256(file)


@dataclass
class Teachers:
    """The predictions that train beside the labels, of each task by seed: each seed learns from the same seed."""

    folder: Path
    files: dict[str, dict[int, Path]]
    _read: dict[Path, tuple[np.ndarray, str]] = field(default_factory=dict)  # each file is read once

    def predictions(self, data: TextData, seed: int) -> tuple[np.ndarray, str]:
        """Return what :func:`read_predictions` returns of the file that a run of this seed learns from."""
        file = self.files.get(data.name, {}).get(seed)
        if file is None:
            known = ", ".join(f"{task} (seeds {', '.join(map(str, seeds))})" for task, seeds in self.files.items())
            raise UserError(
                f"--teachers {self.folder} has no predictions for {data.name} of seed {seed}; it has {known}"
            )
        if file not in self._read:
            self._read[file] = read_predictions(file, data)
        return self._read[file]

    def identity(self, tasks: Sequence[TextData], seed: int) -> dict[str, Any]:
        """Return what of the teachers determines the result of a run, as plain values."""
        return {"teachers_sha256": content_sha256({data.name: self.predictions(data, seed)[1] for data in tasks})}


def read_teachers(folder: Path) -> Teachers:
    """Find the teachers in ``--out`` of ``amos glue --write-train``."""
    summary, files = read_summary(folder, "glue", "amos glue"), {}
    for run in summary.runs if summary else ():
        file = folder / run.directory / FOLDER / f"{run.task}.tsv"
        if run.trial == summary.tasks[run.task].trial and file.is_file():
            files.setdefault(run.task, {})[run.seed] = file
    if not files:
        raise UserError(f"--teachers {folder} holds no predictions of training rows: make them with --write-train")
    return Teachers(folder.resolve(), files)


@dataclass(frozen=True)
class GlueOptions:
    """The options of the command besides its tasks."""

    teachers: Teachers | None = None
    with_train: bool = False  # write the predictions of the rows to train on, for students
    with_test: bool = False
    multi_task: bool = False  # one model for all tasks


def main(arguments: argparse.Namespace) -> None:
    data = Path(arguments.data)
    is_raw = any(has_any_file(data, task) for task in TASKS.values())  # else what amos prepare glue wrote
    tasks = tasks_to_run(arguments.tasks, data, is_raw)
    if arguments.write_test and is_there(DIAGNOSTIC, data, is_raw):
        tasks.append(DIAGNOSTIC)
    session = session_from(arguments)
    folders = {name: data / name for name in tasks}
    if is_raw:
        with session.preparing() as tokenizer:
            folders = {name: prepare_glue_inside(session.out, data, name, tokenizer) for name in tasks}
    options = GlueOptions(
        teachers=arguments.teachers and read_teachers(arguments.teachers),
        with_train=arguments.write_train,
        with_test=arguments.write_test,
        multi_task=arguments.multi_task,
    )
    run_and_print(open_glue(session, folders, options))


def tasks_to_run(names: str, data: Path, is_raw: bool) -> list[str]:
    return tasks_in(data, names, SCORED, AVERAGED, lambda task: is_there(task, data, is_raw), "fine-tuned")


def is_there(task: str, data: Path, is_raw: bool) -> bool:
    return has_any_file(data, TASKS[task]) if is_raw else (data / task).is_dir()


def open_glue(session: Session, folders: Mapping[str, Path], options: GlueOptions = GlueOptions()) -> "Glue":
    """Read the prepared data ``folders``, by task, and everything that the options name; what cannot be used is refused before
    any training."""
    squad = read_summary(session.out, "squad", "amos squad")
    weights = {"sha256": session.checkpoint.sha256, "from_scratch": session.checkpoint.from_scratch}
    if squad is not None and not weights.items() <= squad.checkpoint.items():
        squad = None
    prepared = {name: read_text_data(folder.resolve()) for name, folder in folders.items()}
    for data in prepared.values():
        session.checkpoint.check_tokenizer(data.directory / TOKENIZER_DIRECTORY)
    first, diagnostic = next(iter(prepared.values())).directory, prepared.pop(DIAGNOSTIC, None)
    benchmark = MultiTaskGlue if options.multi_task else Glue
    glue = benchmark(session, first, {}, prepared, options, squad, diagnostic)
    glue.tasks = glue.make_tasks()
    if options.teachers is not None:
        say("reads the predictions of the teachers", Glue.name)
        for seed in session.seeds:
            options.teachers.identity(list(prepared.values()), seed)
    if options.with_test and not any(map(has_test_set, prepared.values())):
        raise UserError(f"--write-test: there is no test set of {', '.join(prepared)}: prepare files with test.tsv")
    return glue


@dataclass
class Glue(TextBenchmark):
    """Prepared tasks, and the table of AMOS: eight tasks, their average, and SQuAD next to them."""

    options: GlueOptions
    squad: Summary | None
    diagnostic: TextData | None = None  # a test set that MNLI's model predicts

    name = "glue"

    @property
    def model_name(self) -> str:
        return self.session.row_name

    def make_tasks(self) -> dict[str, BenchmarkTask]:
        trials_of = self.session.recipe.trials_of
        return {task: data.as_task(self.max_positions, trials_of(task)) for task, data in self.prepared.items()}

    def more_settings(self, task: str, seed: int) -> dict[str, Any]:
        """Return what the teachers of a run predict. A run with ``--write-train`` is another one than without, which has no
        such files."""
        teachers, settings = self.options.teachers, {"write_train": True} if self.options.with_train else {}
        return settings if teachers is None else settings | teachers.identity(self.tables_of(task), seed)

    def train_flags(self, run: TaskRun) -> list[str]:
        flags = super().train_flags(run)
        if self.options.teachers is not None:
            flags += ["--teacher", str(run.directory / TEACHER_FILE)]
            flags += ["--max-update", str(run.schedule.total_updates)]  # until which the weight of the labels rises
        return flags

    def fill_directory(self, run: TaskRun) -> None:
        """Write the predictions of the teachers for all rows of a run, too, as one array: float32, [rows, outputs] of one task
        after the other in one dimension."""
        super().fill_directory(run)
        if (teachers := self.options.teachers) is None:
            return
        tables = self.tables_of(run.task.name)
        array = np.concatenate([teachers.predictions(data, run.seed)[0].ravel() for data in tables])
        with whole_file(str(run.directory / TEACHER_FILE)) as unfinished:
            np.save(unfinished, array, allow_pickle=False)

    def evaluate_table(
        self, data: TextData, prefix: str, loaded: LoadedCheckpoint, device: str, stop: threading.Event
    ) -> dict[str, float]:
        if self.options.with_train:
            logits = data.logits(loaded, "train", self.max_positions, device, stop)
            write_train_predictions(loaded.file.parent / FOLDER, data, logits)
        return super().evaluate_table(data, prefix, loaded, device, stop)

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterator[str]:
        if self.options.teachers is not None:
            folder = self.options.teachers.folder.name
            yield f"taught by {folder}, each seed by the same seed; weight of the labels: from 0 to 1 over the updates"
        if self.squad:
            yield from (f"SQuAD: {note}" for note in self.squad.notes)

    def table(self, summaries: Summaries, constants: Mapping[str, ConstantScores], notes: Sequence[str]) -> Table:
        return glue_table(self.model_name, summaries, constants, self.squad, notes)

    def average(self, summaries: Summaries) -> dict[str, Any]:
        name, value = average({task: summary.main.median for task, summary in summaries.items()})
        return {"name": name, "value": value}

    def write_more(self, summaries: Summaries, stop: threading.Event) -> tuple[Sequence[Path], Sequence[str]]:
        if not self.options.with_test:
            return (), ()
        out, device = self.session.out, self.session.devices[0]
        prepared = dict(self.prepared) | ({} if self.diagnostic is None else {DIAGNOSTIC: self.diagnostic})
        archive, notices = write_submission(out, prepared, summaries, self.max_positions, device, stop)
        return [archive], notices


class MultiTaskGlue(Glue):
    """One model for all tasks, with a head for each (thesis, chapter 3). Their scores are shown as those of single tasks; the
    weights that are kept are those of the run with the highest average (section 3.4: "the highest average dev set score"):
    :func:`~amos_fairseq.downstream.texts.scores.average_score`."""

    trained_as = "multi_task"

    def make_tasks(self) -> dict[str, BenchmarkTask]:
        for data in self.prepared.values():
            usable_folder(data.directory)
        trials = self.session.recipe.trials_of(MULTI)
        tasks = [data.as_task(self.max_positions, trials) for data in self.prepared.values()]
        num_rows = sum(rows_per_epoch([task.num_examples for task in tasks]))
        check_epoch(num_rows, max(trial.batch_size for trial in trials))
        sha256 = content_sha256({task.name: [task.data_sha256, task.num_examples] for task in tasks})
        notes = tuple(note for task in tasks for note in task.notes)
        return {MULTI: BenchmarkTask(MULTI, num_rows, AVERAGE, sha256, trials, notes, continues_across_epochs=True)}

    @property
    def model_name(self) -> str:
        return f"{super().model_name}, one model for all tasks"

    def tables_of(self, task: str) -> list[TextData]:
        return list(self.prepared.values())

    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Return the scores of all tasks, each with the name of its task before it, and their ``average``."""
        all_scores, mains, loaded = {}, {}, load_checkpoint(checkpoint)
        for name, data in self.prepared.items():
            scores = self.evaluate_table(data, f"{name}.", loaded, device, stop)
            all_scores |= {f"{name} {score}": value for score, value in scores.items()}
            mains[name] = scores[data.main_score]
        return {AVERAGE: average_score(mains, AVERAGED)} | all_scores

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        """Return a result for each task of each run. Trial and best run are those of the average."""
        main_scores = {name: data.main_score for name, data in self.prepared.items()}
        return summarize_divided(results, lambda result: divide(result, main_scores))


def average(medians: Mapping[str, float]) -> tuple[str, float | None]:
    """Return name and value of the mean of the tasks' medians, with MNLI's matched set as in AMOS Table 1. If some of the eight
    tasks are missing, the name states their number. WNLI never counts."""
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
) -> Table:
    """Build the table with the rows of the checkpoint and of constant predictions; ``squad``: for the same checkpoint."""
    columns, row, constant_row, constant_scores = [""], [row_name], [CONSTANT], {}
    for task in SCORED:
        if task in summaries:
            score, scores = summaries[task].main_score, summaries[task].scores
            columns.append(task_heading(task, score))
            shown = [each for each in (score, f"{score}_mm") if each in scores]
            row.append(" / ".join(format_spread(scores[each]) for each in shown) or MISSING)
            baseline = next(iter(constants.get(task, NO_CONSTANTS).scores.values()), {})
            constant_row.append(" / ".join(format_score(baseline.get(each)) for each in shown) or MISSING)
            if score in baseline:
                constant_scores[task] = baseline[score]
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
                values = predictions_of(data.kind, data.logits(loaded, split, max_positions, device, stop))
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
