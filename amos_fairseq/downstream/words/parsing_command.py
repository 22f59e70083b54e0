"""``amos parse``: dependency trees, trained by the task ``dependency_parsing``; the best tree of the scores of edges, how much
of a tree is right, and CoNLL-U with other trees."""

import argparse
import dataclasses
import functools
import json
import re
import shlex
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.prediction import load_best
from amos_fairseq.downstream.words.command import ColumnData, predict_file, predict_words, word_flags, word_trials
from amos_fairseq.downstream.words.dataset import HEAD, Column, ParsedSentences
from amos_fairseq.downstream.words.model import TREES
from amos_fairseq.downstream.words.prepare import WordSource
from amos_fairseq.downstream.words.views import CROSS_VIEWS
from amos_fairseq.errors import UserError
from amos_fairseq.experiments import PARSING_VIEWS
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
from amos_fairseq.experiments.records import ConstantScores, RunResult, Summaries
from amos_fairseq.experiments.table import run_and_print
from amos_fairseq.files import write_lines, write_text
from amos_fairseq.inputs.files import read_lines
from amos_fairseq.inputs.word_files import WordFile, heads_of, read_conllu
from amos_fairseq.output.terminal import say
from amos_fairseq.text.encoding import BinarizedFile
from amos_fairseq.text.prepared_data import prepared_data
from amos_fairseq.text.tokenization.tokenizer import Tokenizer
from amos_fairseq.untrusted import read_text

NAME = "parsing"
PREDICTIONS, SCORES = "predictions.conllu", "scores.json"
RELATION = "deprel"  # the column of CoNLL-U
LIKELY_HEADS = 4  # of a word, in the first search for a tree
Edge = tuple[int, str]  # the number of the head, 0 for the root, and the relation


def main(args: argparse.Namespace) -> None:
    if args.predict is not None:
        file, results, out = Path(args.predict), Path(args.checkpoint), Path(args.out)
        treebank = read_conllu(file)
        treebank.report("parse")
        print(parse_words(treebank, results, out, find_devices(args.cpu)[0]))
        return
    session, source = session_from(args), TreebankSource.of(args)
    trials = word_trials(session, PARSING_VIEWS, source.unlabeled)
    with session.preparing() as tokenizer:
        folder = prepare_trees_inside(session.out, source, tokenizer)
    run_and_print(open_parsing(session, folder, trials))


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


def prepare_trees_inside(out: Path, source: TreebankSource, tokenizer: Tokenizer) -> Path:
    """Return the treebanks prepared inside of OUT of ``amos parse``."""
    description = source.describe(tokenizer)

    def write(directory: Path) -> None:
        splits = source.write(directory, tokenizer, description)
        for split in ("train", "valid"):
            with BinarizedFile(f"{directory / split}.{HEAD}", None) as file:
                for sentence in splits[split]:
                    file.add_line(list(map(int, sentence.columns[HEAD])))
        (directory / "valid.conllu").write_text(text_of(source.dev), encoding="utf-8", newline="")

    return prepared_data(out, NAME, description, write)


def text_of(path: Path) -> str:
    return "".join(line for _, line in read_lines(path))


def open_parsing(session: Session, folder: Path, trials: tuple[Hyperparameters, ...]) -> "Parsing":
    column = Column.of(usable_folder(folder))
    # As in the thesis, the labels of trees are not smoothed.
    trials = different(dataclasses.replace(trial, label_smoothing=0.0) for trial in trials)
    opened = ColumnData.open(session, column, any(trial.views for trial in trials), ParsedSentences)
    notes = tuple(
        opened.notes(session.checkpoint.max_positions, "counted with the relation dep to the dependent of the root")
    )
    task = BenchmarkTask(NAME, len(opened.train), "las", column.sha256, trials, notes)
    return Parsing(session, column.directory, {NAME: task}, opened)


@dataclass
class Parsing(Benchmark):
    opened: ColumnData

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
        model, directory, dev = load_checkpoint(checkpoint).model, checkpoint.parent, self.opened.dev
        sentences, gold = [dev[index] for index in range(len(dev))], self.gold_trees(dev)
        read_out = functools.partial(best_edges, relations=self.opened.column.labels)
        predictions = predict_words(model, TREES, sentences, read_out, device, stop)
        trees = [with_cut_words(tree, len(words)) for tree, words in zip(predictions, gold, strict=True)]
        write_text(directory / PREDICTIONS, with_trees(read_text(self.data / "valid.conllu", "prepare again"), trees))
        scores = tree_scores(gold, trees)
        write_text(directory / SCORES, json.dumps(scores, indent=1) + "\n")
        return scores

    def gold_trees(self, split: ParsedSentences) -> list[list[Edge]]:
        relations = self.opened.column.labels
        return [
            list(zip(split.heads(index), [relations[label] for label in split.labels(index)], strict=True))
            for index in range(len(split))
        ]

    def constants(self) -> dict[str, ConstantScores]:
        """Return the scores of chains of words."""
        gold = self.gold_trees(self.opened.dev)
        lengths = list(map(len, gold))
        trees_by_name = chains(self.gold_trees(self.opened.train), lengths)
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


def best_edges(scores: Tensor, relations: Sequence[str]) -> list[Edge]:
    """Return head and relation of each word, from the scores [W,1+padded W,R] of the parser: the most probable tree with one
    root, where an edge has its most probable relation."""
    if not len(scores):
        return []
    best = scores.flatten(1).log_softmax(-1).view_as(scores).max(-1)  # over relations, [W,1+padded W]
    values, choices = best.values.double().cpu().numpy(), best.indices.cpu().numpy()
    values = values[:, : len(scores) + 1]
    if np.isnan(values).any():
        raise UserError("the scores of trees are not finite: the training diverged; give a lower --lr")
    heads = best_tree(values)
    best_relations = choices[np.arange(len(heads)), heads]
    return [(int(head), relations[relation]) for head, relation in zip(heads, best_relations, strict=True)]


def parse_words(treebank: WordFile, results: Path, out: Path, device: str) -> str:
    """Write the sentences of a CoNLL-U file with the trees that the best run in an output of ``amos parse`` predicts; return
    what was done."""
    ((_, loaded),) = load_best(results, NAME, "amos parse")
    read_out = functools.partial(best_edges, relations=loaded.head(TREES).labels)
    predictions = predict_file(loaded, TREES, treebank, read_out, device, in_windows=False)
    pairs = zip(predictions, treebank.sentences, strict=True)
    trees = [with_cut_words(tree, len(sentence.words)) for tree, sentence in pairs]
    write_lines(out, [with_trees(text_of(treebank.path), trees)])
    if num_cut := sum(len(sentence.words) for sentence in treebank.sentences) - sum(map(len, predictions)):
        say(f"{out}: the last {num_cut:,} words of sentences that are too long have the relation dep", "parse")
    return f"{out}: {len(trees):,} sentences"


def is_tree(heads: Sequence[int] | np.ndarray) -> bool:
    """Return whether exactly one word has the head 0, and each word leads to it."""
    heads = [int(head) for head in heads]
    if heads.count(0) != 1 or not all(0 <= head <= len(heads) for head in heads):
        return False
    reached = {0}
    for word in range(1, len(heads) + 1):
        path = []
        while word not in reached:
            if word in path:
                return False
            path.append(word)
            word = heads[word - 1]
        reached.update(path)
    return True


def best_tree(scores: np.ndarray) -> np.ndarray:
    """Return the heads of the tree with one root whose edges have the largest sum: scores [W,1+W] -> [W], 0 for the root.

    The best heads of all words may be such a tree. Otherwise, because networkx takes half a second for all edges of 40 words,
    the first search is among the :data:`LIKELY_HEADS` best heads of each word. The loss of an edge is its distance from the
    best edge of its word, and the loss of a tree is the sum of its edges'. No loss is below 0, so an edge with more loss than
    the whole first tree is in no better tree. The search is repeated with the edges that have less, if the first one left out
    any.
    """
    heads = scores.argmax(1)
    if is_tree(heads):
        return heads
    words = np.arange(len(scores))
    losses = scores.max(1, keepdims=True) - scores
    likely = losses <= np.sort(losses, axis=1)[:, min(LIKELY_HEADS, len(scores)) - 1, None]
    likely[:, 0] = True
    heads = _spanning_tree(scores, likely)
    # A first tree with several roots is no bound for those that are allowed.
    possible = losses <= losses[words, heads].sum() + 1e-9 if is_tree(heads) else np.ones_like(likely)
    return _spanning_tree(scores, possible | likely) if (possible & ~likely).any() else heads


def _spanning_tree(scores: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the heads of the best tree with one root made of ``edges``, [W,1+W] bool, those of the root among them. From these
    a constant is taken that is larger than any difference of sums, so that the best tree has as few of them as possible: one.
    """
    import networkx  # here: it takes a quarter of a second, and most runs predict no trees

    finite = scores[np.isfinite(scores)]
    penalty = 1 + len(scores) * float(finite.max() - finite.min())
    graph = networkx.DiGraph()
    for word, head in np.argwhere(edges & np.isfinite(scores)).tolist():
        graph.add_edge(head, word + 1, weight=float(scores[word, head]) - penalty * (head == 0))
    heads = np.zeros(len(scores), dtype=np.int64)
    for head, word in networkx.maximum_spanning_arborescence(graph).edges:
        heads[word - 1] = head
    return heads


def attachment_counts(gold: Sequence[Edge], predicted: Sequence[Edge], with_punctuation: bool = True) -> dict[str, int]:
    """Count words, right heads, and right heads with the right relation of a sentence, by the rules of the official evaluation
    of the CoNLL 2018 shared task on gold words: relations are compared without their subtypes."""
    counts = {"words": 0, "heads": 0, "edges": 0}
    for (head, relation), edge in zip(gold, predicted, strict=True):
        relation = relation.partition(":")[0]
        if relation == "punct" and not with_punctuation:
            continue
        counts["words"] += 1
        if edge[0] == head:
            counts["heads"] += 1
            counts["edges"] += edge[1].partition(":")[0] == relation
    return counts


def chains(train: Iterable[Sequence[Edge]], lengths: Sequence[int]) -> dict[str, list[list[Edge]]]:
    """Return, by name, trees without a model, of sentences of these lengths: each word depends on its neighbor, with the most
    frequent relation of the words of ``train`` that do so, punctuation left out."""
    trees, relations = {}, {-1: Counter(), 1: Counter()}
    for tree in train:
        for word, (head, relation) in enumerate(tree, start=1):
            relation = relation.partition(":")[0]
            if head != 0 and abs(head - word) == 1 and relation != "punct":
                relations[head - word][relation] += 1
    for name, step in (("previous", -1), ("next", 1)):
        relation = relations[step].most_common(1)[0][0] if relations[step] else "dep"
        # The head of the first or the last word, which has no neighbor there, is the root.
        trees[f"the {name} word as head ({relation})"] = [
            [((word + step) % (length + 1), relation) for word in range(1, length + 1)] for length in lengths
        ]
    return trees


def tree_scores(gold: Sequence[Sequence[Edge]], predicted: Sequence[Sequence[Edge]]) -> dict[str, float]:
    """Return UAS and LAS in percent, with and without punctuation."""
    scores = {}
    for suffix, with_punctuation in (("", True), ("_no_punctuation", False)):
        counts: Counter[str] = Counter()
        for gold_tree, tree in zip(gold, predicted, strict=True):
            counts.update(attachment_counts(gold_tree, tree, with_punctuation))
        for name, key in (("las", "edges"), ("uas", "heads")):
            scores[name + suffix] = 100 * counts[key] / max(1, counts["words"])
    return scores


def with_cut_words(tree: Sequence[Edge], num_words: int) -> list[Edge]:
    """Give the words at the end that are cut the relation ``dep`` to the word of the root, or to the first word without one."""
    tree = tree or [(0, "root")]
    root = next(number for number, (head, _) in enumerate(tree, start=1) if head == 0)
    return [*tree, *[(root, "dep")] * (num_words - len(tree))]


def with_trees(text: str, trees: Sequence[Sequence[Edge]]) -> str:
    """Return a CoNLL-U file with other heads and relations, and without enhanced dependencies and the empty nodes (``1.1``),
    which only these have; everything else in it stays."""
    lines, sentence = [], -1
    for line in re.split(r"(?<=\n)", text):  # other characters that end a line may be part of a word
        cells = line.rstrip("\r\n").split("\t")
        if re.fullmatch(r"[0-9]+\.[0-9]+", cells[0].strip(" ")):
            continue
        if not line.startswith("#") and cells[0].strip(" ").isdecimal():
            word = int(cells[0])
            sentence += word == 1
            cells[6:9] = [*map(str, trees[sentence][word - 1]), "_"]
            line = "\t".join(cells) + line[len(line.rstrip("\r\n")) :]
        lines.append(line)
    return "".join(lines)
