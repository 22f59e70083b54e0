"""What a benchmark has to say about itself so that the shared runner can fine-tune on it.

::

    class Squad:
        name = "squad"
        tasks = {"SQuAD2.0": Task("SQuAD2.0", rows=130_319, main_score="f1", data_sha256="...")}

        def train_flags(self, task): return [str(self.data), "--task", "squad", "--criterion", "squad"]
        def furnish(self, task, directory): ...     # tokenizer/, labels.txt beside the checkpoint
        def evaluate(self, task, checkpoint, directory, device, stop): ...   # {"em": 74.1, "f1": 77.0}

    outcome = execute(plan, benchmark, runner_settings)       # amos_fairseq.finetuning.runner

One run is one ``fairseq-train`` process in a directory of its own, then one call of ``evaluate`` in a thread of this
process; several of them may be under way at once, each on a device of its own.
"""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Task:
    """A task of a benchmark.

    Attributes:
        name: its name in recipes, directories and tables.
        rows: training examples, which give the number of updates.
        main_score: the score by which the best run is chosen and that the table shows.
        data_sha256: tells whether the prepared data are those of an earlier run.
        notes: what a reader of the scores must know about the data, such as a training set that is not the official one.
    """

    name: str
    rows: int
    main_score: str
    data_sha256: str
    notes: tuple[str, ...] = ()


class Stopped(Exception):
    """The user asked to stop; what is finished stays, the rest is continued by the same command."""


class Benchmark(Protocol):
    """A set of tasks that one checkpoint is fine-tuned on."""

    name: str
    tasks: dict[str, Task]

    def train_flags(self, task: str) -> list[str]:
        """Arguments of ``fairseq-train`` that belong to the task: data directory, task, criterion, and the score by which
        ``checkpoint_best.pt`` is chosen. Model, optimizer, schedule, seed, device and SAVE_DIR come from the runner."""

    def furnish(self, task: str, directory: Path) -> None:
        """Put beside the checkpoints what reading them needs (``tokenizer/``, ``labels.txt``)."""

    def evaluate(
        self, task: str, checkpoint: Path, directory: Path, device: str, stop: threading.Event
    ) -> dict[str, float]:
        """Score a fine-tuned checkpoint on the dev splits and write its predictions into ``directory``.

        Args:
            device: "cpu" or "cuda:N".
            stop: once set, raise :class:`Stopped` before the next batch.

        Returns:
            Scores in percent by name, ``main_score`` among them; Python floats.
        """
