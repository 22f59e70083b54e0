"""SQuAD for the shared runner: the task ``squad`` trains; this file predicts, scores and writes the prediction files."""

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.data.squad import SquadSplit, SquadWindowDataset, WindowLimits, read_manifest
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.files import write_text
from amos_fairseq.finetuning.benchmark import Stopped, Task
from amos_fairseq.finetuning.pretrained_checkpoint import PretrainedCheckpoint
from amos_fairseq.finetuning.runs import content_sha256
from amos_fairseq.finetuning.squad.decoding import Decoded, DecodingLimits, predict
from amos_fairseq.finetuning.squad.official import Answer, Question, evaluate

RECIPE_TASK = "SQuAD"  # recipes do not distinguish the versions
# Number of questions of the official files, training and dev.
OFFICIAL_QUESTIONS = {"SQuAD1.1": (87_599, 10_570), "SQuAD2.0": (130_319, 11_873)}
PREDICTIONS = "predictions.json"
N_BEST = "nbest_predictions.json"
NULL_ODDS = "null_odds.json"
SCORES = "scores.json"


@dataclass(frozen=True)
class SquadSettings:
    """The settings that determine the result besides recipe, checkpoint and data. ``span_head``: one of ``SPAN_HEADS``."""

    span_head: str
    windows: WindowLimits
    decoding: DecodingLimits

    def as_dict(self) -> dict[str, Any]:
        return {"span_head": self.span_head, **self.windows._asdict(), **self.decoding._asdict()}


class Squad:
    """Prepared data of one version, for one checkpoint, with a single task, ``SQuAD1.1`` or ``SQuAD2.0``.

    The dev set determines the version: 2.0 if it has questions without an answer.

    Args:
        validates: compute the dev loss after each epoch, for recipes that score the checkpoint with the best one.

    Raises:
        UserError: the data have not been prepared, or with a tokenizer other than the checkpoint's; or the lengths leave
            no room for a context.
    """

    name = "squad"

    def __init__(self, data: Path, checkpoint: PretrainedCheckpoint, settings: SquadSettings, validates: bool) -> None:
        self.data, self.settings, self.validates = data.resolve(), settings, validates
        manifest = read_manifest(self.data)
        checkpoint.check_tokenizer(self.data / "tokenizer")
        settings.windows.check()
        self.dictionary = Vocabulary.of_corpus([self.data], None).load_dictionary()
        self.task = "SQuAD2.0" if manifest["splits"]["valid"]["impossible"] else "SQuAD1.1"
        windows = SquadWindowDataset(
            SquadSplit(self.data, "train"), self.dictionary, limits=settings.windows, training=True
        )
        self.tasks = {
            self.task: Task(
                name=self.task, num_examples=len(windows), main_score="f1",
                data_sha256=content_sha256([manifest, settings.as_dict()]), notes=tuple(self._notes(manifest)),
            )
        }  # fmt: skip

    def _notes(self, manifest: dict[str, Any]) -> Iterator[str]:
        """Yield footnotes for the scores: files that differ from the official ones, questions left out."""
        for split, official in zip(("train", "valid"), OFFICIAL_QUESTIONS[self.task], strict=True):
            facts = manifest["splits"][split]
            if facts["source_questions"] != official:
                yield (
                    f"{self.task}: the {split} file ({manifest['sources'][split]['name']}) has "
                    f"{facts['source_questions']:,} questions, the official one {official:,}; the scores are not "
                    "comparable with published ones"
                )
            if facts["questions"] < facts["source_questions"]:
                yield f"{self.task}: trained on {facts['questions']:,} of {facts['source_questions']:,} questions"

    def train_flags(self, task: str) -> list[str]:
        """See :class:`~amos_fairseq.finetuning.benchmark.Benchmark`."""
        windows = self.settings.windows
        flags = [str(self.data), "--task", "squad", "--criterion", "squad", "--span-head", self.settings.span_head]
        flags += ["--tokens-per-window", str(windows.tokens), "--doc-stride", str(windows.doc_stride)]
        flags += ["--max-question-length", str(windows.question)]
        return flags if self.validates else [*flags, "--disable-validation"]

    def copy_tokenizer_and_labels(self, task: str, directory: Path) -> None:
        """Copy ``tokenizer/``; SQuAD has no labels."""
        shutil.copytree(self.data / "tokenizer", directory / "tokenizer", dirs_exist_ok=True)

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Return the scores of the dev set by name (see :func:`write_predictions`) and write the prediction files.

        The prediction runs in float32 and without dropout, whatever the precision of the training.
        """

        def check_stop(num_windows: int) -> None:
            if stop.is_set():
                raise Stopped

        split = SquadSplit(self.data, "valid")
        windows = SquadWindowDataset(split, self.dictionary, limits=self.settings.windows)
        decoded = predict(load_checkpoint(checkpoint).model, windows, device, self.settings.decoding, check_stop)
        return write_predictions(directory, split, decoded)


def write_predictions(directory: Path, split: SquadSplit, decoded: dict[str, Decoded]) -> dict[str, Any]:
    """Score the answers and write all files into ``directory``.

    If the split has questions without an answer, the threshold of the null odds is chosen on it: the one that gives the
    best F1 in the official script's search, on the scale of ``null_odds.json``. Above it, the prediction is "".

    Returns:
        ``em`` and ``f1`` of ``predictions.json``; with unanswerable questions also ``has_ans_em``, ``has_ans_f1``,
        ``no_ans_em``, ``best_em`` (the highest over all thresholds) and ``null_threshold``. ``scores.json`` holds the
        same.
    """
    # The questions' texts are not needed for evaluation.
    questions = [
        Question(example.id, "", tuple(Answer(a.text, a.start) for a in example.answers), example.is_impossible)
        for example in split.examples
    ]
    answers = {id_: found.best for id_, found in decoded.items()}
    has_impossible = any(question.is_impossible for question in questions)
    scores: dict[str, Any] = {}
    if has_impossible:
        odds = {id_: found.null_odds for id_, found in decoded.items()}
        best, _ = evaluate(questions, answers, odds)
        threshold = best["best_f1_thresh"]
        if threshold not in odds.values():
            # The search starts with no question answered and reports threshold 0 for it, which is right only for
            # probabilities. On our scale, a threshold below all odds has that meaning.
            threshold = min(odds.values()) - 1
        scores = {"best_em": best["best_exact"], "null_threshold": threshold}
        answers = {id_: "" if odds[id_] > threshold else text for id_, text in answers.items()}
        _write_json(directory / NULL_ODDS, odds)
    official, _ = evaluate(questions, answers)
    scores = {"em": official["exact"], "f1": official["f1"]} | scores
    if has_impossible:
        scores |= {"has_ans_em": official.get("HasAns_exact", 0.0), "has_ans_f1": official.get("HasAns_f1", 0.0)}
        scores["no_ans_em"] = official["NoAns_exact"]
    scores = {name: float(value) for name, value in scores.items()}
    _write_json(directory / PREDICTIONS, answers)
    _write_json(directory / N_BEST, {id_: found.as_json() for id_, found in decoded.items()})
    _write_json(directory / SCORES, scores)
    return scores


def _write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
