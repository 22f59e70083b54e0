"""``amos glue --multi-task``: one model for all tasks."""

import threading
from collections.abc import Sequence
from pathlib import Path

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.labeled_task import AVERAGE, check_epoch, rows_per_epoch
from amos_fairseq.downstream.texts.command import TextData
from amos_fairseq.downstream.texts.glue.command import MULTI, Glue
from amos_fairseq.downstream.texts.glue.tasks import AVERAGED
from amos_fairseq.downstream.texts.scores import average_score
from amos_fairseq.experiments.benchmark import BenchmarkTask, usable_folder
from amos_fairseq.experiments.records import RunResult, TaskSummary, content_sha256, divide, summarize_divided


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
        task = BenchmarkTask(MULTI, num_rows, AVERAGE, sha256, trials, notes, continues_across_epochs=True)
        return {MULTI: task}

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
