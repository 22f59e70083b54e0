"""Batches of random tokens, masked as the task masks a corpus, and what making them costs."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask

NUM_BATCHES = 4  # the steps go round them


@dataclass(frozen=True)
class MadeUpText:
    """Full blocks in batches of one size.

    Attributes:
        batches: as a loader process hands them over.
        tokens_per_batch: ``<s>`` included.
        masked_per_batch: masked positions.
        loading_seconds: of one loader process for a batch: masks, tensors, collation; the corpus itself is not read.
    """

    batches: list[dict[str, Any]]
    tokens_per_batch: int
    masked_per_batch: int
    loading_seconds: float

    @property
    def loaded_tokens_per_second(self) -> float:
        return self.tokens_per_batch / self.loading_seconds


def make_up_text(task: TextPretrainingTask, batch_size: int) -> MadeUpText:
    """:data:`NUM_BATCHES` batches of ``batch_size`` blocks, the same for the same ``common.seed``."""
    dataset = random_blocks(task, NUM_BATCHES * batch_size)
    batches, seconds = [], []
    for number in range(NUM_BATCHES):
        start = time.perf_counter()
        batches.append(
            dataset.collater([dataset[index] for index in range(number * batch_size, (number + 1) * batch_size)])
        )
        seconds.append(time.perf_counter() - start)
    return MadeUpText(batches, batches[0]["ntokens"], batches[0]["num_masked"], min(seconds))


def random_blocks(task: TextPretrainingTask, number: int) -> MaskedBlockDataset:
    """``number`` full blocks of tokens that are not special, drawn uniformly."""
    draw = np.random.default_rng(task.cfg.seed)
    special = set(task.special_ids)
    pieces = np.array([index for index in range(len(task.dictionary)) if index not in special])
    tokens = draw.choice(pieces, size=(number, task.cfg.tokens_per_sample - 1))
    return task.mask_blocks(list(torch.from_numpy(tokens)), training=True, source="made-up text")
