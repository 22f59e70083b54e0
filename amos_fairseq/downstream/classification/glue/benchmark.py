"""GLUE: the task ``text_classification`` trains; this file runs, scores and shows it as AMOS does."""

import shutil
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.downstream.benchmark import (
    IDENTITY_FILE,
    Benchmark,
    BenchmarkTask,
    Failure,
    TaskRun,
    plan_runs,
    selection_flags,
)
from amos_fairseq.downstream.classification.command import HEADINGS
from amos_fairseq.downstream.classification.command import NAME as CLASSIFICATION
from amos_fairseq.downstream.classification.glue.data import GlueData, read_glue_data, read_task_data
from amos_fairseq.downstream.classification.glue.differences import GlueResults, difference_table, read_results_of_glue
from amos_fairseq.downstream.classification.glue.leaderboard import check_test_files, write_submission
from amos_fairseq.downstream.classification.glue.predictions import (
    predict_splits,
    predict_train,
    score_split,
    write_prediction_table,
)
from amos_fairseq.downstream.classification.glue.tasks import (
    AVERAGED,
    INTERMEDIATE_FOR,
    INTERMEDIATE_TASK,
    SCORED,
    TASK_FILE,
    TASKS,
)
from amos_fairseq.downstream.multi_task.teachers import FOLDER as TRAIN_FOLDER
from amos_fairseq.downstream.multi_task.teachers import (
    Teachers,
    columns_of,
    has_train_predictions,
    write_train_predictions,
)
from amos_fairseq.downstream.recipes import Hyperparameters
from amos_fairseq.downstream.results import (
    RunResult,
    Summary,
    TaskSummary,
    best_checkpoint,
    format_spread,
    paper_results,
    paper_squad_cells,
    read_optional_json,
    read_result,
    read_results,
    read_summary,
    summarize,
)
from amos_fairseq.downstream.session import Session
from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file
from amos_fairseq.models.configuration import LAST_LAYER
from amos_fairseq.output.tables import MISSING, Table, format_score
from amos_fairseq.output.terminal import say

TEACHER_FILE = "teacher.npy"  # in the directory of a run
DIFFERENCES = "glue_differences"


@dataclass(frozen=True)
class GlueOptions:
    """What else than its tasks a table of GLUE has.

    Attributes:
        own: prepared directories of the user's own tasks by name, which are run beside GLUE's.
        max_rows: number of rows of a task to train on, if it has more.
        teachers: predictions that train beside the labels.
        with_train: write the predictions of the rows to train on, for students.
        beside: outputs of other calls, whose results are rows of the table, and are compared with.
        intermediate: OUT of the MNLI runs that RTE, STS-B and MRPC start from; it may be the session's own.
        squad: directory with ``squad.json``; None for OUT, where it may be missing.
        with_paper: add the papers' rows to the table.
        with_test: predict the test sets and write the leaderboard's archive.
    """

    own: Mapping[str, Path] = field(default_factory=dict)
    max_rows: int | None = None
    teachers: Teachers | None = None
    with_train: bool = False
    beside: Sequence[Path] = ()
    intermediate: Path | None = None
    squad: Path | None = None
    with_paper: bool = False
    with_test: bool = False


NO_OPTIONS = GlueOptions()


class Glue(Benchmark):
    """Prepared tasks in one directory, and the table of AMOS: eight tasks, their average, and SQuAD next to them.

    Args:
        data: directory with a folder for each of GLUE's tasks, and ``tokenizer/``.
        tasks: those of GLUE to run.

    Raises:
        UserError: an argument cannot be used; the recipe lacks a task; a task has not been prepared, or with a tokenizer
            other than the checkpoint's.
    """

    name = "glue"

    def __init__(self, session: Session, data: Path, tasks: Sequence[str], options: GlueOptions = NO_OPTIONS) -> None:
        self.session, self.options = session, options
        self.squad = squad_of_same_weights(options.squad or session.out, session.origin)
        if options.squad is not None and self.squad is None:
            raise UserError(f"{options.squad} holds no results of amos squad: give that command's --out as --squad")
        if not data.is_dir():
            raise UserError(f"{data} is not a directory: give that of GLUE's official files, or of amos prepare glue")
        self.data, self.max_positions = data.resolve(), session.checkpoint.max_positions
        self.prepared = {task: read_glue_data(self.data, task, options.max_rows) for task in tasks}
        session.checkpoint.check_tokenizer(self.data / "tokenizer")
        for name, directory in options.own.items():
            self.prepared[name] = read_task_data(directory.resolve(), name, "repeat the command", options.max_rows)
            session.checkpoint.check_tokenizer(directory / "tokenizer")
        self.tasks = self._make_tasks()
        if options.teachers is not None:  # a missing or other one is reported before any training
            say("reads the predictions of the teachers", self.name)
            for seed in session.seeds:
                options.teachers.identity(list(self.prepared.values()), seed)
        self.others = [read_results_of_glue(folder) for folder in options.beside]
        for other in self.others:
            for task in self.prepared.keys() & other.runs.keys():
                other.predictions(self.prepared[task])
        if options.intermediate is not None:
            self._check_intermediate(options.intermediate)
        if options.with_test:
            check_test_files(self.data, tasks)
        if options.with_train:
            self._check_train_predictions()

    def _make_tasks(self) -> dict[str, BenchmarkTask]:
        return {
            task: prepared.as_task(self.max_positions, self.trials_of(task)) for task, prepared in self.prepared.items()
        }

    def trials_of(self, task: str) -> tuple[Hyperparameters, ...]:
        """Return the recipe's settings; those of the user's own tasks are those of ``amos classify``."""
        return self.session.recipe.trials_of(task if task in SCORED else CLASSIFICATION)

    def _check_train_predictions(self) -> None:
        """Raise :class:`UserError` for labels that cannot be columns, or if a finished run lacks what ``--write-train`` writes:
        its weights may be gone."""
        for prepared in self.prepared.values():
            columns_of(prepared)
        for run in plan_runs(self.session, self.tasks.values()):
            names = [prepared.name for prepared in self.prepared_of(run)]
            if read_result(run.directory) and not all(has_train_predictions(run.directory, name) for name in names):
                raise UserError(
                    f"{run.directory} was finished without --write-train: give another --out, or delete that directory"
                )

    def prepared_of(self, run: TaskRun) -> list[GlueData]:
        """Return the data that a run trains on."""
        return [self.prepared[run.task.name]]

    def train_flags(self, run: TaskRun) -> list[str]:
        task = run.task.name
        flags = [str(self.prepared[task].directory), "--task", "text_classification"]
        return [*flags, "--criterion", "text_classification", *self.shared_flags(run)]

    def shared_flags(self, run: TaskRun) -> list[str]:
        """Return the flags of a run on one or several tasks: length, best checkpoint, number of rows, teachers."""
        flags = ["--tokens-per-text", str(self.max_positions), *selection_flags(run.task)]
        if self.options.max_rows is not None:
            flags += ["--max-rows", str(self.options.max_rows)]
        if self.options.teachers is not None:
            flags += [
                "--teacher",
                str(run.directory / TEACHER_FILE),
                "--gold-weight",
                self.options.teachers.gold_weight,
            ]
            flags += ["--max-update", str(run.total_updates)]
        return flags

    def fill_directory(self, run: TaskRun) -> None:
        """Copy ``tokenizer/`` and ``task.json``, with the names of the labels, and write the predictions of the teachers."""
        super().fill_directory(run)
        shutil.copyfile(self.prepared[run.task.name].directory / TASK_FILE, run.directory / TASK_FILE)
        self.write_teachers(run)

    def write_teachers(self, run: TaskRun) -> None:
        """Write the predictions of the teachers for all rows of a run as one array: float32, [rows, outputs] of one task after
        the other in one dimension."""
        if self.options.teachers is None:
            return
        tasks = self.prepared_of(run)
        array = np.concatenate([self.options.teachers.predictions(prepared, run.seed).ravel() for prepared in tasks])
        with whole_file(str(run.directory / TEACHER_FILE)) as unfinished:
            np.save(unfinished, array, allow_pickle=False)

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Return the scores by name and write ``predictions.SPLIT.tsv``. Scores of MNLI's mismatched set end in ``_mm``."""
        return self.evaluate_task(self.prepared[task], "", load_checkpoint(checkpoint), directory, device, stop)

    def evaluate_task(
        self,
        prepared: GlueData,
        prefix: str,
        loaded: LoadedCheckpoint,
        directory: Path,
        device: str,
        stop: threading.Event,
    ) -> dict[str, float]:
        """Score one task of a checkpoint; ``prefix``: of the split in the names of the files."""
        scores: dict[str, float] = {}
        predictions = predict_splits(prepared, loaded, list(prepared.dev_splits), self.max_positions, device, stop)
        for split, suffix in prepared.dev_splits.items():
            labels, file = prepared.labels(split), directory / f"predictions.{prefix}{split}.tsv"
            write_prediction_table(file, prepared, split, predictions[split], labels)
            found = score_split(prepared, predictions[split], labels)
            scores |= {f"{name}{suffix}": value for name, value in found.items()}
        if self.options.with_train:
            logits = predict_train(prepared, loaded, self.max_positions, device, stop)
            write_train_predictions(directory / TRAIN_FOLDER, prepared, logits)
        return scores

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        """The table has the tasks of earlier calls, too."""
        shown = [result for result in results if result.task in SCORED or result.task in self.options.own]
        return shown, summarize(shown)

    def setup(self) -> dict[str, Any]:
        """Return the settings that all results share: also the number of rows, the teachers, and the user's own tasks."""
        options, more = self.options, {}
        if options.max_rows is not None:
            more["max_rows"] = options.max_rows
        if options.teachers is not None:
            more["teachers"] = options.teachers.settings
        if options.own:
            more["own_tasks"] = sorted(options.own)
        return super().setup() | more

    def plan(self, tasks: Iterable[BenchmarkTask], intermediate: Path | None = None) -> list[TaskRun]:
        """Return all runs of the tasks. What the teachers of each predict belongs to its identity."""
        runs, teachers = plan_runs(self.session, tasks, intermediate), self.options.teachers
        if teachers is None:
            return runs
        return [
            replace(run, identity=run.identity | teachers.identity(self.prepared_of(run), run.seed)) for run in runs
        ]

    def _check_intermediate(self, intermediate: Path) -> None:
        """Raise :class:`UserError` unless an MNLI run of this checkpoint exists, or will exist, to start from."""
        if not any(task in INTERMEDIATE_FOR for task in self.tasks):
            raise UserError(f"--intermediate has no effect: none of {', '.join(INTERMEDIATE_FOR)} is among --tasks")
        if intermediate == self.session.out and INTERMEDIATE_TASK in self.tasks:
            self._check_layers({trial.layers for trial in self.tasks[INTERMEDIATE_TASK].trials})
            return
        found = best_intermediate(intermediate)
        if found is None:
            raise UserError(
                f"{intermediate} holds no finished run of {INTERMEDIATE_TASK}: add it to --tasks, or give the --out of one "
                "as --intermediate OUT"
            )
        setup = read_optional_json(intermediate / f"{self.name}.setup.json") or {}
        if any(setup.get(name) != self.session.origin[name] for name in ("checkpoint_sha256", "from_scratch")):
            raise UserError(
                f"{intermediate} holds {INTERMEDIATE_TASK} runs of another checkpoint: give those of this checkpoint"
            )
        self._check_layers({found.best.identity["settings"].get("layers", LAST_LAYER)})

    def _check_layers(self, before: set[str]) -> None:
        """Raise :class:`UserError` unless the runs that start from MNLI's have the ``--layers`` of those, ``before``."""
        for name in INTERMEDIATE_FOR:
            own = {trial.layers for trial in self.tasks[name].trials} if name in self.tasks else before
            if own != before:
                raise UserError(
                    f"{name} with --layers {', '.join(sorted(own))} cannot start from {INTERMEDIATE_TASK} with --layers "
                    f"{', '.join(sorted(before))}: give both the same"
                )

    def execute(self, execute_runs: Callable[[Sequence[TaskRun]], list[Failure]]) -> list[Failure]:
        """Execute all runs; with ``intermediate``, runs that start from MNLI's best run on dev come last.

        AMOS Appendix E and thesis 5.2.4 describe one checkpoint fine-tuned on MNLI, not one per seed: every seed of a
        dependent task starts from the same checkpoint, so that its deviation is that of the task. The output layer is
        newly initialized if the number of classes differs; the head's dense layer is kept, like the pooler of a BERT.
        """
        plan = self.plan
        if self.options.intermediate is None:
            return execute_runs(plan(self.tasks.values()))
        independent = plan(task for name, task in self.tasks.items() if name not in INTERMEDIATE_FOR)
        independent.sort(key=lambda run: run.task.name != INTERMEDIATE_TASK)  # MNLI first: other tasks wait for it
        dependent = [task for name, task in self.tasks.items() if name in INTERMEDIATE_FOR]
        check_not_started_without_intermediate(plan(dependent))
        failures = execute_runs(independent) if independent else []
        start = best_intermediate(self.options.intermediate)
        if start is None:
            reason = f"it needs a finished run of {INTERMEDIATE_TASK} to start from, and there is none"
            return failures + [Failure(run, reason) for run in plan(dependent)]
        return failures + execute_runs(plan(dependent, best_checkpoint(self.options.intermediate, start.best)))

    def notes(self, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]) -> Iterator[str]:
        tasks = dict.fromkeys(result.task for result in results if "intermediate_sha256" in result.identity)
        if tasks:
            yield f"{', '.join(tasks)}: started from the best dev run of {INTERMEDIATE_TASK} (intermediate-task training)"
        if self.options.teachers is not None:
            yield self.options.teachers.note()
        if self.squad:
            yield from (f"SQuAD: {note}" for note in self.squad.notes)

    def table(self, summaries: Mapping[str, TaskSummary], notes: Sequence[str]) -> Table:
        names = [*SCORED, *self.options.own]
        return glue_table(self.row_name, summaries, self.squad, self.options.with_paper, notes, names, self.others)

    @property
    def row_name(self) -> str:
        return self.session.row_name

    def summary_parts(self, summaries: Mapping[str, TaskSummary]) -> dict[str, Any]:
        name, value = average({task: summary.main.median for task, summary in summaries.items()})
        return {"average": {"name": name, "value": value}}

    def write_more(
        self, summaries: Mapping[str, TaskSummary], stop: threading.Event
    ) -> tuple[Sequence[Path], Sequence[str]]:
        """Write with ``with_test`` the leaderboard's archive, and the differences from the rows beside."""
        out, files, notices = self.session.out, [], []
        if self.options.with_test:
            device = self.session.devices[0]
            archive, notices = write_submission(out, self.data, summaries, self.max_positions, device, stop)
            files.append(archive)
        if self.others:
            say("tests the differences from the other rows", self.name)
            differences = difference_table(read_results_of_glue(out), self.others, self.prepared)
            files += differences.save(out / DIFFERENCES)
        else:  # those of an earlier call do not belong to this table
            for suffix in (".md", ".csv"):
                (out / f"{DIFFERENCES}{suffix}").unlink(missing_ok=True)
        return files, notices


def squad_of_same_weights(out: Path, origin: Mapping[str, Any]) -> Summary | None:
    """Return the results of ``amos squad`` in OUT, if there are any; refuse those of other weights."""
    if (found := read_summary(out, "squad")) is None:
        return None
    squad = found[0]
    for setting in ("checkpoint_sha256", "from_scratch"):
        if squad.setup.get(setting) != origin[setting]:
            raise UserError(
                f"{squad.file} has results of other weights ({setting} {squad.setup.get(setting)}, not {origin[setting]}): "
                "give the results of the same weights with --squad"
            )
    return squad


def best_intermediate(out: Path) -> TaskSummary | None:
    """Return the summary of the finished MNLI runs in OUT; None if there are none."""
    results = [result for result in read_results(out) if result.task == INTERMEDIATE_TASK]
    return summarize(results).get(INTERMEDIATE_TASK)


def check_not_started_without_intermediate(runs: Sequence[TaskRun]) -> None:
    """Raise :class:`UserError` if a dependent run was started without the intermediate task. The identity check of the
    runner would detect it only after MNLI's hours of training."""
    for run in runs:
        found = read_optional_json(run.directory / IDENTITY_FILE)
        if found is not None and "intermediate_sha256" not in found:
            raise UserError(
                f"{run.directory} was started without --intermediate: give another --out, or delete that directory"
            )


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
    summaries: Mapping[str, TaskSummary],
    squad: Summary | None,
    with_paper: bool,
    notes: Sequence[str],
    names: Sequence[str] = SCORED,
    others: Sequence[GlueResults] = (),
) -> Table:
    """Build the table with the checkpoint's row, those of other results and, with ``with_paper``, the papers' rows.

    Args:
        squad: ``squad.json`` for the same checkpoint.
        names: of the columns, for tasks that have results.
    """
    tasks = [task for task in names if task in summaries or (with_paper and task in AVERAGED)]
    average_name, value = average({task: summary.main.median for task, summary in summaries.items()})
    average_cell = format_score(value)
    if with_paper and average_name != "AVG":  # the column is the papers' average of all eight tasks
        average_cell = f"{average_cell} ({average_name.removeprefix('AVG ')})"
        average_name = "AVG"
    rows = [[row_name, *(task_cell(summaries.get(task)) for task in tasks), average_cell]]
    columns = ["", *(task_heading(task, summaries.get(task)) for task in tasks), average_name]
    rows += [other_row(other, tasks, average_name) for other in others]

    # Version 2.0 if it was run (AMOS Table 1), otherwise the first version that was.
    spreads = squad.spreads if squad else {}
    squad_task = min(spreads, key=lambda name: "2" not in name, default=None)
    if squad_task or with_paper:
        columns += [f"{squad_task or 'SQuAD2.0'} {score}" for score in ("EM", "F1")]
        rows[0] += [format_spread(spreads.get(squad_task, {}).get(name)) for name in ("em", "f1")]
        rows[1:] = [[*row, MISSING, MISSING] for row in rows[1:]]
    if with_paper:
        rows += [paper_row(paper, tasks) for paper in paper_results()]
    return Table("GLUE dev", columns, rows, notes)


def other_row(other: GlueResults, tasks: Sequence[str], average_name: str) -> list[str]:
    """Return the row of other results; their average names its tasks where those are others."""
    summary, cells = other.summary, []
    for task in tasks:
        main = summary.main_scores.get(task)
        spreads = [summary.spreads[task].get(name) for name in (main, f"{main}_mm")] if main else []
        cells.append(" / ".join(format_spread(spread) for spread in spreads if spread) or MISSING)
    medians = {task: summary.spreads[task][main].median for task, main in summary.main_scores.items()}
    name, value = average(medians)
    own_tasks = set(AVERAGED) & set(medians) == set(AVERAGED) & set(tasks)
    suffix = "" if name == average_name and own_tasks else f" ({name.removeprefix('AVG ')})"
    return [other.row_name, *cells, format_score(value) + suffix]


def task_heading(task: str, summary: TaskSummary | None = None) -> str:
    """Return the task's name, with the score if it is not accuracy."""
    if task == "MNLI":
        return "MNLI m/mm"
    score = TASKS[task].main_score if summary is None else summary.best.main_score
    return task if score == "accuracy" else f"{task} ({HEADINGS[score]})"


def task_cell(summary: TaskSummary | None) -> str:
    if summary is None:
        return MISSING
    mismatched = summary.scores.get(f"{summary.best.main_score}_mm")
    return " / ".join(format_spread(found) for found in (summary.main, mismatched) if found)


def paper_row(paper: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    scores, deviations = paper["scores"], paper.get("deviations", {})
    cells = []
    for task in tasks:
        values, own = scores.get(task), deviations.get(task)
        if not isinstance(values, list):  # MNLI has two values, for the matched and the mismatched set
            values, own = [values], [own]
        pairs = zip(values, own or [None] * len(values), strict=True)
        cells.append(" / ".join(format_score(*pair) for pair in pairs))
    return [paper["name"], *cells, format_score(paper["average"]), *paper_squad_cells(paper, ("em", "f1"))]
