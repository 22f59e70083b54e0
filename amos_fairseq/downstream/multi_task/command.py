"""One run for all tasks: an encoder with a head for each of them (thesis, chapter 3)."""

import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.benchmark import Benchmark, BenchmarkTask, TaskRun
from amos_fairseq.downstream.classification.dataset import TASK_FILE, TASK_FOLDER
from amos_fairseq.downstream.classification.glue.benchmark import Glue
from amos_fairseq.downstream.classification.glue.data import GlueData
from amos_fairseq.downstream.classification.scores import AVERAGE, average_score
from amos_fairseq.downstream.multi_task.dataset import rows_per_epoch
from amos_fairseq.downstream.multi_task.teachers import MULTI
from amos_fairseq.downstream.results import RunResult, TaskSummary, content_sha256, divide, summarize_divided
from amos_fairseq.errors import UserError


class MultiTaskGlue(Glue):
    """Every run trains on all tasks. Their scores are shown as those of single tasks; the weights that are kept are those of
    the run with the highest average (thesis, section 3.4: "the highest average dev set score"):
    :func:`~amos_fairseq.downstream.classification.scores.average_score`."""

    def _make_tasks(self) -> dict[str, BenchmarkTask]:
        if self.options.intermediate is not None:
            raise UserError("--intermediate has no effect with --multi-task, which trains on MNLI too: leave it out")
        for prepared in self.prepared.values():
            if os.pathsep in str(prepared.directory):
                raise UserError(
                    f"{prepared.directory}: folders are separated at {os.pathsep!r}: give a path without it"
                )
        trials = self.session.recipe.trials_of(MULTI)
        tasks = [prepared.as_task(self.max_positions, trials) for prepared in self.prepared.values()]
        num_rows, largest = (
            sum(rows_per_epoch([task.num_examples for task in tasks])),
            max(t.batch_size for t in trials),
        )
        if num_rows < largest:
            raise UserError(
                f"an epoch of {', '.join(self.prepared)} has {num_rows} rows, fewer than the {largest} of one update: give a "
                "smaller --batch-size"
            )
        sha256 = content_sha256({task.name: [task.data_sha256, task.num_examples] for task in tasks})
        notes = tuple(note for task in tasks for note in task.notes)
        return {MULTI: BenchmarkTask(MULTI, num_rows, AVERAGE, sha256, trials, notes, carries_rest=True)}

    def prepared_of(self, run: TaskRun) -> list[GlueData]:
        return list(self.prepared.values())

    def train_flags(self, run: TaskRun) -> list[str]:
        directories = os.pathsep.join(str(prepared.directory) for prepared in self.prepared.values())
        return [directories, "--task", "multi_task", "--criterion", "multi_task", *self.shared_flags(run)]

    def fill_directory(self, run: TaskRun) -> None:
        """Copy ``tokenizer/``, the ``task.json`` of each task, with the names of its labels, and write the predictions of the
        teachers."""
        Benchmark.fill_directory(self, run)
        for name, prepared in self.prepared.items():
            folder = run.directory / TASK_FOLDER / name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(prepared.directory / TASK_FILE, folder / TASK_FILE)
        self.write_teachers(run)

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Return the scores of all tasks, each with the name of its task before it, and their ``average``."""
        scores, mains, loaded = {}, {}, load_checkpoint(checkpoint)
        for name, prepared in self.prepared.items():
            own = self.evaluate_task(prepared, f"{name}.", loaded, directory, device, stop)
            scores |= {f"{name} {score}": value for score, value in own.items()}
            mains[name] = own[prepared.main_score]
        return {AVERAGE: average_score(mains)} | scores

    def setup(self) -> dict[str, Any]:
        return super().setup() | {"multi_task": list(self.prepared)}

    @property
    def row_name(self) -> str:
        return f"{super().row_name}, one model for all tasks"

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        """Return a result for each task of each run. Trial and best run are those of the average."""
        results = [result for result in results if result.task == MULTI]
        main_scores = {name: prepared.main_score for name, prepared in self.prepared.items()}
        return summarize_divided(results, {result.directory: divide(result, main_scores) for result in results})
