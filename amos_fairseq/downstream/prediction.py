"""The path of all predictions: the checkpoint of the best run, and batches of similar length."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint, load_checkpoint
from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.experiments.benchmark import Stopped
from amos_fairseq.experiments.records import best_runs
from amos_fairseq.output.terminal import progress_bar

TOKENS_PER_BATCH = 8192


def load_best(out: Path, name: str, command: str) -> Iterator[tuple[str, LoadedCheckpoint]]:
    """Yield each task of the last ``command`` in OUT with the checkpoint of its selected run, and say which that is."""
    for task, run in best_runs(out, name, command).items():
        yield task, load_checkpoint(run.checkpoint_in(out))


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


def predict(
    model: BaseFairseqModel,
    lengths: Sequence[int] | np.ndarray,
    inputs: Callable[[list[int]], Mapping[str, Any]],
    read_out: Callable[[Any, list[int]], Iterable[Any]],
    device: str,
    stop: threading.Event | None = None,
) -> list[Any]:
    """Return a prediction for each example, in their order.

    Args:
        model: in eval mode.
        lengths: of the examples, in tokens.
        inputs: the arguments of ``forward`` for the examples of these indices.
        read_out: a prediction for each of the indices, from the output for them.
        stop: see :func:`batches`.
    """
    model, predictions = model.to(device), [None] * len(lengths)
    for indices in batches(lengths, stop):
        arguments = inputs(indices)
        tensors = {name: value.to(device) for name, value in arguments.items() if isinstance(value, Tensor)}
        with torch.inference_mode():
            output = model(**(arguments | tensors))
        for index, prediction in zip(indices, read_out(output, indices), strict=True):
            predictions[index] = prediction
    return predictions
