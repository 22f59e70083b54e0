"""End the run at an update that fails: a loss or gradient that is not finite, or a batch that does not fit into memory.

Not finite. Stock fairseq writes a ``crash.pt`` of the size of a checkpoint, repeats the update under a ``NanDetector`` that
logs the norms of all parameters, and ends in a traceback; none of it names the loss. An infinite loss with a finite gradient
is not noticed. Under ``--amp`` a batch whose loss is not finite is skipped repeatedly: fairseq changes only the loss scale,
which has no effect on the forward pass. fairseq still handles the overflow of a scaled gradient: it lowers the scale, and
only at the smallest one (``FloatingPointError``) does the run end here.

Out of memory. Stock fairseq skips such a batch and continues. Blocks have one size here, so that every batch fails: on one
GPU the run goes through its epochs forever without an update, and several ranks lose each other, because one has skipped a
backward pass that the others wait for. Here the trainer raises the exception, which is an option of its, and
:mod:`amos_fairseq.run.mistakes` has the message. Validation still retries with an empty cache.
"""

import math
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer

from amos_fairseq.compat.collectives import raise_on_every_rank

ADVICE = "lower the learning rate, warm up longer or clip more (--clip-norm); the last checkpoint can be resumed"


def not_finite(logging_outputs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the losses that are not finite in any micro-batch; the total only if all of its parts are finite."""
    broken: dict[str, float] = {}
    for key, value in (item for logging_output in logging_outputs for item in logging_output.items()):
        is_loss = "loss" in key and "scale" not in key and (not torch.is_tensor(value) or value.numel() == 1)
        if is_loss and not math.isfinite(float(value)):
            broken[key] = float(value)
    parts = {key: loss for key, loss in broken.items() if key != "loss"}
    return parts or broken


def not_finite_on_any_rank(trainer: Trainer) -> dict[str, float]:
    """Return :func:`not_finite` of the present update over all ranks.

    A collective operation. Every rank has the same summed gradient, so all of them call it.
    """
    broken = not_finite(trainer.logging_outputs_of_update)
    world_size = distributed_utils.get_global_world_size()
    if world_size == 1:
        return broken
    gathered: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(gathered, broken)
    return {key: loss for losses in gathered for key, loss in losses.items()}


def stop(trainer: Trainer, update: int, what: str, broken: dict[str, float]) -> None:
    """End all ranks with one line about ``update``."""
    losses = ", ".join(f"{key} = {loss}" for key, loss in broken.items()) or "every loss is finite"
    scaler = getattr(trainer.optimizer, "scaler", None)
    scale = "no loss scale"
    if scaler is not None:
        scale = f"loss scale {scaler.get_scale() if trainer.cfg.common.amp else scaler.loss_scale:g}"
    raise_on_every_rank(f"update {update}: {what} is not finite ({losses}; {scale}): {ADVICE}")


def collect_outputs(trainer: Trainer) -> None:
    """Let the trainer's criterion leave its outputs of an update in ``trainer.logging_outputs_of_update``."""
    trainer.logging_outputs_of_update = []

    def collect(criterion: Any, given: Any, result: Any) -> None:
        if criterion.training:
            trainer.logging_outputs_of_update.append(result[2])

    trainer.get_criterion().register_forward_hook(collect)


def forget_outputs(trainer: Trainer) -> None:
    """Forget the outputs of the update before."""
    trainer.logging_outputs_of_update = []


def stop_at_smallest_scale(trainer: Trainer, error: FloatingPointError) -> None:
    """End all ranks where ``--fp16`` or ``--amp`` cannot lower its loss scale any more. A collective operation."""
    reason = str(error).partition(". ")[0]
    what = f"the gradient, after the loss scale was lowered to its minimum ({reason}),"
    stop(trainer, trainer.get_num_updates() + 1, what, not_finite_on_any_rank(trainer))


def check_amp_gradient(trainer: Trainer, norm: torch.Tensor) -> None:
    """End all ranks at a loss of ``--amp`` that is not finite, for which a smaller loss scale does not help.

    The norm of ``--amp`` is checked where fairseq checks for an overflow, that of float32 and bf16 after the optimizer's step
    (:mod:`amos_fairseq.compat.device_reads`).
    """
    if trainer.cfg.common.amp and not torch.isfinite(norm).all():
        broken = not_finite_on_any_rank(trainer)
        if broken:
            stop(trainer, trainer.get_num_updates() + 1, "the gradient", broken)


def check_gradient(trainer: Trainer, norm: float | None) -> None:
    """End all ranks after an update whose gradient was not finite. A collective operation."""
    if norm is not None and not math.isfinite(norm) and not trainer.cfg.common.amp:
        stop(trainer, trainer.get_num_updates(), "the gradient", not_finite_on_any_rank(trainer))


def check_logged_losses(trainer: Trainer, logged: dict[str, Any] | None) -> None:
    """End the run after an update whose gradient was finite but whose loss was not.

    Args:
        logged: what the update logs: means over all ranks, on the CPU; None after an overflow.
    """
    broken = not_finite([logged]) if logged is not None else {}
    if broken:
        stop(trainer, trainer.get_num_updates(), "the loss", broken)
