"""Stock ``fairseq-preprocess`` on one shard, watched while it runs."""

import threading
from pathlib import Path
from typing import Callable, Optional

import numpy
from fairseq.data.indexed_dataset import best_fitting_int_dtype

from preprocess.common.binarizing import run_fairseq_preprocess

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

    ``expected``: ids that it will write; ``on_done`` is told the share of them that is written.
    """
    arguments = ["--trainpref", str(train), "--workers", str(processes)]
    arguments += ["--validpref", str(valid)] if valid else []
    watch = _Watch(directory, expected * _bytes_per_id(dictionary), on_done)
    try:
        watch.start()
        run_fairseq_preprocess(directory, dictionary, arguments)
    finally:
        watch.stop()


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
