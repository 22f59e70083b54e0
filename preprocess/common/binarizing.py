"""Stock ``fairseq-preprocess``, called in this process, watched while it runs, and a check of what it wrote."""

import logging
import threading
from pathlib import Path
from typing import Callable, List

import numpy
from fairseq import options
from fairseq.data.indexed_dataset import MMapIndexedDataset, best_fitting_int_dtype
from fairseq_cli import preprocess

_LOOK_SECONDS = 0.5
_FAIRSEQ_SYMBOLS = 4


def run_fairseq_preprocess(
    directory: Path, dictionary: Path, arguments: List[str], expected: int, on_done: Callable[[float], object]
) -> None:
    """``fairseq-preprocess --only-source`` into ``directory`` with ``dictionary``, without its log.

    The command's own entry is called, because its imports take longer than a small file. ``arguments``: its other
    flags (``--trainpref``, ``--workers``, ...); every line of a file gets ``</s>`` at its end. ``expected``: ids that
    it will write; ``on_done`` is told the share of them that is written.
    """
    log = logging.getLogger("fairseq_cli.preprocess")
    handlers, level = list(log.handlers), log.level
    log.setLevel(logging.WARNING)
    watch = _Watch(directory, expected * _bytes_per_id(dictionary), on_done)
    fixed = ["--only-source", "--srcdict", str(dictionary), "--destdir", str(directory)]
    try:
        watch.start()
        preprocess.main(options.get_preprocessing_parser().parse_args([*fixed, *arguments]))
    finally:
        watch.stop()
        log.setLevel(level)
        for handler in set(log.handlers) - set(handlers):  # it opens preprocess.log anew for every call
            log.removeHandler(handler)
            handler.close()
        (directory / "preprocess.log").unlink(missing_ok=True)


def check_binarized(prefix: Path, lines: int, pieces: int) -> None:
    """Assert that the binarized file has every line and every piece that was encoded, and ``</s>`` for each line."""
    dataset = MMapIndexedDataset(str(prefix))
    found, ids = len(dataset), int(numpy.sum(dataset.sizes, dtype=numpy.int64))
    assert (found, ids) == (lines, pieces + lines), (
        f"{prefix}: {found} lines and {ids} ids binarized, {lines} and {pieces + lines} encoded"
    )


def _bytes_per_id(dictionary: Path) -> int:
    with open(dictionary, "rb") as stream:
        symbols = sum(1 for _ in stream) + _FAIRSEQ_SYMBOLS
    return numpy.dtype(best_fitting_int_dtype(symbols)).itemsize


class _Watch(threading.Thread):
    """Progress from the sizes of the files that fairseq's processes fill: it reports nothing itself."""

    def __init__(self, directory: Path, expected_bytes: int, on_done: Callable[[float], object]) -> None:
        super().__init__(daemon=True)
        self._directory, self._expected, self._on_done = directory, expected_bytes, on_done
        self._stopped = threading.Event()
        self._share = 0.0

    def run(self) -> None:
        while not self._stopped.wait(_LOOK_SECONDS):
            # While parts are put together their bytes lie there twice.
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
            except FileNotFoundError:  # put together and removed just now
                continue
        return size

    def _report(self, share: float) -> None:
        if share > self._share:
            self._share = share
            self._on_done(share)
