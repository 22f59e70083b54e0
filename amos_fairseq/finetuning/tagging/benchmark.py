"""Sequence tagging for the shared runner: the task ``sequence_tagging`` trains; this file predicts and scores."""

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq.models import BaseFairseqModel

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.data.tagging import TaggedSentences, read_manifest, read_words
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text
from amos_fairseq.finetuning.benchmark import Stopped, Task
from amos_fairseq.finetuning.pretrained_checkpoint import PretrainedCheckpoint
from amos_fairseq.finetuning.runs import content_sha256
from amos_fairseq.finetuning.tagging.scores import OUTSIDE, count, scores

RECIPE_TASK = "tagging"  # recipes do not distinguish the columns
# Names of tasks begin with this, so that results of other benchmarks in OUT are not taken for these.
PREFIX = "tagging-"
TOKENS_PER_BATCH = 8192
PREDICTIONS = "predictions.txt"
SCORES = "scores.json"
CUT = "<cut>"  # in predictions: a word that the model did not read; CoNLL-U has the label "_"


class Tagging:
    """The prepared data of one column, for one checkpoint, with a single task such as ``tagging-upos``.

    Args:
        validates: score the dev set after each epoch, for recipes that keep the checkpoint with the best score.

    Raises:
        UserError: the data have not been prepared, are damaged, or belong to a tokenizer other than the checkpoint's.
    """

    name = "tagging"

    def __init__(self, data: Path, checkpoint: PretrainedCheckpoint, validates: bool) -> None:
        self.data, self.validates, self.max_positions = data.resolve(), validates, checkpoint.max_positions
        if os.pathsep in str(self.data):
            raise UserError(f"{self.data}: fairseq separates folders at {os.pathsep!r}: give a path without it")
        manifest = read_manifest(self.data)
        checkpoint.check_tokenizer(self.data / "tokenizer")
        self.labels, self.has_spans = manifest["labels"], manifest["has_spans"]
        self.dictionary = Vocabulary.of_corpus([self.data], None).load_dictionary()
        self.task = PREFIX + manifest["column"]
        train, self.dev = (self._sentences(split) for split in ("train", "valid"))
        self.words = read_words(self.data, "valid")
        if [len(words) for words in self.words] != [len(self.dev.labels(index)) for index in range(len(self.dev))]:
            raise UserError(f"{self.data}: valid.words.jsonl does not belong to the labels: prepare the data again")
        self.tasks = {
            self.task: Task(
                name=self.task, num_examples=len(train), main_score=self.main_score,
                data_sha256=content_sha256(manifest), notes=tuple(self._notes(train)),
            )
        }  # fmt: skip

    @property
    def main_score(self) -> str:
        return "f1" if self.has_spans else "accuracy"

    def _sentences(self, split: str) -> TaggedSentences:
        training = split == "train"
        return TaggedSentences(
            self.data, split, self.dictionary, len(self.labels), self.max_positions, training=training
        )

    def _notes(self, train: TaggedSentences) -> Iterator[str]:
        column = self.task.removeprefix(PREFIX)
        for name, sentences in (("training", train), ("dev", self.dev)):
            if sentences.cut_words:
                counted = ", and counted as wrong" if sentences is self.dev else ""
                yield (
                    f"{column}: {sentences.cut_words:,} of {sentences.num_words:,} {name} words are cut from "
                    f"{sentences.cut_sentences:,} sentences of more than {self.max_positions} tokens{counted}"
                )

    def train_flags(self, task: str) -> list[str]:
        """See :class:`~amos_fairseq.finetuning.benchmark.Benchmark`."""
        flags = [str(self.data), "--task", "sequence_tagging", "--criterion", "sequence_tagging"]
        flags += ["--tokens-per-sentence", str(self.max_positions)]
        if not self.validates:
            return [*flags, "--disable-validation"]
        return [*flags, "--best-checkpoint-metric", self.main_score, "--maximize-best-checkpoint-metric"]

    def copy_tokenizer_and_labels(self, task: str, directory: Path) -> None:
        """Do nothing: the task writes ``tokenizer/`` and ``labels.txt`` into its SAVE_DIR."""

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Return the scores of the dev set, and write ``predictions.txt`` and ``scores.json``.

        The prediction runs in float32 and without dropout, whatever the precision of the training. A line of predictions.txt
        is a word, its label and the prediction, separated by tabs, because words and labels may contain spaces; a word that
        is cut has the prediction O, or ``<cut>`` where labels are classes of words.
        """
        predicted = predict(load_checkpoint(checkpoint).model, self.dev, device, stop)
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


def predict(
    model: BaseFairseqModel, sentences: TaggedSentences, device: str, stop: threading.Event | None = None
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
    for batch in batches_by_length(sentences.sizes, TOKENS_PER_BATCH):
        if stop is not None and stop.is_set():
            raise Stopped
        net_input = sentences.collater([sentences[index] for index in batch])["net_input"]
        with torch.inference_mode():
            logits = model(net_input["src_tokens"].to(device), word_positions=net_input["word_positions"].to(device))
        for index, row in zip(batch, logits.argmax(-1).tolist(), strict=True):
            predicted[index] = row[: sentences.num_kept(index)]
    return predicted
