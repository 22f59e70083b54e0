"""The interface between a benchmark and the shared runner.

A run is one ``fairseq-train`` process in its own directory, followed by one call of ``evaluate`` in a thread of the
current process. Several runs can be active at once, each on its own device.
"""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Task:
    """A task of a benchmark.

    Attributes:
        name: the name in recipes, directories and tables.
        num_examples: number of training examples; it determines the number of updates.
        main_score: the score that selects the best run and is shown in the table.
        data_sha256: fingerprint of the prepared data; runs on other data are not continued.
        notes: footnotes for the scores, such as a training set that differs from the official one.
    """

    name: str
    num_examples: int
    main_score: str
    data_sha256: str
    notes: tuple[str, ...] = ()


class Stopped(Exception):
    """The user asked to stop. Finished runs are kept; the same command continues the others."""


class Benchmark(Protocol):
    """A set of tasks on which one checkpoint is fine-tuned."""

    name: str
    tasks: dict[str, Task]

    def train_flags(self, task: str) -> list[str]:
        """Return the task's arguments of ``fairseq-train``: data directory, task, criterion, and the score that selects
        ``checkpoint_best.pt``. The runner adds model, optimizer, schedule, seed, device and SAVE_DIR."""

    def copy_tokenizer_and_labels(self, task: str, directory: Path) -> None:
        """Copy the files that loading the checkpoints needs (``tokenizer/``, ``labels.txt``) into ``directory``."""

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Score a fine-tuned checkpoint on the dev splits and write its predictions into ``directory``.

        Args:
            device: "cpu" or "cuda:N".
            stop: once it is set, raise :class:`Stopped` before the next batch.

        Returns:
            Scores in percent by name, including ``main_score``, as Python floats.
        """
