"""The training step of this package: the update of ``fairseq-hydra-train``, made by fairseq's own trainer."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from fairseq import models
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch import Tensor, nn

from amos_fairseq.bench.settings import Setup
from amos_fairseq.compat.master_weights import master_weights
from amos_fairseq.tasks.text_pretraining import TextPretrainingTask


class UnsavedTrainer(Trainer):
    """fairseq's trainer without the ``crash.pt`` of a failed step, because there is no run to inspect."""

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> None:
        """Save nothing."""


class FairseqStep:
    """A model of this package with its criterion, optimizer, schedule, clipping, precision and logging.

    The gradient exchange of a real update is missing on one rank (for several, see examples/benchmark/rank_traces.py).
    """

    def __init__(self, setup: Setup, task: TextPretrainingTask, name: str, description: str):
        self.name = name
        self.description = description
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
        """Run forward, backward, clipping, optimizer, schedule and statistics; see :class:`Contestant`."""
        self.update([batch])

    def update(self, micro_batches: Sequence[dict[str, Any]]) -> None:
        """Run a step with the accumulated gradients of several micro-batches."""
        with metrics.aggregate(new_root=True):  # separate from the statistics of other contestants
            self.trainer.train_step(micro_batches)

    def state(self) -> Iterator[Tensor]:
        """Yield everything that is held between two steps: weights, gradients, master weights, moments."""
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
