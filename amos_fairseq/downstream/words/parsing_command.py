"""``amos parse``: dependency trees, trained by the task ``dependency_parsing``."""

import argparse
import dataclasses
import json
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fairseq.models import BaseFairseqModel
from torch import Tensor

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.prediction import load_best
from amos_fairseq.downstream.words.command import (
    ColumnData,
    check_unlabeled,
    counted_words,
    encode_sentences,
    predict_words,
    word_flags,
    word_trials,
)
from amos_fairseq.downstream.words.dataset import Column
from amos_fairseq.downstream.words.model import TREES
from amos_fairseq.downstream.words.parsing_task import ParsedSentences
from amos_fairseq.downstream.words.prepare import WordSource
from amos_fairseq.downstream.words.trees import (
    HEAD,
    RELATION,
    Edge,
    best_tree,
    chains,
    is_tree,
    tree_scores,
    with_cut_words,
    with_trees,
)
from amos_fairseq.downstream.words.views import CROSS_VIEWS
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import PARSING_VIEWS
from amos_fairseq.experiments.benchmark import Benchmark, BenchmarkTask, TaskRun, usable_folder
from amos_fairseq.experiments.recipes import different
from amos_fairseq.experiments.records import ConstantScores, RunResult, Summaries
from amos_fairseq.experiments.session import Session, find_devices, session_from
from amos_fairseq.experiments.table import run_and_print
from amos_fairseq.files import explain_write_errors, write_text
from amos_fairseq.inputs.files import read_lines
from amos_fairseq.inputs.word_files import WordFile, heads_of, read_conllu
from amos_fairseq.text.encoding import BinarizedFile
from amos_fairseq.text.prepared_data import prepared_data
from amos_fairseq.text.tokenization.tokenizer import Tokenizer
from amos_fairseq.untrusted import read_text

NAME = "parsing"
PREDICTIONS, SCORES = "predictions.conllu", "scores.json"


def main(args: argparse.Namespace) -> None:
    if args.predict is not None:
        print(parse_file(Path(args.checkpoint), args.predict, Path(args.out), find_devices(args.cpu)[0]))
        return
    session = session_from(args)
    check_unlabeled(session, PARSING_VIEWS, args.unlabeled)
    with session.preparing() as tokenizer:
        data = prepare_parsing_inside(session.out, TreebankSource.of(args), tokenizer)
    run_and_print(open_parsing(session, data))


@dataclass(frozen=True)
class TreebankSource(WordSource):
    """Treebanks in CoNLL-U. The labels of words are the relations to their heads."""

    column: str | None = RELATION

    scored_by = "LAS"
    other_labels = "give a treebank with relations"

    def read_labeled(self, path: Path) -> WordFile:
        """Raise :class:`UserError` unless the heads of each sentence are a tree with one root."""
        file = read_conllu(path)
        for sentence in file.sentences:
            if not is_tree(heads_of(path, sentence)):
                where = f"{path}, sentence in line {sentence.lines[0]}"
                raise UserError(f"{where}: the heads are no tree with one root: correct them")
        return file


def prepare_parsing_inside(out: Path, source: TreebankSource, tokenizer: Tokenizer) -> Path:
    """Return the treebanks prepared inside of OUT of ``amos parse``."""
    description = source.describe(tokenizer)

    def write(directory: Path) -> None:
        splits = source.write(directory, tokenizer, description)
        for split in ("train", "valid"):
            with BinarizedFile(f"{directory / split}.{HEAD}", None) as file:
                for sentence in splits[split]:
                    file.add_line(list(map(int, sentence.columns[HEAD])))
        (directory / "valid.conllu").write_text(_text_of(source.dev), encoding="utf-8", newline="")

    return prepared_data(out, NAME, description, write)


def _text_of(path: Path) -> str:
    return "".join(line for _, line in read_lines(path))


def open_parsing(session: Session, data: Path) -> "Parsing":
    column = Column.of(usable_folder(data))
    trials = word_trials(session, PARSING_VIEWS, column.has_unlabeled)
    # As in the thesis, the labels of trees are not smoothed.
    trials = different(dataclasses.replace(trial, label_smoothing=0.0) for trial in trials)
    opened = ColumnData.open(session, column, any(trial.views for trial in trials), ParsedSentences)
    notes = tuple(
        opened.notes(session.checkpoint.max_positions, "counted with the relation dep to the dependent of the root")
    )
    task = BenchmarkTask(NAME, len(opened.train), "las", column.sha256, trials, notes)
    return Parsing(session, column.directory, {NAME: task}, column.labels, opened.train, opened.dev)


@dataclass
class Parsing(Benchmark):
    session: Session
    data: Path
    tasks: dict[str, BenchmarkTask]
    relations: list[str]
    train: ParsedSentences
    dev: ParsedSentences

    name = NAME
    title = "Dependency parsing, dev"
    trained_as = "dependency_parsing"
    only_trains = (CROSS_VIEWS,)
    unit = "words"
    columns = {
        "las": "LAS",
        "uas": "UAS",
        "las_no_punctuation": "LAS without punctuation",
        "uas_no_punctuation": "UAS without punctuation",
    }

    def train_flags(self, run: TaskRun) -> list[str]:
        return [str(self.data), *word_flags(run, self.session)]

    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Return the scores of the dev trees, and write ``predictions.conllu``, the dev file with the predicted trees, and
        ``scores.json``, which are those of this file."""
        model, directory, dev = load_checkpoint(checkpoint).model, checkpoint.parent, self.dev
        sentences, gold = [dev[index] for index in range(len(dev))], self.gold_trees(dev)
        predicted = predict_trees(model, sentences, self.relations, device, stop)
        trees = [with_cut_words(tree, len(words)) for tree, words in zip(predicted, gold, strict=True)]
        write_text(directory / PREDICTIONS, with_trees(read_text(self.data / "valid.conllu", "prepare again"), trees))
        scores = tree_scores(gold, trees)
        write_text(directory / SCORES, json.dumps(scores, indent=1) + "\n")
        return scores

    def gold_trees(self, split: ParsedSentences) -> list[list[Edge]]:
        return [
            list(zip(split.heads(index), [self.relations[label] for label in split.labels(index)], strict=True))
            for index in range(len(split))
        ]

    def constants(self) -> dict[str, ConstantScores]:
        """Return the scores of chains of words."""
        gold = self.gold_trees(self.dev)
        lengths = list(map(len, gold))
        trees_by_name = chains(self.gold_trees(self.train), lengths)
        scores = {name: tree_scores(gold, trees) for name, trees in trees_by_name.items()}
        return {NAME: ConstantScores(sum(lengths), scores)}

    def label(self, task: str) -> str:
        return "trees"

    def write_more(self, summaries: Summaries, stop: threading.Event) -> tuple[Sequence[Path], Sequence[str]]:
        command = f"amos parse --checkpoint {shlex.quote(str(self.session.out))} --predict FILE --out TREES"
        return (), (f"to parse other sentences: {command}",)

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterator[str]:
        yield (
            "UAS: words with the right head; LAS: and the right relation, without subtypes, as in the CoNLL 2018 shared "
            "task"
        )


def predict_trees(
    model: BaseFairseqModel,
    sentences: Sequence[Mapping[str, Tensor]],
    relations: Sequence[str],
    device: str,
    stop: threading.Event | None = None,
) -> list[list[Edge]]:
    """Predict head and relation of each word that is not cut, by sentence: the most probable tree with one root, where an edge
    has its most probable relation. The arguments are those of ``predict_words``."""
    predicted: list[list[Edge]] = [[] for _ in sentences]
    for place, scores in predict_words(model, TREES, sentences, device, stop):  # [W,1+padded W,R]
        if not len(scores):
            continue
        best = scores.flatten(1).log_softmax(-1).view_as(scores).max(-1)  # over relations, [W,1+padded W]
        values, choices = best.values.double().cpu().numpy(), best.indices.cpu().numpy()
        values = values[:, : len(scores) + 1]
        if np.isnan(values).any():
            raise UserError("the scores of trees are not finite: the training diverged; give a lower --lr")
        heads = best_tree(values)
        best_relations = choices[np.arange(len(heads)), heads]
        predicted[place] = [
            (int(head), relations[relation]) for head, relation in zip(heads, best_relations, strict=True)
        ]
    return predicted


def parse_file(results: Path, file: Path, out: Path, device: str) -> str:
    """Write the sentences of a CoNLL-U file with the trees that the best run in an output of ``amos parse`` predicts; return
    what was done."""
    treebank = read_conllu(file)
    treebank.report("parse")
    ((_, loaded),) = load_best(results, NAME, "amos parse")
    head = loaded.head(TREES)
    sentences, encoded = encode_sentences(loaded, treebank, head)
    predicted = predict_trees(loaded.model, encoded, head.labels, device)
    trees = [with_cut_words(tree, len(one.words)) for tree, one in zip(predicted, sentences, strict=True)]
    with explain_write_errors(out, "permit writing, or give another --out"):
        write_text(out, with_trees(_text_of(file), trees))
    return f"{out}: {counted_words(loaded, sentences, encoded, 'have the relation dep to the root')}"
