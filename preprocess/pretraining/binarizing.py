"""Stock ``fairseq-preprocess`` on one shard, watched while it runs and checked when it is done."""

import logging
import threading
from pathlib import Path
from typing import Callable, Optional

import numpy
from fairseq import options
from fairseq.data.indexed_dataset import MMapIndexedDataset, best_fitting_int_dtype
from fairseq_cli import preprocess

from preprocess.pretraining.encoding import Counts

_LOOK_SECONDS = 0.5
_FAIRSEQ_SYMBOLS = 4


def binarize_shard(
    train: Path,
    valid: Optional[Path],
    dictionary: Path,
    directory: Path,
    processes: int,
    expected: int,
    on_done: Callable[[float], object],
) -> None:
    """``fairseq-preprocess --only-source`` into ``directory``: ``train`` and ``valid`` with ``dict.txt``.

    The command's own entry is called in this process, because its imports take longer than a small shard.
    ``expected``: ids that it will write; ``on_done`` is told the share of them that is written.
    """
    arguments = ["--only-source", "--srcdict", str(dictionary), "--trainpref", str(train), "--destdir", str(directory)]
    arguments += ["--validpref", str(valid)] if valid else []
    arguments += ["--workers", str(processes)]
    log = logging.getLogger("fairseq_cli.preprocess")
    handlers, level = list(log.handlers), log.level
    log.setLevel(logging.WARNING)
    watch = _Watch(directory, expected * _bytes_per_id(dictionary), on_done)
    try:
        watch.start()
        preprocess.main(options.get_preprocessing_parser().parse_args(arguments))
    finally:
        watch.stop()
        log.setLevel(level)
        for handler in set(log.handlers) - set(handlers):  # it opens preprocess.log anew for every shard
            log.removeHandler(handler)
            handler.close()
        (directory / "preprocess.log").unlink(missing_ok=True)


def check_binarized(prefix: Path, counts: Counts) -> None:
    """Assert that the binarized file has every line and every piece that was encoded."""
    dataset = MMapIndexedDataset(str(prefix))
    lines, ids = len(dataset), int(numpy.sum(dataset.sizes, dtype=numpy.int64))
    assert (lines, ids) == (counts.lines, counts.pieces + counts.lines), (
        f"{prefix}: {lines} lines and {ids} ids binarized, {counts.lines} and {counts.pieces + counts.lines} encoded"
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
