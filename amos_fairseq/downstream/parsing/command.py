"""``amos parse``: dependency trees, trained by the task ``dependency_parsing``."""

import argparse
import dataclasses
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.downstream.benchmark import Benchmark, BenchmarkTask, TaskRun, batches, selection_flags, usable_folder
from amos_fairseq.downstream.parsing.model import TREES
from amos_fairseq.downstream.parsing.prepare import prepare_parsing_inside
from amos_fairseq.downstream.parsing.task import ParsedSentences
from amos_fairseq.downstream.parsing.trees import attachment_counts, best_tree
from amos_fairseq.downstream.recipes import WORDS
from amos_fairseq.downstream.results import (
    RunResult,
    TaskSummary,
    best_checkpoint,
    best_run_of,
    content_sha256,
)
from amos_fairseq.downstream.runner import run_and_print, stoppable
from amos_fairseq.downstream.session import Session, find_devices, preparing, session_from
from amos_fairseq.downstream.tagging.command import check_unlabeled, notes_of_cuts, word_flags, word_trials
from amos_fairseq.downstream.tagging.dataset import (
    NUM_SPECIAL,
    WordSequences,
    has_unlabeled,
    read_labels,
    read_tagging_manifest,
)
from amos_fairseq.downstream.tagging.prepare import Choices
from amos_fairseq.downstream.tagging.word_files import UNLABELED, read_conllu
from amos_fairseq.downstream.views import PARSING_VIEWS
from amos_fairseq.errors import UserError
from amos_fairseq.files import explain_write_errors, write_text
from amos_fairseq.strangers import read_text
from amos_fairseq.text.text_files import InputFile
from amos_fairseq.text.tokenization.words import encode_words

NAME = "parsing"
PREDICTIONS, SCORES = "predictions.conllu", "scores.json"
Edge = tuple[int, str]


def main(arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        files = (Path(arguments.checkpoint), arguments.predict, Path(arguments.out))
        number = stoppable(parse_file, *files, find_devices(arguments.cpu)[0])
        print(f"{arguments.out}: {number:,} sentences")
        return
    session = session_from(arguments, NAME)
    check_unlabeled(session, PARSING_VIEWS, arguments.unlabeled)
    with preparing(session, NAME) as tokenizer:
        files = (arguments.train, arguments.dev)
        data = prepare_parsing_inside(session.out, *files, tokenizer, Choices.of(arguments))
    run_and_print(arguments.out, open_parsing(session, data))


def open_parsing(session: Session, data: Path) -> "Parsing":
    data, max_positions = usable_folder(data), session.checkpoint.max_positions
    trials = word_trials(session, PARSING_VIEWS, has_unlabeled(data))
    # As in the thesis, the labels of trees are not smoothed.
    trials = tuple(dict.fromkeys(dataclasses.replace(trial, label_smoothing=0.0) for trial in trials))
    manifest = read_tagging_manifest(data)
    session.checkpoint.check_tokenizer(data / "tokenizer")
    relations, dictionary = manifest["labels"], Vocabulary.of_corpus([data], None).load_dictionary()
    train, dev = (
        ParsedSentences(data, split, dictionary, len(relations), max_positions, training=split == "train")
        for split in ("train", "valid")
    )
    gold = [
        [(int(head), relation) for head, relation in zip(one.columns["head"], one.columns["deprel"], strict=True)]
        for one in read_conllu(data / "valid.conllu")
    ]
    if list(map(len, gold)) != [len(dev.heads(index)) for index in range(len(dev))]:
        raise UserError(f"{data}: valid.conllu does not belong to the other files: delete {data}")
    unlabeled = None
    if any(trial.views for trial in trials):
        unlabeled = WordSequences(data, UNLABELED, dictionary, max_positions, training=True)
    notes = tuple(notes_of_cuts(train, dev, unlabeled, max_positions))
    task = BenchmarkTask(NAME, len(train), "las", content_sha256(manifest), trials, notes)
    return Parsing(session, data, {NAME: task}, relations, dictionary, dev, gold)


@dataclass
class Parsing(Benchmark):
    """The trees of a treebank. ``gold``: those of ``dev``."""

    session: Session
    data: Path
    tasks: dict[str, BenchmarkTask]
    relations: list[str]
    dictionary: Dictionary
    dev: ParsedSentences
    gold: list[list[Edge]]

    name = NAME
    title = "Dependency parsing, dev"
    columns = {
        "las": "LAS",
        "uas": "UAS",
        "las_no_punctuation": "LAS without punctuation",
        "uas_no_punctuation": "UAS without punctuation",
    }

    def train_flags(self, run: TaskRun) -> list[str]:
        flags = [str(self.data), "--task", "dependency_parsing", "--criterion", "dependency_parsing"]
        return [*flags, *word_flags(run, self.session.checkpoint.max_positions), *selection_flags(run.task)]

    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        """Return the scores of the dev trees, and write ``predictions.conllu``, the dev file with the predicted trees, and
        ``scores.json``. Words that are cut are wrong."""
        items = [Words(item["tokens"], item["positions"]) for item in map(self.dev.__getitem__, range(len(self.dev)))]
        model, pad, directory = load_checkpoint(checkpoint).model, self.dictionary.pad(), checkpoint.parent
        trees = predict_trees(model, items, pad, self.relations, device, stop)
        write_text(directory / PREDICTIONS, with_trees(read_text(self.data / "valid.conllu", "prepare again"), trees))
        found = tree_scores(self.gold, trees)
        write_text(directory / SCORES, json.dumps(found, indent=1) + "\n")
        return found

    def setup(self) -> dict[str, Any]:
        (task,) = self.tasks.values()
        return self.session.setup({WORDS: task.trials})

    def label(self, task: str) -> str:
        return "trees"

    def write_more(
        self, summaries: Mapping[str, TaskSummary], stop: threading.Event
    ) -> tuple[Sequence[Path], Sequence[str]]:
        return (), (f"to parse other sentences: amos parse --checkpoint {self.session.out} --predict FILE --out TREES",)

    def notes(self, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]) -> Iterator[str]:
        yield (
            "UAS: words with the right head; LAS: and the right relation, without subtypes, as in the CoNLL 2018 shared task"
        )


def tree_scores(gold: Sequence[Sequence[Edge]], found: Sequence[Sequence[Edge]]) -> dict[str, float]:
    """Return UAS and LAS in percent, with and without punctuation."""
    scores = {}
    for suffix, with_punctuation in (("", True), ("_no_punctuation", False)):
        counts: Counter[str] = Counter()
        for own, tree in zip(gold, found, strict=True):
            counts.update(attachment_counts(own, tree, with_punctuation))
        for name, key in (("las", "edges"), ("uas", "heads")):
            scores[name + suffix] = 100 * counts[key] / max(1, counts["words"])
    return scores


class Words(NamedTuple):
    """A sentence as a model reads it: its tokens [L], and the first pieces of the words that are not cut."""

    tokens: Tensor
    positions: Tensor


def predict_trees(
    model: BaseFairseqModel,
    sentences: Sequence[Words],
    pad: int,
    relations: Sequence[str],
    device: str,
    stop: threading.Event,
) -> list[list[Edge]]:
    """Predict head and relation of each word that is not cut, by sentence: the most probable tree with one root, where an edge
    has its most probable relation."""
    if TREES not in getattr(model, "word_heads", {}):
        raise UserError("the checkpoint has no head for dependency trees: give the --out of amos parse")
    model = model.to(device)
    predicted: list[list[Edge]] = [[] for _ in sentences]
    for batch in batches([len(sentence.tokens) for sentence in sentences], stop):
        rows = [sentences[index] for index in batch]
        tokens = pad_sequence([row.tokens for row in rows], True, pad).to(device)
        positions = pad_sequence([row.positions for row in rows], True).to(device)
        if not positions.size(1):
            continue
        with torch.inference_mode():
            output = model(tokens, word_positions=positions, lengths=[len(row.tokens) for row in rows])
            scores = output.logits[TREES]
            scores = scores.flatten(2).log_softmax(-1).view_as(scores)
        best = scores.max(-1)  # over relations, [B,W,1+W]
        values, choices = best.values.double().cpu().numpy(), best.indices.cpu().numpy()
        for row, index in enumerate(batch):
            size = len(rows[row].positions)
            if not size:
                continue
            own = values[row, :size, : size + 1]
            if np.isnan(own).any():
                raise UserError("the scores of trees are not finite: the training diverged; give a lower --lr")
            heads = best_tree(own)
            kinds = choices[row, np.arange(size), heads]
            predicted[index] = [(int(head), relations[kind]) for head, kind in zip(heads, kinds, strict=True)]
    return predicted


def with_trees(text: str, trees: Sequence[Sequence[Edge]]) -> str:
    """Return a CoNLL-U file with other heads and relations, and without enhanced dependencies; everything else in it stays.

    Words without an edge, which are cut, get the relation ``dep`` to the word that depends on the root; if all words of a
    sentence are cut, the first one is that word.
    """
    lines, sentence, has_words = [], 0, False
    for line in re.split(r"(?<=\n)", text):  # other characters that end a line may be part of a word
        cells = line.rstrip("\r\n").split("\t")
        if not line.strip(" \t\r\n"):
            sentence, has_words = sentence + has_words, False
        elif not line.startswith("#") and cells[0].strip(" ").isdecimal():
            has_words, word, edges = True, int(cells[0]), trees[sentence]
            root = next((number for number, (head, _) in enumerate(edges, start=1) if head == 0), 1)
            edge = edges[word - 1] if word <= len(edges) else (0, "root") if not edges and word == 1 else (root, "dep")
            cells[6:9] = [*map(str, edge), "_"]
            line = "\t".join(cells) + line[len(line.rstrip("\r\n")) :]
        lines.append(line)
    return "".join(lines)


def parse_file(results: Path, file: Path, out: Path, device: str, stop: threading.Event) -> int:
    """Write the sentences of a CoNLL-U file with the trees that the best run in an output of ``amos parse`` predicts; return
    their number."""
    if out.is_dir() or (out.exists() and file.exists() and out.samefile(file)):
        raise UserError(f"--out {out}: with --predict it is a file, and not the one to parse: give another name")
    if (best := best_run_of(results, NAME)) is None:
        raise UserError(f"{results} has no finished run of amos parse: give the --out of that command as --checkpoint")
    checkpoint = best_checkpoint(results, best)
    loaded, relations, sentences = load_checkpoint(checkpoint), read_labels(checkpoint.parent), read_conllu(file)
    dictionary, room = loaded.dictionary, loaded.model.max_positions() - NUM_SPECIAL
    items = []
    for sentence in sentences:
        pieces, ranges = encode_words(loaded.tokenizer, sentence.words)
        kept = [start + 1 for start, end in ranges if end <= room]
        tokens = torch.tensor([dictionary.bos(), *pieces[:room], dictionary.eos()])
        items.append(Words(tokens, torch.tensor(kept, dtype=torch.long)))
    trees = predict_trees(loaded.model, items, dictionary.pad(), relations, device, stop)
    text = "".join(line.decode("utf-8") for _, line in InputFile(file).lines())
    with explain_write_errors(out, "permit writing, or give another name"):
        write_text(out, with_trees(text, trees))
    return len(sentences)
