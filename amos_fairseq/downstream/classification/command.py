"""``amos classify``: texts with a class, several labels or a number, trained by the task ``text_classification``."""

import argparse
import dataclasses
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.downstream.benchmark import BenchmarkTask, Failure, TaskRun, plan_runs, usable_folder
from amos_fairseq.downstream.classification.benchmark import TextBenchmark, read_text_data
from amos_fairseq.downstream.classification.labeling import label_table
from amos_fairseq.downstream.classification.prepare import NAME, prepare_inside
from amos_fairseq.downstream.classification.scores import MAIN_SCORES, SCORES
from amos_fairseq.downstream.results import (
    Baselines,
    RunResult,
    TaskSummary,
    best_checkpoint,
    check_scores,
    content_sha256,
)
from amos_fairseq.downstream.runner import run_and_print, stoppable
from amos_fairseq.downstream.session import Session, find_devices, preparing, session_from

RANDOM = "classification-random"  # its runs start from random weights
HEADINGS = {"accuracy": "accuracy", "micro_f1": "micro-F1", "macro_f1": "macro-F1", "matthews": "Matthews"}
HEADINGS |= {"spearman": "Spearman", "pearson": "Pearson", "mse": "MSE"}


def main(arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        files = (Path(arguments.checkpoint), arguments.predict, Path(arguments.out))
        how_to_read = (arguments.text, arguments.no_header, arguments.csv_quotes)
        number = stoppable(label_table, *files, *how_to_read, find_devices(arguments.cpu)[0])
        print(f"{arguments.out}: {number:,} rows")
        return
    session = session_from(arguments, NAME)
    with preparing(session, NAME) as tokenizer:
        data = prepare_inside(session.out, arguments.tables, tokenizer)
    run_and_print(arguments.out, open_classification(session, data))


def open_classification(session: Session, data: Path) -> "Classification":
    """Read the data that ``amos classify`` has prepared."""
    data = usable_folder(data)
    prepared = read_text_data(data, NAME, "give the files with --train, and the same command prepares them again")
    session.checkpoint.check_tokenizer(data / "tokenizer")
    trials = session.recipe.trials_of(NAME)
    if not (data / "input1").is_dir():  # there is nothing to separate
        trials = tuple(dict.fromkeys(dataclasses.replace(trial, num_separators=1) for trial in trials))
    record, separators = prepared.record, {trial.separator for trial in trials}
    notes = (*record["notes"], *prepared.notes_on_cut_rows(session.checkpoint.max_positions, separators))
    kind, sha256 = record["kind"], content_sha256({"labels": record["labels"], "files": record["sha256"]})
    task = BenchmarkTask(NAME, prepared.num_train, MAIN_SCORES[kind], sha256, trials, notes)
    names = [NAME, RANDOM] if "random" in session.baselines else [NAME]
    tasks = {name: dataclasses.replace(task, name=name) for name in names}
    return Classification(session, data, dict.fromkeys(tasks, prepared), tasks)


@dataclass
class Classification(TextBenchmark):
    """Any table of texts."""

    name = NAME
    id_column, dev_name = "line", "dev"

    @property
    def kind(self) -> str:
        return self.prepared[NAME].kind

    @property
    def label_column(self) -> str:
        return self.prepared[NAME].record["label_column"]

    @property
    def columns(self) -> dict[str, str]:
        return {score: HEADINGS[score] for score in SCORES[self.kind]}

    @property
    def title(self) -> str:
        return f"{self.label_column}, dev"

    def setup(self) -> dict[str, Any]:
        return self.session.setup({NAME: self.tasks[NAME].trials})

    def execute(self, execute_runs: Callable[[Sequence[TaskRun]], list[Failure]]) -> list[Failure]:
        runs = plan_runs(self.session, [self.tasks[NAME]])
        if RANDOM in self.tasks:
            scratch = dataclasses.replace(self.session.checkpoint, from_scratch=True)
            runs += plan_runs(dataclasses.replace(self.session, checkpoint=scratch), [self.tasks[RANDOM]])
        return execute_runs(runs)

    def shows(self, task: str) -> bool:
        return task in (NAME, RANDOM)

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        shown, summaries = super().summarize(results)
        check_scores(shown, SCORES[self.kind])
        return shown, summaries

    def label(self, task: str) -> str:
        return "random weights" if task == RANDOM else self.label_column

    def row_name(self, task: str, model: str) -> str:
        return f"{self.session.checkpoint.arch} (random weights)" if task == RANDOM else model

    def constants(self) -> dict[str, Baselines]:
        return {NAME: self.prepared[NAME].constant()}

    def linear_scores(self, stop: threading.Event) -> dict[str, dict[str, float]]:
        checkpoint, device = self.session.checkpoint, self.session.devices[0]
        return {NAME: self.prepared[NAME].linear(checkpoint.file, checkpoint.max_positions, device, stop)}

    def notes(self, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]) -> Iterator[str]:
        if self.kind == "number":
            yield "MSE: mean squared error, in the squared unit of the label"

    def write_more(
        self, summaries: Mapping[str, TaskSummary], stop: threading.Event
    ) -> tuple[Sequence[Path], Sequence[str]]:
        if NAME not in summaries:
            return (), ()
        best = best_checkpoint(self.session.out, summaries[NAME].best)
        best, out = (shlex.quote(str(path)) for path in (best, self.session.out))
        return (), (
            f"to label other rows: amos classify --checkpoint {out} --predict FILE --out LABELS.tsv",
            f"to export the run that is best on dev: amos export {best} HF_DIR",
        )
