"""``amos tag``: labels of words, trained by the task ``sequence_tagging``."""

import argparse
import dataclasses
import json
import os
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor

from amos_fairseq.checkpoint_files import HeadOutputs
from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.downstream.labeled_task import AVERAGE, check_epoch, pad_tokens, rows_per_epoch
from amos_fairseq.downstream.prediction import load_best, predict
from amos_fairseq.downstream.words.dataset import (
    NUM_SPECIAL,
    Column,
    TaggedSentences,
    WordSequences,
    columns_by_head,
    has_unlabeled,
    pad_words,
    word_head_name,
)
from amos_fairseq.downstream.words.prepare import WordSource, check_column, convert_spans, prepare_tagging_inside
from amos_fairseq.downstream.words.views import CROSS_VIEWS, WordOutput, parse_views
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import TAGGING_VIEWS
from amos_fairseq.experiments.benchmark import (
    Benchmark,
    BenchmarkTask,
    Session,
    TaskRun,
    find_devices,
    session_from,
    usable_folder,
)
from amos_fairseq.experiments.recipes import WORDS, Hyperparameters, different
from amos_fairseq.experiments.records import (
    ERROR,
    ConstantScores,
    RunResult,
    Summaries,
    TaskSummary,
    content_sha256,
    divide,
    summarize_divided,
)
from amos_fairseq.experiments.table import (
    error_in_words,
    export_notice,
    ratio_error,
    run_and_print,
    table_of_test,
)
from amos_fairseq.files import write_lines, write_text
from amos_fairseq.inputs.files import JSONL, kind_of
from amos_fairseq.inputs.schemes import count, items_of, main_score, scores, scores_by_name
from amos_fairseq.inputs.tables import held_out_note, num_seen, seen_note
from amos_fairseq.inputs.word_files import (
    COLUMNS,
    LABEL,
    TASK_PREFIX,
    TEXT_LINES,
    TEXTS,
    UNLABELED,
    Sentence,
    WordFile,
    join_unspaced_words,
    read_sentences,
    words_in,
)
from amos_fairseq.output.terminal import Table, say
from amos_fairseq.setting_checks import as_flags
from amos_fairseq.text.tokenization.word_pieces import merge_windows, windows_of
from amos_fairseq.untrusted import read_json

# Words, labels, and predictions of those that are not cut.
LabeledWords = tuple[Sequence[str], Sequence[str], list[int]]
Window = tuple[int, dict[str, Tensor]]  # index of its first word, and what predict_words() reads
# In the order of the table; labels that do not mark spans have only accuracy.
SCORE_NAMES = {"f1": "span F1", "precision": "precision", "recall": "recall", "accuracy": "accuracy"}
AND = ","  # between the columns of a run; no column has it in its name
OF = " of "  # between a column and those that were learned with it


def main(args: argparse.Namespace) -> None:
    if args.predict is not None:
        file, results, out = Path(args.predict), Path(args.checkpoint), Path(args.out)
        words = read_sentences(file, args.columns, labeled=False, raw=kind_of(out) == JSONL)
        print(label_words(words, results, args.column, out, find_devices(args.cpu)[0]))
        return
    session, source = session_from(args), WordSource.of(args)
    folders = list(map(Path, args.data or ()))
    trials = word_trials(session, TAGGING_VIEWS, source.unlabeled, folders)
    if not folders:
        with session.preparing() as tokenizer:
            folders = [prepare_tagging_inside(session.out, source, tokenizer)]
    tagging = open_tagging(session, folders, trials)
    if args.test is not None:
        tagging.read_test(Path(args.test), args.columns)
    run_and_print(tagging)


@dataclass(frozen=True)
class ColumnData:
    """The prepared data of a column of labels; ``unlabeled`` is for views, and ``words`` are those of ``dev``."""

    column: Column
    train: TaggedSentences
    dev: TaggedSentences
    unlabeled: WordSequences | None
    words: list[list[str]]

    @classmethod
    def open(
        cls, session: Session, column: Column, with_views: bool, data_set: type[TaggedSentences] = TaggedSentences
    ) -> "ColumnData":
        session.checkpoint.check_tokenizer(column.directory / "tokenizer")
        max_tokens = session.checkpoint.max_positions
        train, dev = (
            data_set(column.directory, split, len(column.labels), max_tokens, training=split == "train")
            for split in ("train", "valid")
        )
        unlabeled = None
        if with_views and has_unlabeled(column.directory):
            unlabeled = WordSequences(column.directory, UNLABELED, max_tokens, training=True)
        return cls(column, train, dev, unlabeled, column.read_words("valid"))

    def gold(self) -> Iterator[list[str]]:
        """Yield the labels of each dev sentence."""
        yield from ([self.column.labels[label] for label in self.dev.labels(index)] for index in range(len(self.dev)))

    def constant(self, gold: Iterable[Sequence[str]]) -> ConstantScores:
        """Return the scores of the most frequent label of training for every word of the sentences with labels ``gold``."""
        labels = Counter(label for index in range(len(self.train)) for label in self.train.labels(index))
        most, counts = self.column.labels[labels.most_common(1)[0][0]], Counter()
        for sentence in gold:
            counts.update(count(sentence, [most] * len(sentence), self.column.has_spans))
        return ConstantScores(counts["words"], {f"most frequent label ({most})": scores(counts)})

    def notes(self, max_tokens: int, cut_in_dev: str = "counted as wrong") -> Iterator[str]:
        """Yield a note for dev sentences that train too, and for each split of which sentences are cut; ``cut_in_dev``: how
        the words count that are cut from dev."""
        if self.column.held_out:
            yield held_out_note(len(self.dev), len(self.train), "sentences", self.column.held_out)
        if self.column.seen:
            yield seen_note(self.column.seen, len(self.dev), "sentences")
        for name, sentences in (("training", self.train), ("dev", self.dev), ("unlabeled", self.unlabeled)):
            if sentences is not None and sentences.cut_words:
                counted = f", and {cut_in_dev}" if sentences is self.dev else ""
                yield (
                    f"{sentences.cut_words:,} of {sentences.num_words:,} {name} words are cut from "
                    f"{sentences.cut_sentences:,} sentences of more than {max_tokens} tokens{counted}"
                )


def open_tagging(session: Session, folders: Sequence[Path], trials: tuple[Hyperparameters, ...]) -> "Tagging":
    """Read the prepared data of one column of labels, or of several, which one model learns together."""
    if session.out in [folder.resolve() for folder in folders]:
        raise UserError(f"--out {session.out} is the directory of the data, which has a tagging.json too: give another")
    with_views, max_tokens = any(trial.views for trial in trials), session.checkpoint.max_positions
    columns = columns_by_head(map(usable_folder, folders)).values()
    opened = {column.name: ColumnData.open(session, column, with_views) for column in columns}
    notes = [f"{name}: {note}" for name, data in opened.items() for note in data.notes(max_tokens)]
    name, first = TASK_PREFIX + AND.join(opened), next(iter(opened.values()))
    if len(opened) == 1:
        task = BenchmarkTask(name, len(first.train), first.column.main_score, first.column.sha256, trials, tuple(notes))
    else:
        num_rows = sum(rows_per_epoch([len(data.train) for data in opened.values()]))
        check_epoch(num_rows, max(trial.batch_size for trial in trials))
        sha256 = content_sha256({name: data.column.sha256 for name, data in opened.items()})
        task = BenchmarkTask(name, num_rows, AVERAGE, sha256, trials, tuple(notes), continues_across_epochs=True)
    return Tagging(session, first.column.directory, {name: task}, opened)


@dataclass
class Tagging(Benchmark):
    """Labels of words. The single task, such as ``tagging-upos``, has one column or several (``opened``, by name). The table
    has a row for each."""

    opened: dict[str, ColumnData]
    tests: dict[str, WordFile] = field(default_factory=dict)  # the sentences of --test, by column

    name = "tagging"
    title = "Sequence tagging, dev"
    columns = SCORE_NAMES
    trained_as = "sequence_tagging"
    only_trains = (CROSS_VIEWS,)
    unit = "words"

    def train_flags(self, run: TaskRun) -> list[str]:
        directories = os.pathsep.join(str(opened.column.directory) for opened in self.opened.values())
        smoothing = ["--label-smoothing", str(run.hyperparameters.label_smoothing)]
        return [directories, *word_flags(run, self.session), *smoothing]

    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Return the scores of the dev set, and write ``predictions.txt`` and ``scores.json``. Of several columns there are
        those of each, with its name before theirs, and the ``average`` of their main scores.

        A line of predictions.txt is a word, its label and the prediction, separated by tabs, because words and labels may
        contain spaces; a word that is cut has the prediction O, or ``<cut>`` where labels are classes of words.
        """
        model, directory = load_checkpoint(checkpoint).model, checkpoint.parent
        all_scores: dict[str, float] = {}
        for name, opened in self.opened.items():
            sentences = [opened.dev[index] for index in range(len(opened.dev))]
            predictions = predict_words(model, opened.column.head, sentences, most_likely, device, stop)
            record = self.compare(name, zip(opened.words, opened.gold(), predictions, strict=True), directory)
            prefix = f"{name} " if len(self.opened) > 1 else ""
            all_scores |= {prefix + score: record[score] for score in (*SCORE_NAMES, "f1" + ERROR) if score in record}
        if len(self.opened) == 1:
            return all_scores
        mains = (all_scores[f"{name} {opened.column.main_score}"] for name, opened in self.opened.items())
        return {AVERAGE: fmean(mains)} | all_scores

    def summarize(self, results: Sequence[RunResult]) -> tuple[Sequence[RunResult], dict[str, TaskSummary]]:
        """Return a result for each column of each run. Trial and best run of several columns are those of their average."""
        return summarize_divided(results, results_of_columns)

    def label(self, task: str) -> str:
        return task.removeprefix(TASK_PREFIX)

    def read_test(self, path: Path, columns: Sequence[str] | None) -> None:
        """Read the sentences of ``--test`` with the labels of each column, and print what was read."""
        for name, opened in self.opened.items():
            file = self.tests[name] = read_sentences(path, columns, name)
            check_column(file, name)
            convert_spans([file], name, opened.column.labels)
            file.report("tag", name)
            if seen := num_seen(opened.column.read_words("train"), (each.words for each in file.sentences)):
                say(seen_note(seen, len(file.sentences), "sentences", "test"), "tag")

    def details(self, summaries: Summaries, stop: threading.Event) -> list[Table]:
        """Return the scores of the best run (of several columns by their average) on the test set, and those of each type of
        span or label of words there and on dev."""
        checkpoint = next(iter(summaries.values())).best.checkpoint_in(self.session.out)
        tables = []
        for name, opened in self.opened.items():
            column, what = opened.column, "spans" if opened.column.has_spans else "words"
            records = {"dev": read_json(checkpoint.parent / f"{self.prefix(name)}scores.json", "remove OUT/runs")}
            if name in self.tests:
                file, loaded, device = self.tests[name], load_checkpoint(checkpoint), self.session.devices[0]
                predictions = predict_file(loaded, column.head, file, most_likely, device)
                words = [sentence.words for sentence in file.sentences]
                gold = [sentence.columns[name] for sentence in file.sentences]
                rows = zip(words, gold, predictions, strict=True)
                record = records["test"] = self.compare(name, rows, checkpoint.parent, ".test")
                constant = opened.constant(gold)
                note = f"words{error_in_words(column.main_score, record, constant.num_scored, self.unit)}"
                if seen := num_seen(column.read_words("train"), words):
                    note += f"; {seen_note(seen, len(words), 'sentences', 'test')}"
                tables.append(table_of_test(name, SCORE_NAMES, record, constant, note))
            for split, record in records.items():
                rows = []
                for each, values in record["by_name"].items():
                    ratios = (f"{values[score]:.1f}" for score in ("precision", "recall", "f1"))
                    rows.append([each, *ratios, f"{values['number']:,}"])
                tables.append(Table(f"{name}, {what} of {split}", ["", "precision", "recall", "F1", what], rows))
        return tables

    def prefix(self, name: str) -> str:
        """Return what the names of a column's files begin with."""
        return f"{name}." if len(self.opened) > 1 else ""

    def compare(self, name: str, rows: Iterable[LabeledWords], folder: Path, suffix: str = "") -> dict[str, Any]:
        """Write the predictions, and return and write the scores, the numbers that they were computed from and those of each
        type of span or label of words."""
        column, pairs, lines = self.opened[name].column, [], []
        for words, gold, predicted in rows:
            pairs.append((gold, [column.labels[i] for i in predicted]))
            lines += [*map("\t".join, zip(words, gold, column.spell(predicted, len(words)), strict=True)), ""]
        of_sentences = [count(*pair, column.has_spans) for pair in pairs]
        counts = Counter()
        for each in of_sentences:
            counts.update(each)
        record = scores(counts) | counts | {"by_name": scores_by_name(pairs, column.has_spans)}
        if column.has_spans:
            right = [2 * each["right_spans"] for each in of_sentences]
            record["f1" + ERROR] = ratio_error(right, [each["found_spans"] + each["spans"] for each in of_sentences])
        write_text(folder / f"{self.prefix(name)}predictions{suffix}.txt", "\n".join([*lines, ""]))
        write_text(folder / f"{self.prefix(name)}scores{suffix}.json", json.dumps(record, indent=1) + "\n")
        return record

    def constants(self) -> dict[str, ConstantScores]:
        return {
            task_of_column(name, list(self.opened)): data.constant(data.gold()) for name, data in self.opened.items()
        }

    def write_more(self, summaries: Summaries, stop: threading.Event) -> tuple[Sequence[Path], Sequence[str]]:
        out, best = self.session.out, next(iter(summaries.values())).best  # of several columns by their average
        command = (
            f"amos tag --checkpoint {shlex.quote(str(out))} --predict FILE --out LABELS (raw text: --out SPANS.jsonl)"
        )
        several = len(self.opened) > 1
        export = export_notice(out, best, f" --head {shlex.quote(next(iter(self.opened)))}" if several else "")
        return (), (f"to label other words: {command}", export)

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterator[str]:
        if any("f1" in summary.scores for summary in summaries.values()):
            yield "a span is right if its type and both ends are (conlleval's rules)"


def task_of_column(name: str, names: Sequence[str]) -> str:
    """Return the task of a column of a run that has learned the columns ``names``."""
    return f"{TASK_PREFIX}{name}" if len(names) == 1 else f"{TASK_PREFIX}{name}{OF}{AND.join(names)}"


def results_of_columns(result: RunResult) -> list[RunResult]:
    """Return the results of the columns of a run; that of a single column as it is."""
    names = result.task.removeprefix(TASK_PREFIX).split(AND)
    if len(names) == 1:
        return [result]
    main_scores = {name: main_score(f"{name} f1" in result.scores) for name in names}
    return [dataclasses.replace(part, task=task_of_column(part.task, names)) for part in divide(result, main_scores)]


def word_trials(
    session: Session, views: Sequence[str], unlabeled: str | None, folders: Sequence[Path] = ()
) -> tuple[Hyperparameters, ...]:
    """Return the settings of a recipe for words, before raw files are converted.

    Args:
        views: those of the head.
        unlabeled: the file that --unlabeled names.
        folders: prepared data, which may have sentences without labels.
    """
    trials = []
    for settings in session.recipe.trials_of(WORDS):
        chosen = ",".join(parse_views(settings.views, views))
        if chosen and unlabeled is None and not any(map(has_unlabeled, folders)):
            raise UserError(f"--views {settings.views} needs sentences without labels: give them with --unlabeled")
        # There is one text without a pair, and the head reads each word; a recipe may have other values.
        trials.append(dataclasses.replace(settings, num_separators=1, pooling="first", views=chosen))
    if unlabeled is not None and not any(trial.views for trial in trials):
        raise UserError(f"--unlabeled {unlabeled}: only --views learn from these sentences: give --views")
    return different(trials)


def word_flags(run: TaskRun, session: Session) -> list[str]:
    """Return the flags of a run on labels of words or trees."""
    settings, flags = run.hyperparameters, ["--tokens-per-sentence", str(session.checkpoint.max_positions)]
    if settings.views:
        flags += as_flags({"views": settings.views, "unlabeled_start": settings.unlabeled_start})
    return [*flags, *run.task.selection_flags]


def predict_words(
    model: BaseFairseqModel,
    head: str,
    sentences: Sequence[Mapping[str, Tensor]],
    read_out: Callable[[Tensor], list],
    device: str,
    stop: threading.Event | None = None,
) -> list[list]:
    """Return what a head predicts for each sentence.

    Args:
        model: in eval mode.
        sentences: ``tokens`` [L], and ``positions`` [W] of the first pieces of the words that are not cut, int64.
        read_out: a prediction for each of these words, from the output of the head for them, [W, ...].
        stop: see :func:`~amos_fairseq.downstream.prediction.batches`.
    """

    def inputs(indices: list[int]) -> dict[str, Any]:
        positions = pad_words([sentences[index]["positions"] for index in indices], 0)
        return pad_tokens([sentences[index]["tokens"] for index in indices]) | {"word_positions": positions}

    def labels(output: WordOutput, indices: list[int]) -> Iterator[list]:
        for index, row in zip(indices, output.logits[head], strict=True):
            yield read_out(row[: len(sentences[index]["positions"])])

    return predict(model, [len(sentence["tokens"]) for sentence in sentences], inputs, labels, device, stop)


def most_likely(logits: Tensor) -> list[int]:
    """Return the index of the label of each word, from logits [W, labels]."""
    return logits.argmax(-1).tolist()


def with_probability(logits: Tensor) -> list[tuple[int, float]]:
    """Return the same with its probability."""
    labels = logits.argmax(-1, keepdim=True)
    return list(zip(labels[:, 0].tolist(), logits.softmax(-1).gather(-1, labels)[:, 0].tolist(), strict=True))


def encode_sentences(
    loaded: LoadedCheckpoint, file: WordFile, head: HeadOutputs
) -> tuple[list[Sentence], list[list[Window]]]:
    """Return the sentences of a file as the head reads them, and the windows of each.

    A sentence that the model can read has one window, with the bits of :class:`WordSequences`. Raw text is not used if no
    sentence that trained had one: words in columns are joined by spaces.
    """
    sentences = file.sentences
    if not head.raw_text:
        sentences = [dataclasses.replace(sentence, spaces=None) for sentence in sentences]
        join_unspaced_words(sentences)
    dictionary, room = loaded.dictionary, loaded.model.max_positions() - NUM_SPECIAL
    encoded: list[list[Window]] = []
    for sentence in sentences:
        pieces, ranges = loaded.tokenizer.encode_words(sentence.words, sentence.spaces)
        encoded.append([])
        for first, last, begin, end in windows_of(ranges, len(pieces), room):
            tokens = torch.tensor([dictionary.bos(), *pieces[begin:end], dictionary.eos()])
            positions = torch.tensor([start - begin + 1 for start, _ in ranges[first:last]], dtype=torch.long)
            encoded[-1].append((first, {"tokens": tokens, "positions": positions}))
    return sentences, encoded


def predict_file(
    loaded: LoadedCheckpoint,
    name: str,
    file: WordFile,
    read_out: Callable[[Tensor], list],
    device: str,
    in_windows: bool = True,
) -> list[list]:
    """Return what the head ``name`` predicts for the words of each sentence of a file, in the window in which a word is farther
    from the ends; or, unless ``in_windows``, for those in the first window alone."""
    _, encoded = encode_sentences(loaded, file, loaded.head(name))
    encoded = [windows[: None if in_windows else 1] for windows in encoded]
    inputs = [window for windows in encoded for _, window in windows]
    predicted = iter(predict_words(loaded.model, name, inputs, read_out, device))
    return [merge_windows((first, next(predicted)) for first, _ in windows) for windows in encoded]


def refuse_other_form(words: WordFile, head: HeadOutputs) -> None:
    """Refuse columns without labels of the head, which may be lines of text, and lines of text with them, as columns have."""
    names = {label for label in head.labels if any(map(str.isalnum, label))}  # a full stop is a label of some
    ends = [sentence.raw.split()[-1] for sentence in words.sentences if words.kind == TEXT_LINES]
    columns = [[label for sentence in words.sentences for label in sentence.columns[name]] for name in words.names]
    are_labels = [2 * sum(label in names for label in labels) >= len(labels) for labels in (ends, *columns)]
    problem = f"has lines that end in labels of {head.name}: name its columns with --columns"
    if words.kind == COLUMNS and LABEL in words.names and not any(are_labels[1:]):
        problem = f"has no column of labels of {head.name}: name its columns with --columns, or if it is text, write "
        problem += "--out SPANS.jsonl, or take its blank lines away"
    elif not ends or not are_labels[0]:
        return
    raise UserError(f"{words.path} {problem}")


def label_words(words: WordFile, results: Path, name: str | None, out: Path, device: str) -> str:
    """Write words with their labels in each column of ``results``, an output of ``amos tag``, or in the column ``name`` alone,
    by its run that is best on dev; or, if ``out`` is called .jsonl, the spans in each text. Return what was done."""
    as_spans, labels, done = kind_of(out) == JSONL, {}, []
    for task, loaded in load_best(results, Tagging.name, "amos tag"):
        learned = task.removeprefix(TASK_PREFIX).partition(OF)[0]
        if name not in (None, learned):
            continue
        head = loaded.head(word_head_name(learned))
        refuse_other_form(words, head)
        if not labels:  # the first column says how raw text is divided, for all
            words = words.divided(head.signs, head.whole)
            words.report("tag")
        column = Column(loaded.file.parent, head.name, head.labels, has_spans=head.kind == "spans")
        predictions = predict_file(loaded, column.head, words, with_probability if as_spans else most_likely, device)
        pairs = zip(words.sentences, predictions, strict=True)
        if as_spans:
            labels[learned] = [labeled_spans(sentence, column, predicted) for sentence, predicted in pairs]
        else:
            labels[learned] = [column.spell(predicted, len(sentence.words)) for sentence, predicted in pairs]
        done.append(f"{out}, {learned}: {len(words.sentences):,} sentences")
    if not labels:
        raise UserError(f"{results} has no column {name}: give another --column, or none for all")
    rows = zip(words.sentences, *labels.values(), strict=True)
    if as_spans:
        names = labels if len(labels) > 1 else ["spans"]
        objects = (
            {"line": sentence.lines[0], "text": sentence.places()[0]} | dict(zip(names, spans, strict=True))
            for sentence, *spans in rows
        )
        write_lines(out, (json.dumps(content, ensure_ascii=False) + "\n" for content in objects))
    else:
        sentences = (zip(sentence.words, *columns, strict=True) for sentence, *columns in rows)
        blocks = ("".join("\t".join(row) + "\n" for row in sentence) for sentence in sentences)
        write_lines(out, ["\n".join(blocks)])
    return "\n".join(done)


def predict_texts(
    loaded: LoadedCheckpoint, head: str, texts: Sequence[tuple[str, ...]], device: str
) -> tuple[list[list[dict[str, Any]]], int]:
    """Return the spans that a head finds in texts, or their words with labels; and how many texts are cut: none."""
    outputs = loaded.head(head)
    sentences = [words_in(text, n, outputs.signs, outputs.whole)[0] for n, (text,) in enumerate(texts, start=1)]
    file = WordFile(Path(), TEXTS, sentences)
    column = Column(loaded.file.parent, outputs.name, outputs.labels, has_spans=outputs.kind == "spans")
    pairs = zip(sentences, predict_file(loaded, head, file, with_probability, device), strict=True)
    return [labeled_spans(sentence, column, predicted) for sentence, predicted in pairs], 0


def labeled_spans(sentence: Sentence, column: Column, predicted: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Return the spans in the text of a sentence, or each word where labels mark no spans, with the mean probability of the
    labels of its words, as the pipeline of transformers has it with ``aggregation_strategy="first"``."""
    names = [column.labels[label] for label, _ in predicted]
    ranges, found = sentence.places()[1], []
    for label, first, last in items_of(names, column.has_spans):
        probability = fmean(probability for _, probability in predicted[first : last + 1])
        place = {"start": ranges[first][0], "end": ranges[last][1]}
        found.append(place | {"label": label, "probability": round(probability, 6)})
    return found
