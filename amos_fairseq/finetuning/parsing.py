"""Dependency parsing: the task ``dependency_parsing`` trains; this file predicts trees and scores them."""

import dataclasses
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.models import BaseFairseqModel

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.parsing import ParsedSentences, attachment_counts, best_tree
from amos_fairseq.data.tagging import read_tagging_manifest
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.data.word_files import read_conllu
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text
from amos_fairseq.finetuning.benchmark import Benchmark, batches
from amos_fairseq.finetuning.runs import BenchmarkTask, RunResult, TaskRun, content_sha256
from amos_fairseq.finetuning.session import Session
from amos_fairseq.finetuning.summary import TaskSummary
from amos_fairseq.strangers import read_text

NAME = "parsing"
RECIPE_TASK = "tagging"  # the settings of words with labels
PREDICTIONS, SCORES = "predictions.conllu", "scores.json"
Edge = tuple[int, str]


class Parsing(Benchmark):
    """Two treebanks that ``amos parse`` has prepared in OUT.

    Raises:
        UserError: the data are damaged, or belong to a tokenizer other than the checkpoint's; or the recipe has no settings for
            words with labels.
    """

    name = NAME
    title = "Dependency parsing, dev"
    columns = {
        "las": "LAS",
        "uas": "UAS",
        "las_no_punctuation": "LAS without punctuation",
        "uas_no_punctuation": "UAS without punctuation",
    }

    def __init__(self, session: Session, data: Path) -> None:
        self.session, self.data, self.max_positions = session, data.resolve(), session.checkpoint.max_positions
        recipe = session.recipe.trials_of(RECIPE_TASK)
        trials = tuple(dict.fromkeys(dataclasses.replace(trial, num_separators=1, pooling="first") for trial in recipe))
        if os.pathsep in str(self.data):
            raise UserError(f"{self.data}: fairseq separates folders at {os.pathsep!r}: give a path without it")
        manifest = read_tagging_manifest(self.data)
        session.checkpoint.check_tokenizer(self.data / "tokenizer")
        self.relations = manifest["labels"]
        self.dictionary = Vocabulary.of_corpus([self.data], None).load_dictionary()
        train, self.dev = (self._sentences(split) for split in ("train", "valid"))
        self.gold = [
            [(int(head), relation) for head, relation in zip(one.columns["head"], one.columns["deprel"], strict=True)]
            for one in read_conllu(self.data / "valid.conllu")
        ]
        if list(map(len, self.gold)) != [len(self.dev.heads(index)) for index in range(len(self.dev))]:
            raise UserError(f"{self.data}: valid.conllu does not belong to the other files: delete {self.data}")
        notes = tuple(
            f"{sentences.cut_words:,} of {sentences.num_words:,} {name} words are cut from sentences of more than "
            f"{self.max_positions} tokens"
            for name, sentences in (("training", train), ("dev", self.dev))
            if sentences.cut_words
        )
        self.tasks = {NAME: BenchmarkTask(NAME, len(train), "las", content_sha256(manifest), trials, notes)}

    def _sentences(self, split: str) -> ParsedSentences:
        training = split == "train"
        return ParsedSentences(
            self.data, split, self.dictionary, len(self.relations), self.max_positions, training=training
        )

    def train_flags(self, run: TaskRun) -> list[str]:
        flags = [str(self.data), "--task", "dependency_parsing", "--criterion", "dependency_parsing"]
        return [*flags, "--tokens-per-sentence", str(self.max_positions), *self.selection_flags(run)]

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Return the scores of the dev trees, and write ``predictions.conllu``, the dev file with the predicted trees, and
        ``scores.json``. Words that are cut are wrong."""
        trees = predict_trees(load_checkpoint(checkpoint).model, self.dev, self.relations, device, stop)
        write_text(directory / PREDICTIONS, with_trees(read_text(self.data / "valid.conllu", "prepare again"), trees))
        found = tree_scores(self.gold, trees)
        write_text(directory / SCORES, json.dumps(found, indent=1) + "\n")
        return found

    def setup(self) -> dict[str, Any]:
        (task,) = self.tasks.values()
        return self.session.setup({RECIPE_TASK: task.trials})

    def label(self, task: str) -> str:
        return "trees"

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


def predict_trees(
    model: BaseFairseqModel, sentences: ParsedSentences, relations: Sequence[str], device: str, stop: threading.Event
) -> list[list[Edge]]:
    """Predict head and relation of each word that is not cut, by sentence: the most probable tree with one root, where an edge
    has its most probable relation.

    Raises:
        UserError: the model has no head for trees.
        Stopped: ``stop`` is set.
    """
    if getattr(model, "parsing_head", None) is None:
        raise UserError("the checkpoint has no head for dependency trees: give the --out of amos parse")
    model = model.to(device)
    predicted: list[list[Edge]] = [[] for _ in range(len(sentences))]
    for batch in batches(sentences.sizes, stop):
        net_input = sentences.collater([sentences[index] for index in batch])["net_input"]
        with torch.inference_mode():
            positions = net_input["word_positions"].to(device)
            scores = model(net_input["src_tokens"].to(device), word_positions=positions, lengths=net_input["lengths"])
            scores = scores.flatten(2).log_softmax(-1).view_as(scores)
        best = scores.max(-1)  # over relations, [B,W,1+W]
        values, choices = best.values.double().cpu().numpy(), best.indices.cpu().numpy()
        for row, index in enumerate(batch):
            size = sentences.num_kept(index)
            if not size:
                continue
            heads = best_tree(values[row, :size, : size + 1])
            kinds = choices[row, np.arange(size), heads]
            predicted[index] = [(int(head), relations[kind]) for head, kind in zip(heads, kinds, strict=True)]
    return predicted


def with_trees(text: str, trees: Sequence[Sequence[Edge]]) -> str:
    """Return a CoNLL-U file with other heads and relations; everything else in it stays. Words without an edge, which are cut,
    get the relation ``dep`` to the word that depends on the root."""
    lines, sentence, has_words = [], 0, False
    for line in text.splitlines(keepends=True):
        cells = line.rstrip("\r\n").split("\t")
        if not line.strip():
            sentence, has_words = sentence + has_words, False
        elif cells[0].strip().isdecimal():
            has_words, word = True, int(cells[0])
            edges = trees[sentence]
            rest = [(number, "dep") for number, (head, _) in enumerate(edges, start=1) if head == 0] or [(0, "root")]
            cells[6:8] = map(str, edges[word - 1] if word <= len(edges) else rest[0])
            line = "\t".join(cells) + line[len(line.rstrip("\r\n")) :]
        lines.append(line)
    return "".join(lines)
