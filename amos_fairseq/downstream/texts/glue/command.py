"""``amos glue``: GLUE's tasks, and the user's own, fine-tuned one by one or in one model, scored and shown as AMOS does."""

import argparse
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.downstream.texts.command import TextBenchmark, TextData, read_text_data
from amos_fairseq.downstream.texts.glue.prepare import prepare_glue_inside, read_own_tasks
from amos_fairseq.downstream.texts.glue.table import average, glue_table, has_test_set, write_submission
from amos_fairseq.downstream.texts.glue.tasks import (
    AVERAGED,
    DIAGNOSTIC,
    INTERMEDIATE_FOR,
    INTERMEDIATE_TASK,
    SCORED,
    TASKS,
    has_any_file,
    holds_official_files,
    tasks_in,
)
from amos_fairseq.downstream.texts.labeling import predict_logits
from amos_fairseq.downstream.texts.prepare import NAME as CLASSIFICATION
from amos_fairseq.downstream.texts.prepare import prepare_inside
from amos_fairseq.downstream.texts.teachers import (
    FOLDER,
    Teachers,
    read_teachers,
    write_train_predictions,
)
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import SAMPLING_EXPONENT
from amos_fairseq.experiments.benchmark import BenchmarkTask, TaskRun
from amos_fairseq.experiments.recipes import different
from amos_fairseq.experiments.records import (
    ConstantScores,
    RunResult,
    Summaries,
    Summary,
    best_run,
    read_results,
    read_summary,
)
from amos_fairseq.experiments.runner import Failure, Runner
from amos_fairseq.experiments.session import Session, session_from
from amos_fairseq.experiments.table import run_and_print
from amos_fairseq.files import TOKENIZER_DIRECTORY, whole_file
from amos_fairseq.output.tables import Table
from amos_fairseq.output.terminal import say

TEACHER_FILE = "teacher.npy"  # in the directory of a run


@dataclass(frozen=True)
class GlueOptions:
    """The options of the command besides its tasks."""

    own_tasks: Mapping[str, Path] = field(default_factory=dict)  # prepared directories of the user's own tasks by name
    max_rows: int | None = None
    teachers: Teachers | None = None
    with_train: bool = False  # write the predictions of the rows to train on, for students
    intermediate: Path | None = None  # OUT of the MNLI runs to start from; it may be the session's own
    with_test: bool = False
    sampling_exponent: float = SAMPLING_EXPONENT


def main(arguments: argparse.Namespace, benchmark: "type[Glue]") -> None:
    data, intermediate = Path(arguments.data), arguments.intermediate
    is_raw = holds_official_files(data)
    tasks = tasks_to_run(arguments.tasks, data, is_raw)
    if arguments.write_test and is_there(DIAGNOSTIC, data, is_raw):
        tasks.append(DIAGNOSTIC)
    session, own_tasks = session_from(arguments), {}
    folders = {name: data / name for name in tasks}
    with session.preparing() as tokenizer:
        if arguments.own_tasks is not None:
            for name, tables in read_own_tasks(arguments.own_tasks).items():
                own_tasks[name] = prepare_inside(session.out, tables, tokenizer, name)
        if is_raw:
            folders = {name: prepare_glue_inside(session.out, data, name, tokenizer) for name in tasks}
    options = GlueOptions(
        own_tasks=own_tasks,
        max_rows=arguments.max_rows,
        teachers=arguments.teachers and read_teachers(arguments.teachers, arguments.gold_weight, arguments.ensemble),
        with_train=arguments.write_train,
        intermediate=None if intermediate is None else Path(intermediate or arguments.out).resolve(),
        with_test=arguments.write_test,
        sampling_exponent=arguments.sampling_exponent,
    )
    run_and_print(open_glue(session, folders, options, benchmark))


def tasks_to_run(names: str, data: Path, is_raw: bool) -> list[str]:
    return tasks_in(data, names, SCORED, AVERAGED, lambda task: is_there(task, data, is_raw), "fine-tuned")


def is_there(task: str, data: Path, is_raw: bool) -> bool:
    return has_any_file(data, TASKS[task]) if is_raw else (data / task).is_dir()


def open_glue(
    session: Session,
    folders: Mapping[str, Path],
    options: GlueOptions = GlueOptions(),
    benchmark: "type[Glue] | None" = None,
) -> "Glue":
    """Read the prepared data and everything that the options name; what cannot be used is refused before any training.

    ``folders``: the prepared data of GLUE's tasks; ``benchmark``: how they are trained, by default one by one.
    """
    squad = read_summary(session.out, "squad", "amos squad")
    if squad is not None and not has_weights(session, squad.checkpoint["sha256"], squad.from_scratch):
        squad = None
    prepared = {
        name: read_text_data(folder.resolve(), options.max_rows)
        for name, folder in [*folders.items(), *options.own_tasks.items()]
    }
    for data in prepared.values():
        session.checkpoint.check_tokenizer(data.directory / TOKENIZER_DIRECTORY)
    first, diagnostic = next(iter(prepared.values())).directory, prepared.pop(DIAGNOSTIC, None)
    glue = (benchmark or Glue)(session, first, prepared, {}, options, squad, diagnostic)
    glue.tasks = glue.make_tasks()
    if options.teachers is not None:
        say("reads the predictions of the teachers", Glue.name)
        for seed in session.seeds:
            options.teachers.identity(list(prepared.values()), seed)
    if options.intermediate is not None:
        glue.check_intermediate(options.intermediate)
    if options.with_test and not any(map(has_test_set, prepared.values())):
        raise UserError(f"--write-test: there is no test set of {', '.join(prepared)}: prepare files with test.tsv")
    return glue


def has_weights(session: Session, checkpoint_sha256: str, from_scratch: bool) -> bool:
    """Return whether a result is of the weights of the session."""
    return (checkpoint_sha256, from_scratch) == (session.checkpoint.sha256, session.checkpoint.from_scratch)


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
        """Return the tasks; the settings of the user's own are those of ``amos classify``."""
        tasks = {}
        for task, data in self.prepared.items():
            trials = self.session.recipe.trials_of(task if task in SCORED else CLASSIFICATION)
            of_labels = different(trial.for_labels(len(data.label_names)) for trial in trials)
            tasks[task] = data.as_task(self.max_positions, of_labels)
        return tasks

    def more_settings(self, task: str, seed: int) -> dict[str, Any]:
        """Return what the teachers of a run predict. A run with ``--write-train`` is another one than without, which has no
        such files."""
        teachers, settings = self.options.teachers, {"write_train": True} if self.options.with_train else {}
        return settings if teachers is None else settings | teachers.identity(self.tables_of(task), seed)

    def check_intermediate(self, intermediate: Path) -> None:
        """Refuse an OUT without an MNLI run of this checkpoint, now or by this call, to start from."""
        if not any(task in INTERMEDIATE_FOR for task in self.tasks):
            raise UserError(f"--intermediate has no effect: none of {', '.join(INTERMEDIATE_FOR)} is among --tasks")
        is_own = intermediate == self.session.out and INTERMEDIATE_TASK in self.tasks
        if not is_own and not self.intermediate_results(intermediate):
            raise UserError(f"{intermediate} holds no run of {INTERMEDIATE_TASK} from these weights: add it to --tasks")

    def train_flags(self, run: TaskRun) -> list[str]:
        flags = super().train_flags(run)
        if self.options.max_rows is not None:
            flags += ["--max-rows", str(self.options.max_rows)]
        if self.options.teachers is not None:
            flags += ["--teacher", str(run.directory / TEACHER_FILE)]
            flags += ["--gold-weight", self.options.teachers.gold_weight]
            flags += ["--max-update", str(run.schedule.total_updates)]
        return flags

    def fill_directory(self, run: TaskRun) -> None:
        super().fill_directory(run)
        self.write_teachers(run)

    def write_teachers(self, run: TaskRun) -> None:
        """Write the predictions of the teachers for all rows of a run as one array: float32, [rows, outputs] of one task after
        the other in one dimension."""
        if (teachers := self.options.teachers) is None:
            return
        tables = self.tables_of(run.task.name)
        array = np.concatenate([teachers.predictions(data, run.seed).ravel() for data in tables])
        with whole_file(str(run.directory / TEACHER_FILE)) as unfinished:
            np.save(unfinished, array, allow_pickle=False)

    def evaluate_table(
        self, data: TextData, prefix: str, loaded: LoadedCheckpoint, device: str, stop: threading.Event
    ) -> dict[str, float]:
        if self.options.with_train:
            rows, folder = data.train_inputs(self.max_positions, loaded.separator), loaded.file.parent / FOLDER
            write_train_predictions(folder, data, predict_logits(loaded, rows, device, stop, data.name))
        return super().evaluate_table(data, prefix, loaded, device, stop)

    def execute(self, runner: Runner) -> None:
        """Execute all runs; with ``intermediate``, runs that start from MNLI's best run on dev come last.

        AMOS Appendix E and thesis 5.2.4 describe one checkpoint fine-tuned on MNLI, not one per seed: every seed of a
        dependent task starts from the same checkpoint, so that its deviation is that of the task. The output layer is
        newly initialized if the number of classes differs; the head's dense layer is kept, like the pooler of a BERT.
        """
        out = self.options.intermediate
        dependent = [task for name, task in self.tasks.items() if out is not None and name in INTERMEDIATE_FOR]
        independent = self.plan(task for task in self.tasks.values() if task not in dependent)
        if dependent:
            independent.sort(key=lambda run: run.task.name != INTERMEDIATE_TASK)  # MNLI first: other tasks wait for it
        runner.execute(independent)
        if not dependent:
            return
        own = [run for run in independent if run.task.name == INTERMEDIATE_TASK and out == self.session.out]
        results = runner.results(own) if own else self.intermediate_results(out)
        if not results:
            reason = f"it needs a finished run of {INTERMEDIATE_TASK} to start from, and there is none"
            runner.failures += [Failure(run, reason) for run in self.plan(dependent)]
            return
        best = best_run(results)
        runner.execute(self.plan(dependent, best.checkpoint_in(out)))

    def intermediate_results(self, out: Path) -> list[RunResult]:
        """Return the results of MNLI in OUT that are of the same weights."""
        found = [result for result in read_results(out) if result.task == INTERMEDIATE_TASK]
        keys = ("checkpoint_sha256", "from_scratch")
        return [result for result in found if has_weights(self.session, *(result.settings[key] for key in keys))]

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterator[str]:
        tasks = dict.fromkeys(result.task for result in results if "intermediate_sha256" in result.settings)
        if tasks:
            yield f"{', '.join(tasks)}: started from the best dev run of {INTERMEDIATE_TASK} (intermediate-task training)"
        if self.options.teachers is not None:
            yield self.options.teachers.note()
        if self.squad:
            yield from (f"SQuAD: {note}" for note in self.squad.notes)

    def table(self, summaries: Summaries, constants: Mapping[str, ConstantScores], notes: Sequence[str]) -> Table:
        names = [*SCORED, *self.options.own_tasks]
        return glue_table(self.model_name, summaries, constants, self.squad, notes, names)

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
