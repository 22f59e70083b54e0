"""The progress of the runs of a fine-tuning command: bars in a terminal, lines elsewhere."""

import math
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from amos_fairseq.downstream.benchmark import TaskRun
from amos_fairseq.run.progress import duration

SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES = 5.0, 30.0
WIDTH_BESIDE_BAR = 70  # of a run's position and its numbers, usually


class ActiveRun:
    """What is known of a run that is trained; times are those of ``monotonic()``."""

    def __init__(self, run: TaskRun, bar: TaskID) -> None:
        self.run, self.bar, self.started = run, bar, monotonic()
        self.last_line: float | None = None
        self.first_seen: tuple[float, int] | None = None  # time and update of the first new record, for the rate
        self.update, self.loss, self.dev_score, self.time_left = 0, "", "", ""

    def note(self, update: int, records: Sequence[dict[str, Any]]) -> list[str]:
        """Take over the new records; return a line for each dev score among them, and where the run stands if that is due."""
        now, self.update, lines = monotonic(), update, []
        for record in records:
            if record["split"] == "valid":
                self.dev_score = f"dev {score_of(record, self.run.task.main_score)}"
                epoch = math.ceil(record["update"] / self.run.updates_per_epoch)
                lines.append(f"{self.run.label}, epoch {epoch} of {self.run.num_epochs}: {self.dev_score}")
            elif record["split"] == "train":
                self.loss = score_of(record, "loss")
        if records and self.first_seen is None:
            self.first_seen = now, update
        elif records and update > self.first_seen[1]:
            seconds_per_update = (now - self.first_seen[0]) / (update - self.first_seen[1])
            seconds = seconds_per_update * max(0, self.run.total_updates - update)
            self.time_left = f"about {duration(seconds)} left" if seconds else ""
        is_first = self.last_line is None and self.time_left and now - self.started >= SECONDS_TO_FIRST_LINE
        if is_first or now - (self.last_line or self.started) >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            place = f"update {update:,} of {self.run.total_updates:,}, {self.epoch}, {self.values}"
            lines.append(
                f"{self.run.label}: {place if self.loss else f'no loss yet after {duration(now - self.started)}'}"
            )
        return lines

    @property
    def epoch(self) -> str:
        """The epoch of the next update."""
        number = min(int(self.update // self.run.updates_per_epoch) + 1, self.run.num_epochs)
        return f"epoch {number} of {self.run.num_epochs}"

    @property
    def values(self) -> str:
        """The last loss and dev score, and the time to the end of the training."""
        return ", ".join(filter(None, (self.loss, self.dev_score, self.time_left)))


def score_of(record: dict[str, Any], name: str) -> str:
    """Return a score in percent with its name, or the loss where the validation computes no score."""
    if name in record and name != "loss":
        value, digits = record[name], 1
    else:
        name, value, digits = "loss", record.get("loss"), 3
    return f"{name} {'is not finite' if value is None else f'{value:.{digits}f}'}"


class ProgressDisplay:
    """The active runs and their progress. Thread-safe."""

    def __init__(self, num_runs: int, num_done: int) -> None:
        self.console = Console(highlight=False)
        bar = BarColumn(max(10, min(40, self.console.width - WIDTH_BESIDE_BAR)))
        columns = TextColumn("{task.description}", markup=False), bar, MofNCompleteColumn(), TimeElapsedColumn()
        self._bars = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._num_runs, self._num_done = num_runs, num_done
        self._active: dict[str, ActiveRun] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "ProgressDisplay":
        if self._num_done:
            self._print(f"{self._num_done} of {self._num_runs} runs are already finished")
        self._bars.start()
        self._total = self._bars.add_task("runs", total=self._num_runs, completed=self._num_done)
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def start(self, run: TaskRun) -> None:
        with self._lock:
            self._active[run.label] = ActiveRun(run, self._bars.add_task(run.label, total=run.total_updates))
        epochs, updates = counted(run.num_epochs, "epoch"), counted(run.total_updates, "update")
        self._print(f"{run.label}: {epochs}, {updates}")

    def advance(self, run: TaskRun, update: int, records: Sequence[dict[str, Any]]) -> None:
        """Show the number of updates so far, and what the run has written to its metrics file since the last call."""
        with self._lock:
            active = self._active[run.label]
            lines = active.note(update, records)
            beside_bar = f"{run.label}, {active.epoch}" + (f"\n  {active.values}" if active.values else "")
            self._bars.update(active.bar, completed=update, description=beside_bar)
        if not self.console.is_terminal:
            for line in lines:
                self._print(line)

    def evaluating(self, run: TaskRun) -> None:
        with self._lock:
            active = self._active[run.label]
            self._bars.update(active.bar, description=f"{run.label}, scoring")
        if active.last_line is not None and not self.console.is_terminal:
            self._print(f"{run.label}: scoring")

    def finish(self, run: TaskRun, outcome: str) -> None:
        """Show the score of a finished run, or the reason of a failed one."""
        with self._lock:
            self._num_done += 1
            num_done = self._num_done
            self._bars.remove_task(self._active.pop(run.label).bar)
            self._bars.update(self._total, completed=num_done)
        self._print(f"{run.label}: {outcome} ({num_done} of {self._num_runs} runs)")

    def stopped(self, run: TaskRun) -> None:
        with self._lock:
            self._bars.remove_task(self._active.pop(run.label).bar)
        self._print(f"{run.label}: stopped")

    def _print(self, line: str) -> None:
        # As Text, because the name of a trial or a path may contain rich's markup.
        self.console.print(Text(line), soft_wrap=True)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
