"""``amos tag``: labels of words, trained by the task ``sequence_tagging``."""

import argparse
import dataclasses
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from fairseq.models import BaseFairseqModel

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.downstream.benchmark import Benchmark, BenchmarkTask, TaskRun, batches, selection_flags, usable_folder
from amos_fairseq.downstream.classification.scores import AVERAGE
from amos_fairseq.downstream.multi_task.dataset import check_epoch, rows_per_epoch
from amos_fairseq.downstream.recipes import WORDS, Hyperparameters
from amos_fairseq.downstream.results import RunResult, TaskSummary, content_sha256, divide, summarize_divided
from amos_fairseq.downstream.runner import run_and_print
from amos_fairseq.downstream.session import Session, preparing, session_from
from amos_fairseq.downstream.tagging.dataset import (
    TASK_PREFIX,
    TaggedSentences,
    WordSequences,
    has_unlabeled,
    read_tagging_manifest,
    read_words,
)
from amos_fairseq.downstream.tagging.model import word_head_name
from amos_fairseq.downstream.tagging.prepare import Choices, prepare_tagging_inside
from amos_fairseq.downstream.tagging.scores import OUTSIDE, count, main_score, scores
from amos_fairseq.downstream.tagging.task import Column
from amos_fairseq.downstream.tagging.word_files import UNLABELED
from amos_fairseq.downstream.views import FULL, TAGGING_VIEWS, WORD_DROPOUT, parse_views
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text

PREDICTIONS = "predictions.txt"
SCORES = "scores.json"
CUT = "<cut>"  # in predictions: a word that the model did not read; CoNLL-U has the label "_"
# In the order of the table; labels that do not mark spans have only accuracy.
SCORE_NAMES = {"f1": "span F1", "precision": "precision", "recall": "recall", "accuracy": "accuracy"}
AND = ","  # between the columns of a run; no column has it in its name


@dataclass(frozen=True)
class ColumnData(Column):
    """The prepared data of a column of labels.

    Attributes:
        sha256: of its manifest.
        unlabeled: sentences for views; None where there are none, or no views.
        words: of ``dev``.
    """

    sha256: str
    train: TaggedSentences
    dev: TaggedSentences
    unlabeled: WordSequences | None
    words: list[list[str]]

    @classmethod
    def read(cls, directory: Path, max_positions: int, with_views: bool) -> "ColumnData":
        """Read a folder of ``amos prepare tagging``."""
        column, dictionary = Column.of(directory), Vocabulary.of_corpus([directory], None).load_dictionary()
        train, dev = (
            TaggedSentences(directory, split, dictionary, len(column.labels), max_positions, training=split == "train")
            for split in ("train", "valid")
        )
        unlabeled = None
        if with_views and has_unlabeled(directory):
            unlabeled = WordSequences(directory, UNLABELED, dictionary, max_positions, training=True)
        words = read_words(directory, "valid")
        if list(map(len, words)) != [len(dev.labels(index)) for index in range(len(dev))]:
            raise UserError(f"{directory}: valid.words.jsonl does not belong to the labels: prepare the data again")
        sha256 = content_sha256(read_tagging_manifest(directory))
        return cls(**vars(column), sha256=sha256, train=train, dev=dev, unlabeled=unlabeled, words=words)

    @property
    def main_score(self) -> str:
        return main_score(self.has_spans)


def main(arguments: argparse.Namespace) -> None:
    session = session_from(arguments, Tagging.name)
    if arguments.data is not None:
        data = list(map(Path, arguments.data))
    else:
        check_unlabeled(session, TAGGING_VIEWS, arguments.unlabeled)
        with preparing(session, Tagging.name) as tokenizer:
            files = (arguments.train, arguments.dev)
            data = [prepare_tagging_inside(session.out, *files, tokenizer, Choices.of(arguments))]
    run_and_print(arguments.out, open_tagging(session, data))


def open_tagging(session: Session, data: Sequence[Path]) -> "Tagging":
    """Read the prepared data of one column of labels, or of several, which one model learns together."""
    if session.out in [directory.resolve() for directory in data]:
        raise UserError(f"--out {session.out} is the directory of the data, which has a tagging.json too: give another")
    directories, max_positions = list(map(usable_folder, data)), session.checkpoint.max_positions
    trials = word_trials(session, TAGGING_VIEWS, any(map(has_unlabeled, directories)))
    columns: dict[str, ColumnData] = {}
    for directory in directories:
        session.checkpoint.check_tokenizer(directory / "tokenizer")
        column = ColumnData.read(directory, max_positions, any(trial.views for trial in trials))
        if word_head_name(column.name) in map(word_head_name, columns):
            raise UserError(
                f"--data: {directory} is another folder of the column {column.name}, or of one whose name differs in signs "
                "alone: give one of them"
            )
        columns[column.name] = column
    notes = tuple(
        f"{name}: {note}"
        for name, column in columns.items()
        for note in notes_of_cuts(column.train, column.dev, column.unlabeled, max_positions)
    )
    name, first = TASK_PREFIX + AND.join(columns), next(iter(columns.values()))
    if len(columns) == 1:
        task = BenchmarkTask(name, len(first.train), first.main_score, first.sha256, trials, notes)
    else:
        num_rows = sum(rows_per_epoch([len(column.train) for column in columns.values()]))
        check_epoch(num_rows, max(trial.batch_size for trial in trials))
        sha256 = content_sha256({column.name: column.sha256 for column in columns.values()})
        task = BenchmarkTask(name, num_rows, AVERAGE, sha256, trials, notes, carries_rest=True)
    return Tagging(session, directories[0], {name: task}, columns)


@dataclass
class Tagging(Benchmark):
    """Labels of words. The single task, such as ``tagging-upos``, has one column or several; the table has a row for each
    column that has results in OUT."""

    session: Session
    data: Path
    tasks: dict[str, BenchmarkTask]
    parts: dict[str, ColumnData]

    name = "tagging"
    title = "Sequence tagging, dev"
    columns = SCORE_NAMES

    def train_flags(self, run: TaskRun) -> list[str]:
        directories = os.pathsep.join(str(part.directory) for part in self.parts.values())
        flags = [directories, "--task", "sequence_tagging", "--criterion", "sequence_tagging"]
        flags += ["--label-smoothing", str(run.hyperparameters.label_smoothing)]
        return [*flags, *word_flags(run, self.session.checkpoint.max_positions), *selection_flags(run.task)]

    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Return the scores of the dev set, and write ``predictions.txt`` and ``scores.json``. Of several columns there are
        those of each, with its name before theirs, and the ``average`` of their main scores.

        A line of predictions.txt is a word, its label and the prediction, separated by tabs, because words and labels may
        contain spaces; a word that is cut has the prediction O, or ``<cut>`` where labels are classes of words.
        """
        model, directory = load_checkpoint(checkpoint).model, checkpoint.parent
        if len(self.parts) == 1:
            (part,) = self.parts.values()
            return self._evaluate_column(part, "", model, directory, device, stop)
        scores_of_all: dict[str, float] = {}
        for name, part in self.parts.items():
            own = self._evaluate_column(part, f"{name}.", model, directory, device, stop)
            scores_of_all |= {f"{name} {score}": value for score, value in own.items()}
        mains = [scores_of_all[f"{name} {part.main_score}"] for name, part in self.parts.items()]
        return {AVERAGE: fmean(mains)} | scores_of_all

    @staticmethod
    def _evaluate_column(
        part: ColumnData, prefix: str, model: BaseFairseqModel, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        predicted = predict_tags(model, word_head_name(part.name), part.dev, device, stop)
        counts: Counter[str] = Counter()
        lines = []
        for index, row in enumerate(predicted):
            gold, found = ([part.labels[i] for i in ids] for ids in (part.dev.labels(index), row))
            counts.update(count(gold, found, part.has_spans))
            found += [OUTSIDE if part.has_spans else CUT] * (len(gold) - len(found))
            lines += ["\t".join(cells) for cells in zip(part.words[index], gold, found, strict=True)]
            lines.append("")
        write_text(directory / f"{prefix}{PREDICTIONS}", "\n".join(lines) + "\n")
        found_scores = scores(counts)
        write_text(directory / f"{prefix}{SCORES}", json.dumps(found_scores | counts, indent=1) + "\n")
        return found_scores

    def setup(self) -> dict[str, Any]:
        """OUT may hold the results of several columns, so the recipe's section has one name for all."""
        (task,) = self.tasks.values()
        return self.session.setup({WORDS: task.trials})

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        """Return a result for each column of each run. Trial and best run of several columns are those of their average."""
        results = [result for result in results if result.task.startswith(TASK_PREFIX)]
        return summarize_divided(results, {result.directory: results_of_columns(result) for result in results})

    def label(self, task: str) -> str:
        return task.removeprefix(TASK_PREFIX)

    def notes(self, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]) -> Iterator[str]:
        if any("f1" in summary.scores for summary in summaries.values()):
            yield "a span is right if its type and both ends are (conlleval's rules, computed by seqeval)"


def results_of_columns(result: RunResult) -> list[RunResult]:
    """Return the results of the columns of a run; that of a single column as it is."""
    names = result.task.removeprefix(TASK_PREFIX).split(AND)
    if len(names) == 1:
        return [result]
    main_scores = {name: main_score(f"{name} f1" in result.scores) for name in names}
    return [
        dataclasses.replace(part, task=f"{TASK_PREFIX}{part.task} of {AND.join(names)}")
        for part in divide(result, main_scores)
    ]


def notes_of_cuts(
    train: WordSequences, dev: WordSequences, unlabeled: WordSequences | None, max_positions: int
) -> Iterator[str]:
    """Yield a note for the sentences of each split that are cut."""
    for name, sentences in (("training", train), ("dev", dev), ("unlabeled", unlabeled)):
        if sentences is not None and sentences.cut_words:
            counted = ", and counted as wrong" if sentences is dev else ""
            yield (
                f"{sentences.cut_words:,} of {sentences.num_words:,} {name} words are cut from "
                f"{sentences.cut_sentences:,} sentences of more than {max_positions} tokens{counted}"
            )


def word_trials(session: Session, views: Sequence[str], with_unlabeled: bool) -> tuple[Hyperparameters, ...]:
    """Return the settings of a recipe for words, without those that have no effect; a flag for views without effect is refused.

    Args:
        views: those of the head.
        with_unlabeled: whether there are sentences without labels.
    """
    trials = []
    for given in session.recipe.trials_of(WORDS):
        chosen = parse_views(given.views, views)
        if chosen and not with_unlabeled:
            raise UserError(f"--views {given.views} needs sentences without labels: give them with --unlabeled")
        sides = [view for view in chosen if view not in (FULL, WORD_DROPOUT)]
        unused = [name for name, used in (("view_layers", sides), ("unlabeled_start", chosen)) if not used]
        for name in session.overrides.keys() & unused:
            with_views = f"with --views {given.views}" if chosen else "without --views"
            raise UserError(f"--{name.replace('_', '-')} has no effect {with_views}: leave it out")
        # There is one text without a pair, and the head reads each word.
        settings = {"num_separators": 1, "pooling": "first", "views": ",".join(chosen)}
        settings |= {name: getattr(Hyperparameters, name) for name in unused}  # a recipe may have them
        trials.append(dataclasses.replace(given, **settings))
    return tuple(dict.fromkeys(trials))


def check_unlabeled(session: Session, views: Sequence[str], file: str | None) -> None:
    """Refuse views that cannot be used before raw files are converted; ``file``: that of --unlabeled."""
    if file is not None and not any(trial.views for trial in word_trials(session, views, with_unlabeled=True)):
        raise UserError(f"--unlabeled {file}: only --views learn from these sentences: give --views, or leave it out")
    word_trials(session, views, file is not None)


def word_flags(run: TaskRun, max_positions: int) -> list[str]:
    given, flags = run.hyperparameters, ["--tokens-per-sentence", str(max_positions)]
    if given.views:
        flags += ["--views", given.views, "--view-layers", given.view_layers]
        flags += ["--unlabeled-start", str(given.unlabeled_start)]
    return flags


def predict_tags(
    model: BaseFairseqModel, head: str, sentences: TaggedSentences, device: str, stop: threading.Event
) -> list[list[int]]:
    """Predict a label for each word that is not cut, by sentence.

    Args:
        model: in eval mode.
        head: name of its head for the labels.
    """
    if head not in getattr(model, "word_heads", {}):
        raise UserError("the checkpoint has no head for labels: fine-tune it with --task sequence_tagging first")
    model = model.to(device)
    predicted: list[Any] = [None] * len(sentences)
    for batch in batches(sentences.sizes, stop):
        net_input = sentences.collater([sentences[index] for index in batch])["net_input"]
        with torch.inference_mode():
            positions = net_input["word_positions"].to(device)
            output = model(net_input["src_tokens"].to(device), word_positions=positions, lengths=net_input["lengths"])
        for index, row in zip(batch, output.logits[head].argmax(-1).tolist(), strict=True):
            predicted[index] = row[: sentences.num_kept(index)]
    return predicted
