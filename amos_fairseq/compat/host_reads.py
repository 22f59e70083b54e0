"""Read everything that the host needs from the device in one transfer per update, after all work has been queued.

Stock fairseq reads the gradient norm three times before the optimizer's step and once after it, then each statistic
separately: two dozen times the host waits until the device is idle, and the device then waits for the host. Here clipping
stays on the device, and the norm is read with the statistics, after the step. A norm that is not finite still ends the run
(:mod:`amos_fairseq.compat.failing_updates`), with weights that are not saved.

An update of AMOS waits once instead of 23 times. ``--fp16`` needs the norm before the step for its loss scale: there it is
read once instead of three times. Several ranks also wait for their summed sample size and to compare their norms, both before
the step. ``--amp`` works as in fairseq.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from amos_fairseq.compat.failing_updates import stop_at_gradient

# Placeholder for a norm that has not been read, in the code of fairseq between clipping and the optimizer's step.
NOT_READ_YET = torch.zeros(())


def on_host(values: Any) -> Any:
    """Copy the tensors in nested lists and dictionaries to the CPU, in one transfer per device.

    A tensor with one element becomes a Python number; others keep shape and dtype. They are sent as float64, so that counts
    below 2^53 stay exact.
    """
    leaves, structure = tree_flatten(values)
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        if torch.is_tensor(leaf):
            by_device[leaf.device].append(index)
    for indices in by_device.values():
        for index, tensor in zip(indices, transfer([leaves[index] for index in indices]), strict=True):
            leaves[index] = tensor
    return tree_unflatten(leaves, structure)


def transfer(tensors: list[Tensor]) -> list[Tensor | float | int]:
    """Copy tensors of one device in one transfer, with few launches: those of a dtype are joined before they are converted."""
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(index)
    parts = [torch.cat([tensors[index].detach().reshape(-1) for index in group]) for group in by_dtype.values()]
    packed = fetch(torch.cat([part.double() for part in parts]))
    numbers, found, start = packed.tolist(), [None] * len(tensors), 0
    for index in (index for group in by_dtype.values() for index in group):
        tensor, end = tensors[index], start + tensors[index].numel()
        if end - start == 1:
            found[index] = numbers[start] if tensor.is_floating_point() else int(numbers[start])
        else:
            found[index] = packed[start:end].to(tensor.dtype).view(tensor.shape)
        start = end
    return found


def fetch(values: Tensor) -> Tensor:
    """Copy to the CPU. On one rank this is the only place where an update waits for its device."""
    return values.to("cpu", copy=True)


def log_gradient_norm(norm: float, clip_norm: float) -> None:
    """Log ``gnorm``, and in ``clip`` the share of clipped updates in percent, under fairseq's keys."""
    metrics.log_speed("ups", 1.0, priority=100, round=2)
    metrics.log_scalar("gnorm", norm, priority=400, round=3)
    if clip_norm > 0:
        metrics.log_scalar("clip", 100.0 if norm > clip_norm else 0.0, priority=500, round=1)


def read_fp16_norm_once(
    stock: Callable[..., Any], optimizer: Any, max_norm: float, aggregate_norm_fn: Any = None
) -> Tensor:
    """Clip the gradients of ``--fp16`` with one read of their norm."""
    if optimizer.scaler is None:
        return stock(optimizer, max_norm, aggregate_norm_fn)
    optimizer._sync_fp16_grads_to_fp32()
    norm = on_host(optimizer._multiply_factor * optimizer.fp32_optimizer.clip_grad_norm(0, aggregate_norm_fn))
    if norm > max_norm > 0.0:
        optimizer._multiply_factor *= max_norm / norm
    optimizer.scaler.check_overflow(norm)
    return torch.full((), norm)


def clip_without_reading(clip_grad_norm: Callable[..., Any], trainer: Trainer, clip_norm: float) -> Tensor:
    """Keep the norm on the device, and return a constant for the checks of fairseq's ``train_step``."""
    trainer.grad_norm_of_update = clip_grad_norm(trainer, clip_norm)
    return trainer.grad_norm_of_update if trainer.cfg.common.amp else NOT_READ_YET


def check_true_norms(check_grad_norms: Callable[..., Any], trainer: Trainer, grad_norm: Tensor) -> None:
    """Compare the norms that were kept on the device between ranks."""
    check_grad_norms(trainer, trainer.grad_norm_of_update if grad_norm is NOT_READ_YET else grad_norm)


def read_once_and_log(
    reduce_and_log_stats: Callable[..., Any],
    trainer: Trainer,
    logging_outputs: Any,
    sample_size: Any,
    grad_norm: Tensor | None = None,
) -> dict[str, Any]:
    """Read the statistics and the norm in one transfer, and end the run if the norm is not finite."""
    norm = trainer.grad_norm_of_update if grad_norm is NOT_READ_YET else grad_norm
    logging_outputs, sample_size, norm = on_host((logging_outputs, sample_size, norm))
    trainer.grad_norm_on_host = norm
    if norm is not None:
        if math.isfinite(norm):
            log_gradient_norm(norm, trainer.cfg.optimization.clip_norm)
        elif not trainer.cfg.common.amp:
            stop_at_gradient(trainer)
    return reduce_and_log_stats(trainer, logging_outputs, sample_size)
