"""SQuAD for the shared runner: the task ``squad`` trains, answers are decoded and scored here."""

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

from amos_fairseq.data.squad import SquadSplit, SquadWindowDataset, WindowLimits, read_manifest
from amos_fairseq.data.vocabulary import Vocabulary
from amos_fairseq.finetuning.benchmark import Stopped, Task
from amos_fairseq.finetuning.plan import content_sha256
from amos_fairseq.finetuning.starting_point import StartingPoint
from amos_fairseq.squad.decoding import DecodingLimits
from amos_fairseq.squad.predicting import predict
from amos_fairseq.squad.prediction_files import write_predictions

RECIPE_TASK = "SQuAD"  # recipes do not tell the versions apart
# Questions of the official files, training and dev.
OFFICIAL_QUESTIONS = {"SQuAD1.1": (87_599, 10_570), "SQuAD2.0": (130_319, 11_873)}


@dataclass(frozen=True)
class SquadSettings:
    """What decides on the outcome beside recipe, checkpoint and data. ``span_head``: one of ``SPAN_HEADS``."""

    span_head: str
    windows: WindowLimits
    decoding: DecodingLimits

    def as_dict(self) -> dict[str, Any]:
        return {"span_head": self.span_head, **self.windows._asdict(), **self.decoding._asdict()}


class Squad:
    """Prepared data of one version, for one checkpoint; there is a single task, ``SQuAD1.1`` or ``SQuAD2.0``.

    The version is that of the dev set: 2.0 where it has questions without an answer.

    Raises:
        UserError: the data are not prepared, or with another tokenizer than the checkpoint's; lengths leave no room.
    """

    name = "squad"

    def __init__(self, data: Path, start: StartingPoint, settings: SquadSettings, validates: bool) -> None:
        """``validates``: compute the dev loss after each epoch, for recipes that keep the best checkpoint by it."""
        self.data, self.settings, self.validates = data.resolve(), settings, validates
        manifest = read_manifest(self.data)
        start.check_tokenizer(self.data / "tokenizer")
        settings.windows.check()
        self.dictionary = Vocabulary.of_corpus([self.data], None).load_dictionary()
        self.task = "SQuAD2.0" if manifest["splits"]["valid"]["impossible"] else "SQuAD1.1"
        windows = SquadWindowDataset(
            SquadSplit(self.data, "train"), self.dictionary, limits=settings.windows, training=True
        )
        self.tasks = {
            self.task: Task(
                name=self.task, rows=len(windows), main_score="f1",
                data_sha256=content_sha256([manifest, settings.as_dict()]), notes=tuple(self._notes(manifest)),
            )
        }  # fmt: skip

    def _notes(self, manifest: dict[str, Any]) -> Iterator[str]:
        """What a reader of the scores must know of the data."""
        for split, official in zip(("train", "valid"), OFFICIAL_QUESTIONS[self.task], strict=True):
            facts = manifest["splits"][split]
            if facts["source_questions"] != official:
                yield (
                    f"{self.task}: the {split} file ({manifest['sources'][split]['name']}) has "
                    f"{facts['source_questions']:,} questions, the official one {official:,}; the scores do not compare "
                    "with published ones"
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

    def furnish(self, task: str, directory: Path) -> None:
        """``tokenizer/``."""
        shutil.copytree(self.data / "tokenizer", directory / "tokenizer", dirs_exist_ok=True)

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Scores of the dev set by name (see ``squad.prediction_files``); its files go into ``directory``.

        In float32 and without dropout, whatever precision the training had.
        """

        def stop_if_asked(_: int) -> None:
            if stop.is_set():
                raise Stopped

        split = SquadSplit(self.data, "valid")
        windows = SquadWindowDataset(split, self.dictionary, limits=self.settings.windows)
        decoded = predict(load_pretrained(checkpoint).model, windows, device, self.settings.decoding, stop_if_asked)
        return write_predictions(directory, split, decoded)
