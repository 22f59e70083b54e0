"""Predictions of fine-tuned models: batches, and the checkpoints of the best runs for ``--predict``."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.experiments.benchmark import Stopped
from amos_fairseq.experiments.records import best_runs
from amos_fairseq.output.terminal import progress_bar

TOKENS_PER_BATCH = 8192


def batches(lengths: Sequence[int] | np.ndarray, stop: threading.Event | None = None) -> Iterator[list[int]]:
    """Yield indices of examples of similar length, and show progress where that takes longer; raise :class:`Stopped` once
    ``stop`` is set."""
    with progress_bar(int(sum(lengths)), "predict", "token", delay=2) as bar:
        bar.leave = False
        for indices in batches_by_length(lengths, TOKENS_PER_BATCH):
            if stop is not None and stop.is_set():
                raise Stopped
            yield indices
            bar.update(sum(int(lengths[index]) for index in indices))


def load_best(out: Path, name: str, command: str) -> Iterator[tuple[str, LoadedCheckpoint]]:
    """Yield each task of the last ``command`` in OUT with the checkpoint of its best run on dev, and say which that is."""
    for task, run in best_runs(out, name, command).items():
        yield task, load_checkpoint(run.checkpoint_in(out))
