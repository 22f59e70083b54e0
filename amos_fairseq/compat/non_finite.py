"""A loss or gradient that is not finite ends the run, and says where it came from.

Stock fairseq writes a ``crash.pt`` of the size of a checkpoint, repeats the update under a ``NanDetector`` that logs the
norms of all parameters, and ends in a traceback; none of it names the loss. An infinite loss whose gradient is finite
goes unnoticed. Under ``--amp`` a batch whose loss is not finite is skipped again and again: the loss scale, which is all
that fairseq changes, has no part in the forward pass. Overflow of a scaled gradient remains fairseq's business: it lowers
the scale, and only at the smallest one (``FloatingPointError``) the run ends here.
"""

import functools
import math
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer

from amos_fairseq.ranks import raise_on_every_rank

ADVICE = "lower the learning rate, warm up longer or clip more (--clip-norm); the last checkpoint can be resumed"


def losses_of(logging_output: dict[str, Any]) -> dict[str, float]:
    """The losses in a criterion's logging output, as Python numbers."""
    return {
        key: float(value)
        for key, value in logging_output.items()
        if "loss" in key and "scale" not in key and (not torch.is_tensor(value) or value.numel() == 1)
    }


def not_finite(logging_outputs: list[dict[str, Any]]) -> dict[str, float]:
    """The losses that are not finite in any micro-batch; the total only where none of its parts is to blame."""
    broken: dict[str, float] = {}
    for logging_output in logging_outputs:
        broken.update({key: loss for key, loss in losses_of(logging_output).items() if not math.isfinite(loss)})
    parts = {key: loss for key, loss in broken.items() if key != "loss"}
    return parts or broken


def losses_of_all_ranks(logging_outputs: list[dict[str, Any]]) -> dict[str, float]:
    """:func:`not_finite` over all ranks. A collective: every rank sees the same summed gradient, so all come here."""
    broken = not_finite(logging_outputs)
    world_size = distributed_utils.get_global_world_size()
    if world_size == 1:
        return broken
    gathered: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(gathered, broken)
    return {key: loss for losses in gathered for key, loss in losses.items()}


def describe(update: int, what: str, broken: dict[str, float], loss_scale: float | None) -> str:
    """The line for the user."""
    losses = ", ".join(f"{key} = {loss}" for key, loss in broken.items()) or "every loss is finite"
    scale = "no loss scale" if loss_scale is None else f"loss scale {loss_scale:g}"
    return f"update {update}: {what} is not finite ({losses}; {scale}): {ADVICE}"


def loss_scale(trainer: Trainer) -> float | None:
    """The factor of the loss in ``--fp16`` and ``--amp``; None where there is none."""
    scaler = getattr(trainer.optimizer, "scaler", None)
    if scaler is None:
        return None
    return scaler.get_scale() if trainer.cfg.common.amp else scaler.loss_scale


def stop(trainer: Trainer, update: int, what: str, broken: dict[str, float]) -> None:
    """End all ranks with one line about ``update``."""
    raise_on_every_rank(describe(update, what, broken, loss_scale(trainer)))


def stop_at_gradient(trainer: Trainer) -> None:
    """End all ranks after an update whose gradient was not finite. A collective, as :func:`losses_of_all_ranks` is."""
    stop(trainer, trainer.get_num_updates(), "the gradient", losses_of_all_ranks(trainer.logging_outputs_of_update))


def check_logged_losses(trainer: Trainer, logged: dict[str, Any] | None) -> None:
    """Stop after an update whose gradient was finite but whose loss was not.

    Args:
        logged: what ``train_step`` returns: means over all ranks, on the CPU already; None after an overflow.
    """
    broken = not_finite([logged]) if logged is not None else {}
    if broken:
        stop(trainer, trainer.get_num_updates(), "the loss", broken)


def apply() -> None:
    """Watch the criterion's outputs, the gradient norm where fairseq judges it, and the losses that are logged.

    In float32 and bf16 that is behind the optimizer's step, where :mod:`amos_fairseq.compat.host_reads` reads the norm.
    """
    train_step, clip_grad_norm = Trainer.train_step, Trainer.clip_grad_norm

    @functools.wraps(train_step)
    def watched_train_step(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        self.logging_outputs_of_update = outputs = []
        hook = self.get_criterion().register_forward_hook(lambda module, given, made: outputs.append(made[2]))
        try:
            logged = train_step(self, *args, **kwargs)
        finally:
            hook.remove()
        check_logged_losses(self, logged)
        return logged

    @functools.wraps(clip_grad_norm)
    def judged_clip_grad_norm(self: Trainer, clip_norm: float) -> torch.Tensor:
        try:
            grad_norm = clip_grad_norm(self, clip_norm)
        except FloatingPointError as error:
            broken = losses_of_all_ranks(self.logging_outputs_of_update)
            what = f"the gradient, after the loss scale was lowered to its minimum ({first_sentence(error)}),"
            stop(self, self.get_num_updates() + 1, what, broken)
            raise
        if self.cfg.common.amp and not torch.isfinite(grad_norm).all():
            broken = losses_of_all_ranks(self.logging_outputs_of_update)
            if broken:  # a smaller scale cannot mend them
                stop(self, self.get_num_updates() + 1, "the gradient", broken)
        return grad_norm

    Trainer.train_step = watched_train_step
    Trainer.clip_grad_norm = judged_clip_grad_norm


def first_sentence(error: Exception) -> str:
    return str(error).partition(". ")[0]
