"""Prepared tables of texts, and the benchmark that trains a model for each and scores it: ``amos classify`` has one table."""

import argparse
import dataclasses
import json
import os
import shlex
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.downstream.texts.dataset import (
    UNKNOWN_CLASS,
    open_texts,
    read_targets,
    read_task_record,
)
from amos_fairseq.downstream.texts.labeling import PROBABILITY, as_json, label_table, name_predictions, predict_logits
from amos_fairseq.downstream.texts.linear import MOST_ROWS, OUTPUT_LAYER, fit_head
from amos_fairseq.downstream.texts.prepare import NAME, prepare_inside
from amos_fairseq.downstream.texts.scores import (
    HEADINGS,
    SCORES,
    calibration_error,
    fit_temperature,
    predictions_of,
    scores_of_classes,
    text_scores,
)
from amos_fairseq.experiments.benchmark import (
    Benchmark,
    BenchmarkTask,
    Session,
    TaskRun,
    find_devices,
    session_from,
    usable_folder,
)
from amos_fairseq.experiments.recipes import Hyperparameters, different
from amos_fairseq.experiments.records import (
    ERROR,
    LINEAR,
    SCORES_OF_TEST,
    ConstantScores,
    RunResult,
    Summaries,
    content_sha256,
)
from amos_fairseq.experiments.table import (
    MOST_PRINTED,
    error_in_words,
    export_notice,
    ratio_error,
    run_and_print,
    standard_error,
    table_of_test,
)
from amos_fairseq.files import csv_lines, write_text
from amos_fairseq.output.terminal import Table
from amos_fairseq.text.prepared_data import PREPARE_AGAIN
from amos_fairseq.untrusted import read_text

CONSTANTS = {"classes": "most frequent class", "labels": "most frequent labels", "number": "mean of training"}
# The fields of task.json that, with the source files, determine the data.
IDENTITY_FIELDS = ("task", "kind", "labels", "tokenizer_sha256", "settings")


@dataclass(frozen=True)
class TextData:
    """The prepared data of one task."""

    directory: Path
    record: dict[str, Any]  # content of ``task.json``

    @property
    def name(self) -> str:
        return self.record["task"]

    @property
    def kind(self) -> str:
        return self.record["kind"]

    @property
    def label_names(self) -> list[str]:
        """Names in the order of the classes; empty for a regression."""
        return self.record["labels"]

    @property
    def main_score(self) -> str:
        """The score that selects the best checkpoint and seed."""
        return self.record["scores"][0]

    @property
    def dev_splits(self) -> dict[str, str]:
        """Dev split -> suffix of its scores, which is empty where there is one such split."""
        splits = self.record["splits"].items()
        return {split: facts.get("suffix", "") for split, facts in splits if split.startswith("valid")}

    @property
    def num_train(self) -> int:
        return self.record["splits"]["train"]["rows"]

    def as_task(self, max_positions: int, trials: tuple[Hyperparameters, ...]) -> BenchmarkTask:
        """Return the task for a model of ``max_positions`` and the recipe's trials."""
        trials = different(trial.for_labels(len(self.label_names)) for trial in trials)
        notes = (*self.notes(), *self.notes_on_cut_rows(max_positions, {trial.separator for trial in trials}))
        return BenchmarkTask(self.name, self.num_train, self.main_score, self.sha256(), trials, notes)

    def sha256(self) -> str:
        """Return a fingerprint of the data that runs are trained and scored on. Test files do not change it."""
        fields = {name: self.record.get(name) for name in IDENTITY_FIELDS}
        splits = {
            split: [facts.get("sha256"), facts["rows"]]
            for split, facts in self.record["splits"].items()
            if not split.startswith("test")
        }
        return content_sha256(fields | {"splits": splits})

    def rows_identity(self) -> dict[str, Any]:
        """Return what identifies the training rows for any tokenizer: source, number, choice and labels."""
        rows = {"source_sha256": self.record["splits"]["train"].get("sha256"), "rows": self.num_train}
        rows["settings"] = self.record["settings"]
        return {"task": self.name, "kind": self.kind, "labels": self.label_names} | rows

    def notes(self) -> Iterator[str]:
        name, facts = self.name, self.record["splits"]["train"]
        source = facts.get("source_rows", facts["rows"])
        if self.num_train < source:
            yield f"{name}: trained on {self.num_train:,} of {source:,} rows"
        yield from (f"{name}: {note}" for note in self.record.get("notes", ()))

    def notes_on_cut_rows(self, max_positions: int, separators: Collection[int | None]) -> Iterator[str]:
        """Yield a footnote if rows of training or dev sets are longer than the model reads."""
        counts = []
        for split, facts in self.record["splits"].items():
            if not split.startswith("test"):
                num_cut = max(open_texts(self.directory, split, max_positions, each).num_cut for each in separators)
                counts += [f"{num_cut:,} of {facts['rows']:,} in {split}"] if num_cut else []
        if counts:
            cut = f"rows of more than {max_positions} tokens are cut, of a pair the longer text first"
            yield f"{self.name}: {cut}: {', '.join(counts)}"

    def labels(self, split: str) -> np.ndarray:
        """Return class indices [N] int64, or the values of a regression [N] float64."""
        return read_targets(self.directory, split, self.record)

    def constant(self, splits: Mapping[str, str]) -> ConstantScores:
        """Return the scores of a constant on ``splits``, with the suffixes of their scores: the most frequent class, the labels
        that more than half of the training rows have, or the mean of their numbers."""
        train, kind = self.labels("train"), self.kind
        if kind == "classes":
            constant = np.bincount(train).argmax()
        else:
            constant = train.mean(axis=0) > 0.5 if kind == "labels" else train.mean()
        scores: dict[str, float] = {}
        for split, suffix in splits.items():
            labels = self.labels(split)
            split_scores = self.score(np.broadcast_to(constant, labels.shape), labels)
            scores |= {f"{name}{suffix}": value for name, value in split_scores.items()}
        return ConstantScores(self.record["splits"][next(iter(splits))]["rows"], {CONSTANTS[kind]: scores})

    def score(self, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        scores = text_scores(self.kind, predictions, labels, self.record["scores"])
        if self.kind == "labels":
            parts, wholes = 2 * (predictions & labels).sum(1), predictions.sum(1) + labels.sum(1)
            scores["micro_f1" + ERROR] = ratio_error(parts, wholes)
        return scores

    def ids(self, split: str) -> list[str]:
        """Return what the files call each row; row numbers if they have no names."""
        file = self.directory / f"{split}.ids"
        if file.is_file():
            return read_text(file, PREPARE_AGAIN).split("\n")[:-1]  # an id can contain other characters that end a line
        return [str(i) for i in range(self.record["splits"][split]["rows"])]

    def logits(
        self, loaded: LoadedCheckpoint, split: str, max_positions: int, device: str, stop: threading.Event
    ) -> np.ndarray:
        """Return the outputs of a fine-tuned checkpoint for a split, as :func:`predict_logits` does."""
        rows = open_texts(self.directory, split, max_positions, loaded.separator)
        head = self.record.get("head", self.name)  # of a test set without a task of its own
        return predict_logits(loaded, list(rows), device, stop, head)

    def texts(self, split: str) -> list[list[str]]:
        """Return the texts of each row as they were read, where they are kept."""
        file = self.directory / f"{split}.texts.jsonl"
        return list(map(json.loads, read_text(file, PREPARE_AGAIN).split("\n")[:-1] if file.is_file() else []))

    def spell(self, values: np.ndarray) -> list[str]:
        """Return predictions or labels as cells of a table: names as they are, numbers and lists of names as JSON."""
        names = name_predictions(self.kind, self.label_names, values)
        return [name if isinstance(name, str) else as_json(name) for name in names]


def read_text_data(directory: Path) -> TextData:
    return TextData(directory, read_task_record(directory))


@dataclass
class TextBenchmark(Benchmark):
    """Tables of texts, with a model for each."""

    prepared: Mapping[str, TextData]

    trained_as = "text_classification"
    id_column, dev_name = "index", "{split}"  # in files of predictions

    @property
    def max_positions(self) -> int:
        return self.session.checkpoint.max_positions

    def tables_of(self, task: str) -> list[TextData]:
        return [self.prepared[task]]

    def train_flags(self, run: TaskRun) -> list[str]:
        directories = os.pathsep.join(str(data.directory) for data in self.tables_of(run.task.name))
        return [directories, "--tokens-per-text", str(self.max_positions), *run.task.selection_flags]

    def constants(self) -> dict[str, ConstantScores]:
        return {name: data.constant(data.dev_splits) for name, data in self.prepared.items()}

    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Return the scores by name and write ``predictions.SPLIT.tsv``."""
        return self.evaluate_table(self.prepared[task], "", load_checkpoint(checkpoint), device, stop)

    def evaluate_table(
        self, data: TextData, prefix: str, loaded: LoadedCheckpoint, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Score a checkpoint on one table; ``prefix``: comes before the split in the names of the files."""
        scores = {}
        for split, suffix in data.dev_splits.items():
            logits = data.logits(loaded, split, self.max_positions, device, stop)
            split_scores = data.score(predictions_of(data.kind, logits), data.labels(split))
            scores |= {f"{name}{suffix}": value for name, value in split_scores.items()}
            scores |= (calibration := self.calibration(logits, data.labels(split)))
            logits /= calibration.get("temperature", 1.0)
            self.write_predictions(data, split, prefix + self.dev_name.format(split=split), logits, loaded.file.parent)
        return scores

    def calibration(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return what is known of the probabilities of a dev set, besides the scores; see :meth:`calibrated`."""
        return {}

    def write_predictions(self, data: TextData, split: str, name: str, logits: np.ndarray, folder: Path) -> None:
        """Write ``predictions.NAME.tsv``: of each row id, prediction, label, probability of a predicted class, and texts."""
        header = [self.id_column, "prediction", "label"]
        columns = [data.ids(split), data.spell(predictions_of(data.kind, logits)), data.spell(data.labels(split))]
        if data.kind == "classes":
            header.append(PROBABILITY)
            columns.append([f"{share:.6g}" for share in softmax(logits, axis=1).max(1)])
        if texts := data.texts(split):
            header += data.record["text_columns"]
            columns += list(zip(*texts, strict=True))
        lines = csv_lines([header, *zip(*columns, strict=True)], "\t")
        write_text(folder / f"predictions.{name}.tsv", "".join(lines))


def main(args: argparse.Namespace) -> None:
    if args.predict is not None:
        results, out, device = Path(args.checkpoint), Path(args.out), find_devices(args.cpu)[0]
        num_rows = label_table(results, args.predict, out, args.text, args.no_header, args.probabilities, device)
        print(f"{out}: {num_rows:,} rows")
        return
    session = session_from(args)
    out = usable_folder(session.out)
    with session.preparing() as tokenizer:
        data = prepare_inside(out, args.tables, tokenizer)
    run_and_print(open_classification(session, data))


def open_classification(session: Session, data: Path) -> "Classification":
    """Read the data that ``amos classify`` has prepared with the tokenizer of the session."""
    prepared = read_text_data(data)
    trials = session.recipe.trials_of(NAME)
    if not (data / "input1").is_dir():  # there is nothing to separate
        trials = different(dataclasses.replace(trial, num_separators=1) for trial in trials)
    task = prepared.as_task(session.checkpoint.max_positions, trials)
    is_small = prepared.num_train <= MOST_ROWS and not session.checkpoint.from_scratch
    if session.recipe.name == "own_labels" and is_small:
        task = dataclasses.replace(task, trials=(*task.trials, task.trials[0].as_linear()))
    return Classification(session, data, {NAME: task}, {NAME: prepared})


@dataclass
class Classification(TextBenchmark):
    """Any table of texts."""

    name = NAME
    id_column, dev_name = "line", "dev"

    @property
    def kind(self) -> str:
        return self.prepared[NAME].kind

    @property
    def columns(self) -> dict[str, str]:
        calibration = ("ece_before", "ece") if self.kind == "classes" else ()
        return {score: HEADINGS[score] for score in (*SCORES[self.kind], *calibration)}

    @property
    def title(self) -> str:
        return f"{self.label(NAME)}, dev"

    def label(self, task: str) -> str:
        return self.prepared[task].record["label_column"]

    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Return the scores with the standard error of the main one, by which a linear model is chosen or not."""
        scores, data = super().evaluate(task, checkpoint, device, stop), self.prepared[task]
        kind = "accuracy" if data.kind == "labels" else data.main_score  # of labels, for micro-F1 that is perfect
        error = standard_error(kind, scores[data.main_score], data.record["splits"]["valid"]["rows"])
        return scores | {(name := data.main_score + ERROR): scores.get(name) or error}

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterator[str]:
        if self.kind == "number":
            yield "MSE: mean squared error, in the squared unit of the label"
            if len(self.prepared[NAME].record["text_columns"]) == 2:
                yield "with few pairs, cosines of the texts' vectors may score higher: see docs/sentence_embeddings.md"
        if self.kind == "classes":
            yield "ECE: expected calibration error in percent, on dev, before and after a temperature was fitted to dev"

    def fit(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, Tensor]:
        data, loaded = self.prepared[task], load_checkpoint(checkpoint)
        texts = list(open_texts(data.directory, "train", self.max_positions, loaded.separator))
        return fit_head(loaded, texts, data.labels("train"), data.kind, device, stop)

    def calibration(self, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return the calibration error before and after the temperature, and the temperature, which is fitted to the rows."""
        if self.kind != "classes":
            return {}
        known = labels != UNKNOWN_CLASS
        temperature = fit_temperature(logits[known], labels[known]) if known.any() else 1.0
        before, after = (calibration_error(logits / divisor, labels) for divisor in (1.0, temperature))
        return {"ece_before": before, "ece": after, "temperature": temperature}

    def calibrated(self, weights: dict[str, Tensor], scores: Mapping[str, float]) -> dict[str, Tensor]:
        """Divide the logits by the temperature: probabilities change, predictions do not."""
        if "temperature" not in scores:
            return weights
        names = (f"{OUTPUT_LAYER}.weight", f"{OUTPUT_LAYER}.bias")
        return weights | {name: weights[name].float() / scores["temperature"] for name in names}

    def details(self, summaries: Summaries, stop: threading.Event) -> list[Table]:
        """Return the scores of the best run on the test set, its scores of each class, and what it confuses; write
        ``predictions.test.tsv``."""
        data, best = self.prepared[NAME], summaries[NAME].best
        loaded, tables = load_checkpoint(best.checkpoint_in(self.session.out)), []
        for split, name in (("valid", "dev"), ("test", "test")):
            if split not in data.record["splits"]:
                continue
            logits = data.logits(loaded, split, self.max_positions, self.session.devices[0], stop)
            labels, predictions = data.labels(split), predictions_of(data.kind, logits)
            if split == "test":
                self.write_predictions(data, split, name, logits, loaded.file.parent)
                ece = {"ece": calibration_error(logits, labels)} if data.kind == "classes" else {}
                scores, constant = data.score(predictions, labels) | ece, data.constant({split: ""})
                write_text(loaded.file.parent / SCORES_OF_TEST, json.dumps(scores, indent=1) + "\n")
                note = f"rows{error_in_words(data.main_score, scores, len(labels), self.unit)}"
                model = "linear model" if best.trial == LINEAR else "trained run that is best on dev"
                tables.append(table_of_test(self.label(NAME), self.columns, scores, constant, note, model))
            if data.kind != "number":
                rows = scores_of_classes(predictions, labels, data.label_names)
                tables.append(Table(f"{data.kind} of {name}", ["", "precision", "recall", "F1", "rows"], rows))
            if data.kind == "classes" and len(data.label_names) <= MOST_PRINTED:
                tables.append(confusion(predictions, labels, data.label_names, name))
        return tables

    def write_more(self, summaries: Summaries, stop: threading.Event) -> tuple[Sequence[Path], Sequence[str]]:
        out = self.session.out
        label = (
            f"to label other rows: amos classify --checkpoint {shlex.quote(str(out))} --predict FILE --out LABELS.tsv"
        )
        return (), (label, export_notice(out, summaries[NAME].best))


def confusion(predictions: np.ndarray, labels: np.ndarray, names: Sequence[str], where: str) -> Table:
    """Return how many rows of each class (the row) have each prediction (the column), without rows of an unknown class."""
    counts = np.zeros((len(names), len(names)), dtype=np.int64)
    known = labels != UNKNOWN_CLASS
    np.add.at(counts, (labels[known], predictions[known]), 1)
    rows = [[name, *map(str, row)] for name, row in zip(names, counts.tolist(), strict=True)]
    return Table(f"label (row) and prediction (column), {where}", ["", *names], rows, is_square=True)
