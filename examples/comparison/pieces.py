"""One call of the comparison and its end: the minutes that it may take, Ctrl-C, a scheduler's SIGTERM."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from amos_fairseq.errors import REQUEUE
from amos_fairseq.finetuning.benchmark import Stopped
from amos_fairseq.finetuning.training import train

INTERRUPTED = 128 + signal.SIGINT
# A line of progress that cannot be rewritten comes seldom.
SECONDS_BETWEEN_LINES = 30.0


class Piece:
    """What every process of this call is told to stop by.

    Attributes:
        stop: set at the end of the time, or by a signal.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._interrupted = False

    def note(self, number: int, frame: object) -> None:
        """Handler of signals: the running process saves its state and ends, then this one does."""
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.stop.set()

    @property
    def exit_code(self) -> int:
        """Of a call that was stopped: 75 where the same command is to be started again, 130 after Ctrl-C."""
        return INTERRUPTED if self._interrupted else REQUEUE

    def run(self, label: str, command: list[str], directory: Path, variables: dict[str, str], total: int,
            progress: Callable[[int], int]) -> None:  # fmt: skip
        """Run one process to its end with a bar; what it prints goes to ``directory/train.log``.

        Args:
            total: where the bar ends.
            progress: where it stands, told the number of updates that ``directory/metrics.jsonl`` has.

        Raises:
            Stopped: it was stopped, and has saved its state.
            RunFailed: it ended with an error.
        """
        if self.stop.is_set():
            raise Stopped
        directory.mkdir(parents=True, exist_ok=True)
        interval = 0.5 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
        with tqdm(total=total, initial=progress(0), desc=label, mininterval=interval) as bar:
            train(command, directory, variables, self.stop, lambda updates: _move(bar, progress(updates)))
            _move(bar, total)


def _move(bar: tqdm, place: int) -> None:
    bar.update(max(0, place - bar.n))


@contextlib.contextmanager
def piece_of(minutes: float) -> Iterator[Piece]:
    """A piece that ends by itself after ``minutes``, or never for 0."""
    piece = Piece()
    timer = threading.Timer(minutes * 60, piece.stop.set)
    timer.daemon = True
    if minutes:
        timer.start()
    kept = {number: signal.signal(number, piece.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield piece
    finally:
        timer.cancel()
        for number, handler in kept.items():
            signal.signal(number, handler)
