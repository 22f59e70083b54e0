"""The progress of the runs of a fine-tuning command: bars in a terminal, lines elsewhere."""

import io
import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tqdm import tqdm

from amos_fairseq.experiments.benchmark import TaskRun

SECONDS_BETWEEN_LINES = 30.0


@dataclass
class ActiveRun:
    """The bar of a run that is trained, its last loss and dev score, and the time of its last line."""

    bar: tqdm
    values: dict[str, str] = field(default_factory=dict)
    last_line: float = field(default_factory=monotonic)


class ProgressDisplay:
    """Show the active runs with loss, dev score and remaining time. Without a terminal, print a line for each dev score and
    every 30 seconds. Thread-safe."""

    def __init__(self, num_runs: int, num_done: int) -> None:
        self.num_runs, self.num_done, self.has_bars = num_runs, num_done, sys.stderr.isatty()
        self._active: dict[str, ActiveRun] = {}
        self._lock = threading.Lock()
        if num_done:
            tqdm.write(f"{num_done} of {num_runs} runs are already finished")

    def start(self, run: TaskRun) -> None:
        num_epochs, num_updates = run.schedule.num_epochs, run.schedule.total_updates
        place = sys.stderr if self.has_bars else io.StringIO()
        with self._lock:
            bar = tqdm(total=num_updates, desc=run.label, unit="update", leave=False, file=place)
            self._active[run.label] = ActiveRun(bar)
        tqdm.write(f"{run.label}: {counted(num_epochs, 'epoch')}, {counted(num_updates, 'update')}")

    def advance(self, run: TaskRun, update: int, records: Sequence[dict[str, Any]]) -> None:
        """Show the number of updates so far, and what the run has written to its metrics file since the last call."""
        schedule, has_score = run.schedule, False
        epoch = int(update // schedule.updates_per_epoch) + 1  # of the next update, or of a new dev score
        with self._lock:
            active = self._active[run.label]
            for record in records:
                if record["split"] == "train":
                    active.values["train"] = score_of(record, "loss")
                elif record["split"] == "valid":
                    active.values["dev"], has_score = f"dev {score_of(record, run.task.main_score)}", True
                    epoch = math.ceil(record["update"] / schedule.updates_per_epoch)
            place = f"epoch {min(epoch, schedule.num_epochs)} of {schedule.num_epochs}"
            active.bar.set_description(f"{run.label}, {place}", refresh=False)
            active.bar.set_postfix_str(", ".join(active.values.values()), refresh=False)
            active.bar.update(update - active.bar.n)
            if not self.has_bars and (has_score or monotonic() - active.last_line >= SECONDS_BETWEEN_LINES):
                active.last_line = monotonic()
                tqdm.write(str(active.bar))

    def evaluating(self, run: TaskRun) -> None:
        self._active[run.label].bar.set_description(f"{run.label}, scoring")

    def finish(self, run: TaskRun, outcome: str, is_done: bool = True) -> None:
        """Show the score of a finished run, or why it ended without one."""
        with self._lock:
            self._active.pop(run.label).bar.close()
            self.num_done += is_done
        tqdm.write(f"{run.label}: {outcome}" + (f" ({self.num_done} of {self.num_runs} runs)" if is_done else ""))


def score_of(record: dict[str, Any], name: str) -> str:
    """Return a score in percent with its name, or the loss where the validation computes no score."""
    if name in record and name != "loss":
        value, digits = record[name], 1
    else:
        name, value, digits = "loss", record.get("loss"), 3
    return f"{name} {'is not finite' if value is None else f'{value:.{digits}f}'}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
