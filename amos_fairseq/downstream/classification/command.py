"""Classification of any texts: the task ``text_classification`` trains; this file predicts, scores and shows the table."""

import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.downstream.benchmark import (
    Benchmark,
    BenchmarkTask,
    Failure,
    TaskRun,
    batches,
    plan_runs,
    selection_flags,
)
from amos_fairseq.downstream.classification.dataset import TASK_FILE, UNKNOWN_CLASS, LabeledTexts, read_task_record
from amos_fairseq.downstream.classification.scores import MAIN_SCORES, SCORES, predictions_of, text_scores
from amos_fairseq.downstream.results import RunResult, Spread, TaskSummary, best_checkpoint, content_sha256, summarize
from amos_fairseq.downstream.session import Session
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text
from amos_fairseq.models.fine_tuning import TEXT_HEAD
from amos_fairseq.output.tables import MISSING, Table, format_score

NAME = "classification"
RANDOM = "classification-random"  # its runs start from random weights
PREDICTIONS = "predictions.dev.tsv"
HEADINGS = {
    "accuracy": "accuracy",
    "micro_f1": "micro-F1",
    "macro_f1": "macro-F1",
    "matthews": "Matthews",
    "spearman": "Spearman",
    "pearson": "Pearson",
    "mse": "MSE",
}
UNKNOWN_NAME = "<unknown>"  # in predictions.dev.tsv: a class that the training set lacks
_HINT = "give the files with --train, and the same command prepares them again"


class Classification(Benchmark):
    """The data that ``amos classify`` has prepared in OUT, and the table with a row for what always predicts the same.

    Args:
        data: directory with ``task.json``.
        with_random: also run every seed from random weights, for another row of the table.

    Raises:
        UserError: the data are damaged, or belong to a tokenizer other than the checkpoint's; or the recipe has no settings
            for classification.
    """

    name = NAME
    columns = HEADINGS

    def __init__(self, session: Session, data: Path, with_random: bool = False) -> None:
        self.session, self.data, self.max_positions = session, data.resolve(), session.checkpoint.max_positions
        if os.pathsep in str(self.data):
            raise UserError(f"{self.data}: fairseq separates folders at {os.pathsep!r}: give a path without it")
        self.record = read_task_record(self.data, _HINT)
        self.kind, self.labels = self.record["kind"], self.record["labels"]
        session.checkpoint.check_tokenizer(self.data / "tokenizer")
        trials = session.recipe.trials_of(NAME)
        is_pair = (self.data / "input1").is_dir()
        if not is_pair:  # there is nothing to separate
            trials = tuple(dict.fromkeys(dataclasses.replace(trial, num_separators=1) for trial in trials))
        separators = {trial.separator for trial in trials}
        train, self.dev = ([self._rows(split, each) for each in separators] for split in ("train", "valid"))
        self.title = f"{self.record['label_column']}, dev"
        notes = (*self.record["notes"], *self._notes_on_cut_rows(train, self.dev))
        main, sha256 = MAIN_SCORES[self.kind], content_sha256({"labels": self.labels, "files": self.record["sha256"]})
        task = BenchmarkTask(NAME, len(train[0]), main, sha256, trials, notes)
        self.tasks = {NAME: task}
        if with_random:
            self.tasks[RANDOM] = dataclasses.replace(task, name=RANDOM)
        self._majority = text_scores(self.kind, *self._majority_predictions(train[0].targets, self.dev[0].targets))

    def _rows(self, split: str, separator: int | None) -> LabeledTexts:
        dictionary = Vocabulary.of_corpus([self.data / "input0"], None).load_dictionary()
        return LabeledTexts(self.data, split, self.record, dictionary, self.max_positions, separator)

    def _notes_on_cut_rows(self, train: list[LabeledTexts], dev: list[LabeledTexts]) -> Iterator[str]:
        counts = []
        for name, rows in (("training", train), ("dev", dev)):
            if num_cut := max(each.num_cut for each in rows):
                counts.append(f"{num_cut:,} of {len(rows[0]):,} {name} rows")
        if counts:
            longer = f"of more than {self.max_positions} tokens, of a pair the longer text first"
            yield f"{' and '.join(counts)} are cut: those {longer}"

    def _majority_predictions(self, train: np.ndarray, dev: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each dev row, what is most frequent in the training set or the mean of its numbers, and the targets."""
        if self.kind == "classes":
            constant = np.bincount(train).argmax()
        else:
            constant = train.mean(axis=0) > 0.5 if self.kind == "labels" else train.mean()
        return np.broadcast_to(constant, dev.shape), dev

    def train_flags(self, run: TaskRun) -> list[str]:
        flags = [str(self.data), "--task", "text_classification", "--criterion", "text_classification"]
        return [*flags, "--tokens-per-text", str(self.max_positions), *selection_flags(run.task)]

    def fill_directory(self, run: TaskRun) -> None:
        """Copy ``tokenizer/`` and ``task.json``, with the names of the labels, beside the checkpoints."""
        super().fill_directory(run)
        shutil.copyfile(self.data / TASK_FILE, run.directory / TASK_FILE)

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Return the scores of the dev rows, and write ``predictions.dev.tsv``: the row in the file, prediction, label."""
        loaded = load_checkpoint(checkpoint)
        dev = self._rows("valid", loaded.separator)
        logits = predict_logits(loaded, [dev[index]["tokens"] for index in range(len(dev))], device, stop)
        predictions = predictions_of(self.kind, logits)
        lines = (self.data / "valid.ids").read_text(encoding="utf-8").split()
        cells = (spell_predictions(self.kind, self.labels, values) for values in (predictions, dev.targets))
        rows = zip(lines, *cells, strict=True)
        write_text(
            directory / PREDICTIONS, "line\tprediction\tlabel\n" + "".join("\t".join(row) + "\n" for row in rows)
        )
        return text_scores(self.kind, predictions, dev.targets)

    def setup(self) -> dict[str, Any]:
        """Runs from random weights have the same settings."""
        return self.session.setup({NAME: self.tasks[NAME].trials})

    def execute(self, execute_runs: Callable[[Sequence[TaskRun]], list[Failure]]) -> list[Failure]:
        runs = plan_runs(self.session, [self.tasks[NAME]])
        if RANDOM in self.tasks:
            scratch = dataclasses.replace(self.session.checkpoint, from_scratch=True)
            runs += plan_runs(dataclasses.replace(self.session, checkpoint=scratch), [self.tasks[RANDOM]])
        return execute_runs(runs)

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        """The table has the row of random weights of an earlier call, too."""
        shown = [result for result in results if result.task in (NAME, RANDOM)]
        return shown, summarize(shown)

    def label(self, task: str) -> str:
        return "random weights" if task == RANDOM else self.record["label_column"]

    def table(self, summaries: Mapping[str, TaskSummary], notes: Sequence[str]) -> Table:
        shown, rows = SCORES[self.kind], []
        names = {NAME: self.session.row_name, RANDOM: f"{self.session.checkpoint.arch} (random weights)"}
        for task, name in names.items():
            if task in summaries:
                scores = summaries[task].scores
                rows.append([name, *(format_any(score, scores[score]) for score in shown)])
        constants = {"classes": "most frequent class", "labels": "most frequent labels", "number": "mean of training"}
        spreads = {score: Spread(self._majority[score], None, 1) for score in shown}
        rows.append([constants[self.kind], *(format_any(score, spreads[score]) for score in shown)])
        return Table(self.title, ["", *(HEADINGS[score] for score in shown)], rows, notes)

    def notes(self, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]) -> Iterator[str]:
        if self.kind == "number":
            yield "MSE: mean squared error, in the squared unit of the label"

    def summary_parts(self, summaries: Mapping[str, TaskSummary]) -> dict[str, Any]:
        return {"majority": self._majority}

    def write_more(
        self, summaries: Mapping[str, TaskSummary], stop: threading.Event
    ) -> tuple[Sequence[Path], Sequence[str]]:
        """Return the commands that use the best run."""
        if NAME not in summaries:
            return (), ()
        best, out = best_checkpoint(self.session.out, summaries[NAME].best), self.session.out
        return (), (
            f"to label other rows: amos classify --checkpoint {out} --predict FILE --out LABELS.tsv",
            f"to export the run that is best on dev: amos export {best} HF_DIR",
        )


def format_any(score: str, spread: Spread | None) -> str:
    """Return the cell of a score: percent with one decimal, a squared error with three digits."""
    if spread is None:
        return MISSING
    if score != "mse":
        return format_score(spread.median, spread.deviation)
    return f"{spread.median:.3g}" if spread.deviation is None else f"{spread.median:.3g} ± {spread.deviation:.2g}"


def name_predictions(kind: str, labels: Sequence[str], values: np.ndarray) -> list[Any]:
    """Return predictions or targets as plain values: the name of a class, a list of labels, or a number."""
    if kind == "number":
        return [float(f"{value:.9g}") for value in values]  # float32 has no more digits
    if kind == "classes":
        return [UNKNOWN_NAME if value == UNKNOWN_CLASS else labels[value] for value in values.tolist()]
    return [[labels[index] for index in np.flatnonzero(row)] for row in values]


def spell_predictions(kind: str, labels: Sequence[str], values: np.ndarray) -> list[str]:
    """Return predictions or targets as cells of a table: names as they are, numbers and lists of names as JSON."""
    cells = name_predictions(kind, labels, values)
    return [cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False) for cell in cells]


def predict_logits(
    loaded: LoadedCheckpoint, sequences: Sequence[Tensor], device: str, stop: threading.Event, task: str = TEXT_HEAD
) -> np.ndarray:
    """Return the outputs of a head for texts: [N, outputs] float64; of a regression in the unit of its values.

    Args:
        loaded: a checkpoint with one head for texts, or a head for each of several tasks.
        sequences: tokens of each row, LongTensors [L].
        task: the one whose head it is, where there are several.

    Raises:
        UserError: the checkpoint has no such head.
        Stopped: ``stop`` is set.
    """
    heads = getattr(loaded.model, "classification_heads", {})
    head = TEXT_HEAD if TEXT_HEAD in heads else task
    if head not in heads:
        known = ", ".join(heads)
        raise UserError(
            f"{loaded.file} has no head for {task} (it has {known})"
            if heads
            else f"{loaded.file} has no head for texts: give the --out of amos classify"
        )
    model = loaded.model.to(device)
    logits = np.empty((len(sequences), heads[head].output.out_features))
    for indices in batches([len(tokens) for tokens in sequences], stop):
        rows = [sequences[i] for i in indices]
        tokens, lengths = pad_sequence(rows, True, loaded.dictionary.pad()).to(device), [len(row) for row in rows]
        with torch.inference_mode():
            output, _ = model(tokens, classification_head_name=head, lengths=lengths)
        logits[indices] = output.float().cpu().numpy()
    return logits
