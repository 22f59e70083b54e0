"""Batches of random tokens, masked as the task masks a corpus, and what making such batches costs."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

NUM_BATCHES = 4  # the steps go round them
NUM_TIMED = 16  # batches that a loader process is measured by, after one that is not


@dataclass(frozen=True)
class MadeUpText:
    """Full blocks in batches of one size.

    Attributes:
        batches: as a loader process hands them over.
        tokens_per_batch: ``<s>`` included.
        masked_per_batch: masked positions.
        loaded_tokens_per_second: of one loader process: masks, tensors, collation, and reading where there is a corpus.
        reads_corpus: whether that was measured on ``task.data``.
    """

    batches: list[dict[str, Any]]
    tokens_per_batch: int
    masked_per_batch: int
    loaded_tokens_per_second: float
    reads_corpus: bool


def make_up_text(task: TextPretrainingTask, batch_size: int, reads_corpus: bool = False) -> MadeUpText:
    """:data:`NUM_BATCHES` batches of ``batch_size`` blocks, the same for the same ``common.seed``.

    Args:
        reads_corpus: measure the loader on the training text of ``task.data``; the batches are made up all the same.
    """
    dataset = random_blocks(task, NUM_BATCHES * batch_size)
    batches = [
        dataset.collater([dataset[index] for index in range(number * batch_size, (number + 1) * batch_size)])
        for number in range(NUM_BATCHES)
    ]
    if reads_corpus:
        task.load_dataset(task.cfg.train_subset)
        dataset = task.dataset(task.cfg.train_subset)
    speed = loader_speed(dataset, batch_size)
    return MadeUpText(batches, batches[0]["ntokens"], batches[0]["num_masked"], speed, reads_corpus)


def loader_speed(dataset: MaskedBlockDataset, batch_size: int) -> float:
    """Tokens/s of one loader process: the median batch, in the order of an epoch, round a dataset that is small."""
    order = np.resize(dataset.ordered_indices(), (1 + NUM_TIMED) * batch_size)
    speeds = []
    for indices in order.reshape(-1, batch_size):
        start = time.perf_counter()
        batch = dataset.collater([dataset[index] for index in indices])
        speeds.append(batch["ntokens"] / (time.perf_counter() - start))
    return statistics.median(speeds[1:])


def random_blocks(task: TextPretrainingTask, number: int) -> MaskedBlockDataset:
    """``number`` full blocks of tokens that are not special, drawn uniformly."""
    draw = np.random.default_rng(task.cfg.seed)
    special = set(task.special_ids)
    pieces = np.array([index for index in range(len(task.dictionary)) if index not in special])
    tokens = draw.choice(pieces, size=(number, task.cfg.tokens_per_sample - 1))
    return task.mask_blocks(list(torch.from_numpy(tokens)), training=True, source="made-up text")
