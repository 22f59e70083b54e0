"""Floating point operations of a training run: its matrix products, counted on meta tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fairseq import models, utils
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig, OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from amos_fairseq.errors import UserError

DEVICE = torch.device("meta")
# Products that are missing in PyTorch's counter, by the shapes of their arguments.
MATMULS = {
    torch.ops.aten.mv: lambda matrix, vector, **keywords: 2 * math.prod(matrix),
    torch.ops.aten.addmm_: lambda total, left, right, **keywords: 2 * math.prod(left) * right[-1],
}


@dataclass(frozen=True)
class CountedUpdate:
    """One update of a configuration.

    Attributes:
        task: of pretraining.
        model: in training mode, on the meta device like ``criterion`` and ``batch``.
        batch: one micro-batch of full blocks.
        batch_size: number of sequences in it.
        batches_per_update: micro-batches of all ranks in an update.
    """

    task: FairseqTask
    model: BaseFairseqModel
    criterion: torch.nn.Module
    batch: dict[str, Any]
    batch_size: int
    batches_per_update: int
    max_update: int

    @property
    def tokens_per_update(self) -> int:
        return self.batch_size * self.batches_per_update * self.task.cfg.tokens_per_sample


@dataclass(frozen=True)
class TrainingFlops:
    """Floating point operations of training; a multiplication and an addition are two.

    Attributes:
        per_update: all micro-batches and ranks of one update.
        tokens_per_update: tokens of its blocks, ``<s>`` included.
    """

    per_update: int
    tokens_per_update: int
    max_update: int

    @property
    def per_token(self) -> float:
        return self.per_update / self.tokens_per_update

    @property
    def total(self) -> int:
        """Operations of all planned updates."""
        return self.per_update * self.max_update


def build_update(cfg: DictConfig, task: FairseqTask, reference: bool = False) -> CountedUpdate:
    """Build on the meta device what a run trains, where no kernel of a particular device runs.

    ``model.kernels=triton`` is counted as ``fast``, whose products it repeats or skips in the same places.

    Args:
        cfg: resolved, as fairseq's trainer gets it.
        task: of pretraining, with its vocabulary.
        reference: build the reference implementation instead, without recomputed layers.

    Raises:
        UserError: the run has no end, or a cost per update that varies.
    """
    if cfg.optimization.max_update < 1:
        raise UserError(
            f"optimization.max_update={cfg.optimization.max_update} sets no end: give the number of planned updates"
        )
    with DEVICE:
        settings = {"kernels": "reference" if cfg.model.kernels == "reference" else "fast", "compile": False}
        if reference:
            settings |= {"kernels": "reference", "activation_checkpointing": False}
        model = models.build_model(OmegaConf.merge(cfg.model, settings), task).train()
        criterion = task.build_criterion(cfg.criterion).train()
    batch = task.full_batch(cfg.dataset.max_tokens, cfg.dataset.batch_size, model.max_positions())
    return CountedUpdate(
        task=task,
        model=model,
        criterion=criterion,
        batch=utils.apply_to_sample(lambda tensor: tensor.to(DEVICE), batch),
        batch_size=batch["nsentences"],
        batches_per_update=update_freq(cfg) * cfg.distributed_training.distributed_world_size,
        max_update=cfg.optimization.max_update,
    )


def update_freq(cfg: DictConfig) -> int:
    """Return the micro-batches of a rank per update; raise :class:`UserError` if the number changes with the epoch."""
    numbers = set(cfg.optimization.update_freq)
    if len(numbers) != 1:
        raise UserError(
            f"optimization.update_freq={list(cfg.optimization.update_freq)} changes with the epoch, and with it the cost "
            "of an update: give one number"
        )
    return numbers.pop()


def by_autograd(update: CountedUpdate) -> TrainingFlops:
    """Count by today's convention: the products of a whole training step."""

    def train_step() -> None:
        loss, _, _ = update.criterion(update.model, update.batch)
        loss.backward()

    return of_updates(update, count_matmuls(train_step))


def of_updates(update: CountedUpdate, per_batch: int) -> TrainingFlops:
    return TrainingFlops(per_batch * update.batches_per_update, update.tokens_per_update, update.max_update)


def count_matmuls(call: Callable[[], Any]) -> int:
    """Count the operations in products of matrices and vectors, including those of a backward pass."""
    with FlopCounterMode(display=False, custom_mapping=MATMULS) as counter:
        call()
    return counter.get_total_flops()
