"""End the run at an update that fails: a loss or gradient that is not finite, or a batch that does not fit into memory.

Not finite. Stock fairseq writes a ``crash.pt`` of the size of a checkpoint, repeats the update under a ``NanDetector`` that
logs the norms of all parameters, and ends in a traceback; none of it names the loss. An infinite loss with a finite gradient
is not noticed. Under ``--amp`` a batch whose loss is not finite is skipped repeatedly: fairseq changes only the loss scale,
which has no effect on the forward pass. fairseq still handles the overflow of a scaled gradient: it lowers the scale, and
only at the smallest one (``FloatingPointError``) does the run end here.

Out of memory. Stock fairseq skips such a batch and continues. Blocks have one size here, so that every batch fails: on one
GPU the run goes through its epochs forever without an update, and several ranks lose each other, because one has skipped a
backward pass that the others wait for. The message is in :mod:`amos_fairseq.compat.user_errors`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer

from amos_fairseq.collectives import raise_on_every_rank

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


def stop_at_gradient(trainer: Trainer) -> None:
    """End all ranks after an update whose gradient was not finite. A collective operation."""
    stop(trainer, trainer.get_num_updates(), "the gradient", not_finite_on_any_rank(trainer))


def check_logged_losses(trainer: Trainer, logged: dict[str, Any] | None) -> None:
    """End the run after an update whose gradient was finite but whose loss was not.

    Args:
        logged: the result of ``train_step``: means over all ranks, on the CPU; None after an overflow.
    """
    broken = not_finite([logged]) if logged is not None else {}
    if broken:
        stop(trainer, trainer.get_num_updates(), "the loss", broken)


def stop_at_infinite_loss(train_step: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Collect the criterion's outputs during an update, and check the losses that are logged."""
    trainer.logging_outputs_of_update = outputs = []
    hook = trainer.get_criterion().register_forward_hook(lambda module, given, result: outputs.append(result[2]))
    try:
        logged = train_step(trainer, *args, **kwargs)
    finally:
        hook.remove()
    check_logged_losses(trainer, logged)
    return logged


def stop_at_infinite_gradient(clip_grad_norm: Callable[..., Any], trainer: Trainer, clip_norm: float) -> torch.Tensor:
    """Check the gradient norm of ``--fp16`` and ``--amp`` where fairseq checks for an overflow.

    In float32 and bf16 the norm is checked after the optimizer's step (:mod:`amos_fairseq.compat.host_reads`).
    """
    try:
        grad_norm = clip_grad_norm(trainer, clip_norm)
    except FloatingPointError as error:
        reason = str(error).partition(". ")[0]
        what = f"the gradient, after the loss scale was lowered to its minimum ({reason}),"
        stop(trainer, trainer.get_num_updates() + 1, what, not_finite_on_any_rank(trainer))
        raise
    if trainer.cfg.common.amp and not torch.isfinite(grad_norm).all():
        broken = not_finite_on_any_rank(trainer)
        if broken:  # a smaller scale does not help
            stop(trainer, trainer.get_num_updates() + 1, "the gradient", broken)
    return grad_norm


def stop_when_out_of_memory(
    train_step: Callable[..., Any], trainer: Trainer, samples: list[dict[str, Any]], raise_oom: bool = True
) -> Any:
    """Let the trainer raise the exception, which is an option of its. Validation still retries with an empty cache."""
    return train_step(trainer, samples, raise_oom)
