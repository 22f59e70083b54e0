"""GLUE: the task ``text_classification`` trains; this file runs, scores and shows it as AMOS does."""

import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.data.glue_tasks import AVERAGED, INTERMEDIATE_FOR, INTERMEDIATE_TASK, SCORED, TASKS
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text
from amos_fairseq.finetuning.benchmark import Benchmark
from amos_fairseq.finetuning.glue.data import read_glue_data
from amos_fairseq.finetuning.glue.leaderboard import check_test_files, write_submission
from amos_fairseq.finetuning.glue.predictions import predict_splits, score, write_prediction_table
from amos_fairseq.finetuning.runs import IDENTITY_FILE, Failure, RunResult, TaskRun, read_optional_json, read_results
from amos_fairseq.finetuning.session import Session
from amos_fairseq.finetuning.summary import (
    TaskSummary,
    best_checkpoint,
    format_spread,
    paper_results,
    paper_squad_cells,
    summarize,
    summary_of_same_weights,
)
from amos_fairseq.models.configuration import LAST_LAYER
from amos_fairseq.summary_file import Summary
from amos_fairseq.tables import MISSING, Table, format_score


class Glue(Benchmark):
    """Prepared tasks in one directory, and the table of AMOS: eight tasks, their average, and SQuAD next to them.

    Args:
        intermediate: OUT of the MNLI runs that RTE, STS-B and MRPC start from; it may be the session's own.
        squad: directory with ``squad.json``; None for OUT, where it may be missing.
        with_paper: add the papers' rows to the table.
        with_test: predict the test sets and write the leaderboard's archive.

    Raises:
        UserError: an argument cannot be used; the recipe lacks a task; a task has not been prepared, or with a tokenizer
            other than the checkpoint's.
    """

    name = "glue"

    def __init__(
        self,
        session: Session,
        data: Path,
        tasks: Sequence[str],
        intermediate: Path | None = None,
        squad: Path | None = None,
        with_paper: bool = False,
        with_test: bool = False,
    ) -> None:
        self.session, self.intermediate, self.with_paper, self.with_test = session, intermediate, with_paper, with_test
        self.squad = summary_of_same_weights(squad or session.out, "squad", session.origin)
        if squad is not None and self.squad is None:
            raise UserError(f"{squad} holds no results of amos squad: give that command's --out as --squad")
        if not data.is_dir():
            raise UserError(f"{data} is not a directory: give that of GLUE's official files, or of amos prepare glue")
        self.data, self.max_positions = data.resolve(), session.checkpoint.max_positions
        self.prepared = {task: read_glue_data(self.data, task) for task in tasks}
        session.checkpoint.check_tokenizer(self.data / "tokenizer")
        self.tasks = {
            task: prepared.as_task(self.max_positions, session.recipe.trials_of(task))
            for task, prepared in self.prepared.items()
        }
        if intermediate is not None:
            self._check_intermediate(intermediate)
        if with_test:
            check_test_files(self.data, tasks)

    def train_flags(self, task: str) -> list[str]:
        flags = [
            str(self.prepared[task].directory),
            "--task",
            "text_classification",
            "--criterion",
            "text_classification",
        ]
        flags += ["--tokens-per-text", str(self.max_positions)]
        return [*flags, "--best-checkpoint-metric", TASKS[task].main_score, "--maximize-best-checkpoint-metric"]

    def copy_tokenizer_and_labels(self, task: str, directory: Path) -> None:
        """Copy ``tokenizer/`` and, for a classification, write ``labels.txt`` with one class name per line."""
        super().copy_tokenizer_and_labels(task, directory)
        names = self.prepared[task].label_names
        if names:
            write_text(directory / "labels.txt", "".join(f"{name}\n" for name in names))

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Return the scores by name and write ``predictions.SPLIT.tsv``. Scores of MNLI's mismatched set end in ``_mm``."""
        prepared, scores = self.prepared[task], {}
        suffixes = {split: suffix for split, suffix in TASKS[task].dev_splits.items() if prepared.has(split)}
        predictions = predict_splits(prepared, checkpoint, list(suffixes), self.max_positions, device, stop)
        for split, suffix in suffixes.items():
            labels = prepared.labels(split)
            write_prediction_table(directory / f"predictions.{split}.tsv", prepared, split, predictions[split], labels)
            found = score(TASKS[task], predictions[split], labels)
            scores |= {f"{name}{suffix}": value for name, value in found.items()}
        return scores

    def owns(self, task: str) -> bool:
        return task in SCORED

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
        plan = self.session.plan
        if self.intermediate is None:
            return super().execute(execute_runs)
        independent = plan(task for name, task in self.tasks.items() if name not in INTERMEDIATE_FOR)
        independent.sort(key=lambda run: run.task.name != INTERMEDIATE_TASK)  # MNLI first: other tasks wait for it
        dependent = [task for name, task in self.tasks.items() if name in INTERMEDIATE_FOR]
        check_not_started_without_intermediate(plan(dependent))
        failures = execute_runs(independent) if independent else []
        start = best_intermediate(self.intermediate)
        if start is None:
            reason = f"it needs a finished run of {INTERMEDIATE_TASK} to start from, and there is none"
            return failures + [Failure(run, reason) for run in plan(dependent)]
        return failures + execute_runs(plan(dependent, best_checkpoint(self.intermediate, start)))

    def notes(self, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]) -> Iterator[str]:
        tasks = dict.fromkeys(result.task for result in results if "intermediate_sha256" in result.identity)
        if tasks:
            yield f"{', '.join(tasks)}: started from the best dev run of {INTERMEDIATE_TASK} (intermediate-task training)"
        if self.squad:
            yield from (f"SQuAD: {note}" for note in self.squad.notes)

    def table(self, summaries: Mapping[str, TaskSummary], notes: Sequence[str]) -> Table:
        return glue_table(self.session.row_name, summaries, self.squad, self.with_paper, notes)

    def summary_parts(self, summaries: Mapping[str, TaskSummary]) -> dict[str, Any]:
        name, value = average({task: summary.main.median for task, summary in summaries.items()})
        return {"average": {"name": name, "value": value}}

    def write_more(
        self, summaries: Mapping[str, TaskSummary], stop: threading.Event
    ) -> tuple[Sequence[Path], Sequence[str]]:
        """Write the leaderboard's archive, with ``with_test``."""
        if not self.with_test:
            return (), ()
        out, device = self.session.out, self.session.devices[0]
        archive, notices = write_submission(out, self.data, summaries, self.max_positions, device, stop)
        return [archive], notices


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
    row_name: str, summaries: Mapping[str, TaskSummary], squad: Summary | None, with_paper: bool, notes: Sequence[str]
) -> Table:
    """Build the table with the checkpoint's row and, with ``with_paper``, the papers' rows.

    Args:
        squad: ``squad.json`` for the same checkpoint.
    """
    tasks = [task for task in SCORED if task in summaries or (with_paper and task in AVERAGED)]
    average_name, value = average({task: summary.main.median for task, summary in summaries.items()})
    average_cell = format_score(value)
    if with_paper and average_name != "AVG":  # the column is the papers' average of all eight tasks
        average_cell = f"{average_cell} ({average_name.removeprefix('AVG ')})"
        average_name = "AVG"
    row = [row_name, *(task_cell(summaries.get(task)) for task in tasks), average_cell]
    columns = ["", *(task_heading(task) for task in tasks), average_name]

    # Version 2.0 if it was run (AMOS Table 1), otherwise the first version that was.
    spreads = squad.spreads if squad else {}
    squad_task = min(spreads, key=lambda name: "2" not in name, default=None)
    if squad_task or with_paper:
        columns += [f"{squad_task or 'SQuAD2.0'} {score}" for score in ("EM", "F1")]
        row += [format_spread(spreads.get(squad_task, {}).get(name)) for name in ("em", "f1")]
    rows = [row, *(paper_row(paper, tasks) for paper in paper_results())] if with_paper else [row]
    return Table("GLUE dev", columns, rows, notes)


def task_heading(task: str) -> str:
    """Return the task's name, with the score if it is not accuracy."""
    names = {"MNLI": "MNLI m/mm", "CoLA": "CoLA (Matthews)", "STS-B": "STS-B (Spearman)"}
    return names.get(task, task)


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
