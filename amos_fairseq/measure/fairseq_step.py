"""The training step of this package, as fairseq's own trainer makes it, and batches of random tokens for it."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq import models
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch import Tensor, nn

from amos_fairseq.compat.mixed_precision import master_weights
from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.measure.configuration import BenchSetup
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask


class UnsavedTrainer(Trainer):
    """fairseq's trainer without the ``crash.pt`` of a failed step, because there is no run to inspect."""

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> None:
        """Save nothing."""


class FairseqStep:
    """A model of this package with its criterion, optimizer, schedule, clipping, precision and logging.

    The gradient exchange of a real update is missing on one rank (for several, see examples/benchmark/rank_traces.py).
    """

    def __init__(self, setup: BenchSetup, task: TextPretrainingTask):
        torch.manual_seed(setup.cfg.common.seed)
        model = models.build_model(setup.cfg.model, task)
        if model.awaits_token_counts:
            model.set_token_counts(synthetic_counts(task))
        self.trainer = UnsavedTrainer(setup.cfg, task, model, task.build_criterion(setup.cfg.criterion))

    @property
    def module(self) -> nn.Module:
        return self.trainer.get_model()

    @property
    def criterion(self) -> nn.Module:
        return self.trainer.get_criterion()

    def step(self, batch: dict[str, Any]) -> None:
        """Run forward, backward, clipping, optimizer, schedule and statistics."""
        self.update([batch])

    def update(self, micro_batches: Sequence[dict[str, Any]]) -> None:
        """Run a step with the accumulated gradients of several micro-batches."""
        with metrics.aggregate(new_root=True):  # separate from the statistics of other contestants
            self.trainer.train_step(micro_batches)

    def state(self) -> Iterator[Tensor]:
        yield from tensors_of(self.module)
        optimizer = self.trainer.optimizer
        if hasattr(optimizer, "fp32_params"):
            yield from master_weights(optimizer)
        yield from moments_of(optimizer.optimizer)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, their gradients, and buffers."""
    for parameter in module.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()


def moments_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the state of the optimizer, and the gradients of its own parameters (master weights)."""
    for group in optimizer.param_groups:
        yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


def synthetic_counts(task: TextPretrainingTask) -> Tensor:
    """Return token counts for a generator that samples by frequency: the dictionary's, 0 for special tokens."""
    counts = torch.tensor(task.dictionary.count)
    counts[task.special_ids] = 0
    return counts


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
