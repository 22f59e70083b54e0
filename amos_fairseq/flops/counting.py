"""Floating point operations of training, counted on meta tensors: the matrix products of forward and backward pass.

The backward pass has twice the products of the forward pass, fewer where a gradient is stopped (sampling, AMOS, a frozen
generator), and more where it computes something again: the logits of the output layer, unless the reference implementation is
counted (a CPU keeps up to 64 MiB of them, which is not considered here), and checkpointed layers. Unless the reference is
counted, positions whose output is not needed are left out after the attention of the last layer. The optimizer's step is not
counted.

Departures: Clark (2021, section 5.2.2; ELECTRA's tables) counts the backward pass as once the forward pass, embedding look-ups
as products with one-hot vectors, and element-wise operations. For BERT-Small, 1.45 million updates, the thesis prints 1.4e18;
the products of the same training are 1.55e18 here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from fairseq import models, utils
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig, OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from amos_fairseq.errors import UserError

aten = torch.ops.aten
DEVICE = torch.device("meta")
# Products that are missing in PyTorch's counter, by the shapes of their arguments.
MATMULS = {
    aten.mv: lambda matrix, vector, **keywords: 2 * math.prod(matrix),
    aten.addmm_: lambda total, left, right, **keywords: 2 * math.prod(left) * right[-1],
}


class TrainingFlops(NamedTuple):
    """Operations of one update, over all micro-batches and ranks, and its tokens, ``<s>`` included."""

    per_update: int
    tokens_per_update: int
    max_update: int

    @property
    def per_token(self) -> float:
        return self.per_update / self.tokens_per_update

    @property
    def total(self) -> int:
        return self.per_update * self.max_update


@dataclass(frozen=True)
class CountedUpdate:
    """One update of a configuration: its parts on the meta device, and one micro-batch of full blocks."""

    cfg: DictConfig
    task: FairseqTask
    model: BaseFairseqModel
    criterion: torch.nn.Module
    batch: dict[str, Any]

    @property
    def batches(self) -> int:
        """Micro-batches of all ranks."""
        return self.cfg.optimization.update_freq[0] * self.cfg.distributed_training.distributed_world_size

    def training(self) -> TrainingFlops:
        def train_step() -> None:
            loss, _, _ = self.criterion(self.model, self.batch)
            loss.backward()

        tokens = self.batch["nsentences"] * self.batches * self.task.cfg.tokens_per_sample
        return TrainingFlops(
            count_matmuls(train_step)["Global"] * self.batches, tokens, self.cfg.optimization.max_update
        )

    def forward(self) -> dict[str, int]:
        """Count the forward pass of one micro-batch, loss included, by module: see :func:`count_matmuls`."""
        return count_matmuls(lambda: self.criterion(self.model, self.batch))


def build_update(cfg: DictConfig, task: FairseqTask, reference: bool = False) -> CountedUpdate:
    """Build on the meta device what a run trains, where no kernel of a particular device runs.

    ``model.kernels=triton`` is counted as ``fast``, whose products it repeats or skips in the same places.

    Args:
        cfg: resolved, as fairseq's trainer gets it.
        task: of pretraining, with its vocabulary.
        reference: build the reference implementation instead, without recomputed layers.
    """
    if reason := why_not_counted(cfg):
        raise UserError(reason)
    with DEVICE:
        settings = {"kernels": "reference" if cfg.model.kernels == "reference" else "fast", "compile": False}
        if reference:
            settings |= {"kernels": "reference", "activation_checkpointing": False}
        model = models.build_model(OmegaConf.merge(cfg.model, settings), task).train()
        criterion = task.build_criterion(cfg.criterion).train()
    batch = task.full_batch(cfg.dataset.max_tokens, cfg.dataset.batch_size, model.max_positions())
    return CountedUpdate(cfg, task, model, criterion, utils.apply_to_sample(lambda tensor: tensor.to(DEVICE), batch))


def why_not_counted(cfg: DictConfig) -> str | None:
    """Return why a run has no end in updates, or a cost per update that varies; None if it can be counted."""
    updates, update_freq = cfg.optimization.max_update, list(cfg.optimization.update_freq)
    if minutes := OmegaConf.select(cfg, "lr_scheduler.minutes"):
        # A checkpoint of such a run has no number of updates.
        counted = (
            "counts its optimization.max_update" if updates > 0 else "and optimization.max_update=N count N updates"
        )
        return f"trains for {minutes / 60:.2g} hours; lr_scheduler.minutes=0 {counted}"
    if updates < 1:
        return f"optimization.max_update={updates} sets no end: give the number of planned updates"
    if OmegaConf.select(cfg, "task.phases"):
        advice = "give task.phases=null and the length of one as task.tokens_per_sample"
        return f"task.phases change the cost of an update: {advice}"
    if len(set(update_freq)) != 1:
        return f"optimization.update_freq={update_freq} changes with the epoch, and with it the cost: give one number"
    return None


def count_matmuls(call: Callable[[], Any]) -> dict[str, int]:
    """Count the operations in products of matrices and vectors, including those of a backward pass in ``call``.

    A multiplication and an addition are two operations.

    Returns:
        The operations of every module that ran, including those inside it, under the name that PyTorch's counter uses
        (``AmosModel.discriminator``); and all operations as ``Global``.
    """
    with FlopCounterMode(display=False, custom_mapping=MATMULS) as counter:
        call()
    return {"Global": 0} | {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}
