"""Run stock ``fairseq-preprocess`` in this process, show its progress, and check its output."""

import logging
import threading
from pathlib import Path
from typing import Callable, List

import numpy
from fairseq import options
from fairseq.data.indexed_dataset import MMapIndexedDataset, best_fitting_int_dtype
from fairseq_cli import preprocess

_POLL_SECONDS = 0.5
_FAIRSEQ_SYMBOLS = 4


def run_fairseq_preprocess(
    directory: Path, dictionary: Path, arguments: List[str], expected: int, on_done: Callable[[float], object]
) -> None:
    """Run ``fairseq-preprocess --only-source`` with ``dictionary`` into ``directory``, without its log.

    The entry point of the command is called, because its imports take longer than a small file.

    Args:
        arguments: its other flags (``--trainpref``, ``--workers``, ...). Each line of a file gets ``</s>`` at its end.
        expected: number of ids that it will write.
        on_done: called with the share of the ids that is written.
    """
    log = logging.getLogger("fairseq_cli.preprocess")
    handlers, level = list(log.handlers), log.level
    log.setLevel(logging.WARNING)
    monitor = _OutputMonitor(directory, expected * _bytes_per_id(dictionary), on_done)
    fixed = ["--only-source", "--srcdict", str(dictionary), "--destdir", str(directory)]
    try:
        monitor.start()
        preprocess.main(options.get_preprocessing_parser().parse_args([*fixed, *arguments]))
    finally:
        monitor.stop()
        log.setLevel(level)
        for handler in set(log.handlers) - set(handlers):  # every call opens another preprocess.log
            log.removeHandler(handler)
            handler.close()
        (directory / "preprocess.log").unlink(missing_ok=True)


def check_binarized(prefix: Path, lines: int, pieces: int) -> None:
    """Assert that the binarized file has every encoded line and piece, and ``</s>`` for each line."""
    dataset = MMapIndexedDataset(str(prefix))
    found, ids = len(dataset), int(numpy.sum(dataset.sizes, dtype=numpy.int64))
    assert (found, ids) == (lines, pieces + lines), (
        f"{prefix}: {found} lines and {ids} ids binarized, {lines} and {pieces + lines} encoded"
    )


def _bytes_per_id(dictionary: Path) -> int:
    with open(dictionary, "rb") as stream:
        symbols = sum(1 for _ in stream) + _FAIRSEQ_SYMBOLS
    return numpy.dtype(best_fitting_int_dtype(symbols)).itemsize


class _OutputMonitor(threading.Thread):
    """Report progress from the sizes of the files that fairseq's processes write; fairseq itself reports none."""

    def __init__(self, directory: Path, expected_bytes: int, on_done: Callable[[float], object]) -> None:
        super().__init__(daemon=True)
        self._directory, self._expected, self._on_done = directory, expected_bytes, on_done
        self._stopped = threading.Event()
        self._share = 0.0

    def run(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            # While parts are merged, their bytes are on disk twice.
            self._report(min(1.0, self._written() / self._expected))

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self._report(1.0)

    def _written(self) -> int:
        size = 0
        for path in self._directory.glob("*.bin"):
            try:
                size += path.stat().st_size
            except FileNotFoundError:  # just merged and removed
                continue
        return size

    def _report(self, share: float) -> None:
        if share > self._share:
            self._share = share
            self._on_done(share)
