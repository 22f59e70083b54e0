"""The progress of the runs of a fine-tuning command: bars in a terminal, lines elsewhere."""

import math
import sys
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any

from tqdm import tqdm

from amos_fairseq.downstream.benchmark import TaskRun
from amos_fairseq.run.progress import duration

SECONDS_TO_FIRST_LINE, SECONDS_BETWEEN_LINES = 5.0, 30.0


class ActiveRun:
    """What is known of a run that is trained; times are those of ``monotonic()``."""

    def __init__(self, run: TaskRun, bar: tqdm) -> None:
        self.run, self.bar, self.started = run, bar, monotonic()
        self.last_line: float | None = None
        self.first_seen: tuple[float, int] | None = None  # time and update of the first new record, for the rate
        self.loss, self.dev_score, self.time_left = "", "", ""

    def note(self, update: int, records: Sequence[dict[str, Any]]) -> list[str]:
        """Take over the new records; return a line for each dev score among them, and where the run stands if that is due."""
        now, label, schedule, lines = monotonic(), self.run.label, self.run.schedule, []
        for record in records:
            if record["split"] == "valid":
                self.dev_score = f"dev {score_of(record, self.run.task.main_score)}"
                epoch = math.ceil(record["update"] / schedule.updates_per_epoch)
                lines.append(f"{label}, epoch {epoch} of {schedule.num_epochs}: {self.dev_score}")
            elif record["split"] == "train":
                self.loss = score_of(record, "loss")
        if records and self.first_seen is None:
            self.first_seen = now, update
        elif records and update > self.first_seen[1]:
            seconds_per_update = (now - self.first_seen[0]) / (update - self.first_seen[1])
            seconds = seconds_per_update * max(0, schedule.total_updates - update)
            self.time_left = f"about {duration(seconds)} left" if seconds else ""
        epoch = (
            f"epoch {min(int(update // schedule.updates_per_epoch) + 1, schedule.num_epochs)} of {schedule.num_epochs}"
        )
        self.bar.set_description(f"{label}, {epoch}", refresh=False)
        self.bar.set_postfix_str(", ".join(filter(None, (self.loss, self.dev_score))), refresh=False)
        self.bar.update(update - self.bar.n)
        is_first = self.last_line is None and self.time_left and now - self.started >= SECONDS_TO_FIRST_LINE
        if is_first or now - (self.last_line or self.started) >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            values = ", ".join(filter(None, (self.loss, self.dev_score, self.time_left)))
            place = f"update {update:,} of {schedule.total_updates:,}, {epoch}, {values}"
            lines.append(f"{label}: {place if self.loss else f'no loss yet after {duration(now - self.started)}'}")
        return lines


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
        self.has_bars = sys.stderr.isatty()
        self.runs = tqdm(total=num_runs, initial=num_done, desc="runs", unit="run", disable=not self.has_bars)
        self.num_runs, self.num_done = num_runs, num_done
        self._active: dict[str, ActiveRun] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "ProgressDisplay":
        if self.num_done:
            tqdm.write(f"{self.num_done} of {self.num_runs} runs are already finished")
        return self

    def __exit__(self, *exception: object) -> None:
        self.runs.close()

    def start(self, run: TaskRun) -> None:
        num_epochs, num_updates = run.schedule.num_epochs, run.schedule.total_updates
        with self._lock:
            bar = tqdm(total=num_updates, desc=run.label, unit="update", leave=False, disable=not self.has_bars)
            self._active[run.label] = ActiveRun(run, bar)
        tqdm.write(f"{run.label}: {counted(num_epochs, 'epoch')}, {counted(num_updates, 'update')}")

    def advance(self, run: TaskRun, update: int, records: Sequence[dict[str, Any]]) -> None:
        """Show the number of updates so far, and what the run has written to its metrics file since the last call."""
        with self._lock:
            lines = self._active[run.label].note(update, records)
        if not self.has_bars:
            for line in lines:
                tqdm.write(line)

    def evaluating(self, run: TaskRun) -> None:
        active = self._active[run.label]
        active.bar.set_description(f"{run.label}, scoring")
        if active.last_line is not None and not self.has_bars:
            tqdm.write(f"{run.label}: scoring")

    def finish(self, run: TaskRun, outcome: str, is_done: bool = True) -> None:
        """Show the score of a finished run, or why it ended without one."""
        with self._lock:
            self._active.pop(run.label).bar.close()
            self.num_done += is_done
            self.runs.update(is_done)
        tqdm.write(f"{run.label}: {outcome}" + (f" ({self.num_done} of {self.num_runs} runs)" if is_done else ""))


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
