"""Batches of random tokens, masked as the task masks a corpus, and the speed of the data loader."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

NUM_BATCHES = 4  # the steps cycle through them
NUM_TIMED = 16  # batches that measure the speed of a loader process, after one that is not timed


@dataclass(frozen=True)
class SyntheticText:
    """Full blocks in batches of one size.

    Attributes:
        batches: batches as a loader process returns them.
        tokens_per_batch: number of tokens, ``<s>`` included.
        loaded_tokens_per_second: speed of one loader process: masking, tensors, collation, and reading if there is a corpus.
        reads_corpus: whether that speed was measured on ``task.data``.
    """

    batches: list[dict[str, Any]]
    tokens_per_batch: int
    masked_per_batch: int
    loaded_tokens_per_second: float
    reads_corpus: bool


def make_synthetic_text(task: TextPretrainingTask, batch_size: int, reads_corpus: bool = False) -> SyntheticText:
    """Make :data:`NUM_BATCHES` batches of ``batch_size`` blocks, equal for equal ``common.seed``.

    Args:
        reads_corpus: measure the loader on the training text of ``task.data``; the batches are synthetic in any case.
    """
    dataset = random_blocks(task, NUM_BATCHES * batch_size)
    batches = [collate(dataset, range(start, start + batch_size)) for start in range(0, len(dataset), batch_size)]
    if reads_corpus:
        task.load_dataset(task.cfg.train_subset)
        dataset = task.dataset(task.cfg.train_subset)
    speed = loader_speed(dataset, batch_size)
    return SyntheticText(batches, batches[0]["ntokens"], batches[0]["num_masked"], speed, reads_corpus)


def random_batch(task: TextPretrainingTask, batch_size: int) -> dict[str, Any]:
    """Make one batch of full blocks."""
    return collate(random_blocks(task, batch_size), range(batch_size))


def collate(dataset: MaskedBlockDataset, indices: range | np.ndarray) -> dict[str, Any]:
    return dataset.collater([dataset[index] for index in indices])


def loader_speed(dataset: MaskedBlockDataset, batch_size: int) -> float:
    """Return the tokens/s of one loader process: the median batch, in epoch order, repeating a small dataset."""
    order = np.resize(dataset.ordered_indices(), (1 + NUM_TIMED) * batch_size)
    speeds = []
    for indices in order.reshape(-1, batch_size):
        start = time.perf_counter()
        batch = collate(dataset, indices)
        speeds.append(batch["ntokens"] / (time.perf_counter() - start))
    return statistics.median(speeds[1:])


def random_blocks(task: TextPretrainingTask, number: int) -> MaskedBlockDataset:
    """Return ``number`` full blocks of non-special tokens, sampled uniformly."""
    generator = np.random.default_rng(task.cfg.seed)
    special = set(task.special_ids)
    pieces = np.array([index for index in range(len(task.dictionary)) if index not in special])
    tokens = generator.choice(pieces, size=(number, task.cfg.tokens_per_sample - 1))
    return task.mask_blocks(list(torch.from_numpy(tokens)), training=True, source="synthetic text")
