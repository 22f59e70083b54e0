"""Which runs are under way and how far they are: bars in a terminal, lines elsewhere."""

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from amos_fairseq.finetuning.plan import Run
from amos_fairseq.finetuning.settings import total_updates, updates_per_epoch


class Display:
    """Safe to call from several threads."""

    def __init__(self, num_runs: int, done: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._num_runs, self._done = num_runs, done
        self._epochs: dict[str, int] = {}
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "Display":
        if self._done:
            self._say(f"{self._done} of {self._num_runs} runs are finished already")
        self._bars.start()
        self._all = self._bars.add_task("runs", total=self._num_runs, completed=self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, run: Run) -> None:
        with self._lock:
            total = total_updates(run.settings, run.task.rows)
            self._tasks[run.label] = self._bars.add_task(run.label, total=total)
            self._epochs[run.label] = 0
        self._say(f"{run.label}: {run.settings.epochs} epochs, {total} updates")

    def advance(self, run: Run, updates: int) -> None:
        epoch = min(updates // updates_per_epoch(run.task.rows, run.settings.batch_size) + 1, run.settings.epochs)
        with self._lock:
            entered = epoch > self._epochs[run.label] > 0
            self._epochs[run.label] = epoch
            name = f"{run.label}, epoch {epoch} of {run.settings.epochs}"
            self._bars.update(self._tasks[run.label], completed=updates, description=name)
        if entered and not self.console.is_terminal:
            self._say(name)

    def evaluating(self, run: Run) -> None:
        with self._lock:
            self._bars.update(self._tasks[run.label], description=f"{run.label}, scoring")

    def finish(self, run: Run, outcome: str) -> None:
        """Finished or failed."""
        with self._lock:
            self._done += 1
            number = self._done
            self._bars.remove_task(self._tasks.pop(run.label))
            self._bars.update(self._all, completed=number)
        self._say(f"{run.label}: {outcome} ({number} of {self._num_runs} runs)")

    def stopped(self, run: Run) -> None:
        with self._lock:
            self._bars.remove_task(self._tasks.pop(run.label))
        self._say(f"{run.label}: stopped")

    def _say(self, line: str) -> None:
        # Text, because a grid point or a path may hold what rich takes for markup.
        self.console.print(Text(line), soft_wrap=True)
