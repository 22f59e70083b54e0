"""Sequence tagging: the task ``sequence_tagging`` trains; this file predicts and scores."""

import dataclasses
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq.models import BaseFairseqModel

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.tag_scores import OUTSIDE, count, scores
from amos_fairseq.data.tagging import TASK_PREFIX, TaggedSentences, read_tagging_manifest, read_words
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text
from amos_fairseq.finetuning.benchmark import Benchmark, batches
from amos_fairseq.finetuning.runs import BenchmarkTask, RunResult, TaskRun, content_sha256
from amos_fairseq.finetuning.session import Session
from amos_fairseq.finetuning.summary import TaskSummary

RECIPE_TASK = "tagging"  # recipes do not distinguish the columns
PREDICTIONS = "predictions.txt"
SCORES = "scores.json"
CUT = "<cut>"  # in predictions: a word that the model did not read; CoNLL-U has the label "_"
# In the order of the table; labels that do not mark spans have only accuracy.
SCORE_NAMES = {"f1": "span F1", "precision": "precision", "recall": "recall", "accuracy": "accuracy"}


class Tagging(Benchmark):
    """The prepared data of one column of labels, with a single task such as ``tagging-upos``. The table has a row for each
    column that has results in OUT.

    Raises:
        UserError: the data have not been prepared, are damaged, or belong to a tokenizer other than the checkpoint's; or
            the recipe has no settings for tagging.
    """

    name = "tagging"
    title = "Sequence tagging, dev"
    columns = SCORE_NAMES

    def __init__(self, session: Session, data: Path) -> None:
        self.session, self.data, self.max_positions = session, data.resolve(), session.checkpoint.max_positions
        if session.out == self.data:
            raise UserError(
                f"--out {data} is the directory of the data, which has a tagging.json too: give another --out"
            )
        # There is no pair of texts to separate.
        # There is one text, and the head reads each word.
        recipe = session.recipe.trials_of(RECIPE_TASK)
        trials = [dataclasses.replace(trial, num_separators=1, pooling="first") for trial in recipe]
        if os.pathsep in str(self.data):
            raise UserError(f"{self.data}: fairseq separates folders at {os.pathsep!r}: give a path without it")
        manifest = read_tagging_manifest(self.data)
        session.checkpoint.check_tokenizer(self.data / "tokenizer")
        self.labels, self.has_spans = manifest["labels"], manifest["has_spans"]
        self.dictionary = Vocabulary.of_corpus([self.data], None).load_dictionary()
        train, self.dev = (self._sentences(split) for split in ("train", "valid"))
        self.words = read_words(self.data, "valid")
        if [len(words) for words in self.words] != [len(self.dev.labels(index)) for index in range(len(self.dev))]:
            raise UserError(f"{self.data}: valid.words.jsonl does not belong to the labels: prepare the data again")
        name, main_score = TASK_PREFIX + manifest["column"], "f1" if self.has_spans else "accuracy"
        notes = tuple(self._data_notes(manifest["column"], train))
        unique = tuple(dict.fromkeys(trials))
        self.tasks = {name: BenchmarkTask(name, len(train), main_score, content_sha256(manifest), unique, notes)}

    def _sentences(self, split: str) -> TaggedSentences:
        training = split == "train"
        return TaggedSentences(
            self.data, split, self.dictionary, len(self.labels), self.max_positions, training=training
        )

    def _data_notes(self, column: str, train: TaggedSentences) -> Iterator[str]:
        for name, sentences in (("training", train), ("dev", self.dev)):
            if sentences.cut_words:
                counted = ", and counted as wrong" if sentences is self.dev else ""
                yield (
                    f"{column}: {sentences.cut_words:,} of {sentences.num_words:,} {name} words are cut from "
                    f"{sentences.cut_sentences:,} sentences of more than {self.max_positions} tokens{counted}"
                )

    def train_flags(self, run: TaskRun) -> list[str]:
        flags = [str(self.data), "--task", "sequence_tagging", "--criterion", "sequence_tagging"]
        return [*flags, "--tokens-per-sentence", str(self.max_positions), *self.selection_flags(run)]

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Return the scores of the dev set, and write ``predictions.txt`` and ``scores.json``.

        A line of predictions.txt is a word, its label and the prediction, separated by tabs, because words and labels may
        contain spaces; a word that is cut has the prediction O, or ``<cut>`` where labels are classes of words.
        """
        predicted = predict_tags(load_checkpoint(checkpoint).model, self.dev, device, stop)
        counts: Counter[str] = Counter()
        lines = []
        for index, row in enumerate(predicted):
            gold, found = ([self.labels[i] for i in ids] for ids in (self.dev.labels(index), row))
            counts.update(count(gold, found, self.has_spans))
            found += [OUTSIDE if self.has_spans else CUT] * (len(gold) - len(found))
            lines += ["\t".join(cells) for cells in zip(self.words[index], gold, found, strict=True)]
            lines.append("")
        write_text(directory / PREDICTIONS, "\n".join(lines) + "\n")
        found_scores = scores(counts)
        write_text(directory / SCORES, json.dumps(found_scores | counts, indent=1) + "\n")
        return found_scores

    def setup(self) -> dict[str, Any]:
        """OUT may hold the results of several columns, so the recipe's section has one name for all."""
        (task,) = self.tasks.values()
        return self.session.setup({RECIPE_TASK: task.trials})

    def owns(self, task: str) -> bool:
        return task.startswith(TASK_PREFIX)

    def label(self, task: str) -> str:
        return task.removeprefix(TASK_PREFIX)

    def notes(self, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]) -> Iterator[str]:
        if any("f1" in summary.scores for summary in summaries.values()):
            yield "a span is right if its type and both ends are (conlleval's rules, computed by seqeval)"


def predict_tags(
    model: BaseFairseqModel, sentences: TaggedSentences, device: str, stop: threading.Event
) -> list[list[int]]:
    """Predict a label for each word that is not cut, by sentence.

    Args:
        model: in eval mode, with a head for labels.

    Raises:
        UserError: the model has no head for labels.
        Stopped: ``stop`` is set.
    """
    if getattr(model, "tagging_head", None) is None:
        raise UserError("the checkpoint has no head for labels: fine-tune it with --task sequence_tagging first")
    model = model.to(device)
    predicted: list[Any] = [None] * len(sentences)
    for batch in batches(sentences.sizes, stop):
        net_input = sentences.collater([sentences[index] for index in batch])["net_input"]
        with torch.inference_mode():
            positions = net_input["word_positions"].to(device)
            logits = model(net_input["src_tokens"].to(device), word_positions=positions, lengths=net_input["lengths"])
        for index, row in zip(batch, logits.argmax(-1).tolist(), strict=True):
            predicted[index] = row[: sentences.num_kept(index)]
    return predicted
