"""Read everything that the host needs from the device in one transfer per update, after all work has been queued.

Stock fairseq reads the gradient norm three times before the optimizer's step and once after it, then each statistic
separately: two dozen times the host waits until the device is idle, and the device then waits for the host. Here clipping
stays on the device, and the norm is read with the statistics, after the step. A norm that is not finite still ends the run
(:mod:`amos_fairseq.run.health`), with weights that are not saved.

``--fp16`` needs the norm before the step for its loss scale: there it is read once more. Several ranks also wait for their
summed sample size and to compare their norms, both before the step.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Stands for a norm that has not been read, in the code of fairseq between clipping and the optimizer's step.
NOT_READ_YET = torch.zeros(())


def on_host(values: Any) -> Any:
    """Copy the tensors in nested lists and dictionaries to the CPU, in one transfer per device, as float64: counts below 2^53
    stay exact. A tensor with one element becomes a Python number; others keep shape and dtype."""
    joined, layout = join(values)
    return split([fetch(tensor) for tensor in joined], layout)


class Layout(NamedTuple):
    """Where :func:`join` has put the tensors of nested values."""

    leaves: list[Any]  # a tensor's is its shape and dtype
    structure: TreeSpec
    indices_by_device: list[list[int]]  # positions in the leaves, in the order in which a device's are joined


def join(values: Any) -> tuple[list[Tensor], Layout]:
    """Return all tensors in ``values`` as one float64 vector per device, which stays there, and their layout."""
    leaves, structure = tree_flatten(values)
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        if torch.is_tensor(leaf):
            by_device[leaf.device].append(index)
    joined = []
    for indices in by_device.values():
        indices.sort(key=lambda index: str(leaves[index].dtype))  # of one dtype: joined and converted in two launches
        flat = [leaves[index].detach().reshape(-1) for index in indices]
        by_dtype = itertools.groupby(flat, key=lambda tensor: tensor.dtype)
        joined.append(torch.cat([torch.cat(list(tensors)).double() for _, tensors in by_dtype]))
    leaves = [(leaf.shape, leaf.dtype) if torch.is_tensor(leaf) else leaf for leaf in leaves]
    return joined, Layout(leaves, structure, list(by_device.values()))


def split(joined: list[Tensor], layout: Layout) -> Any:
    """Return the values of :func:`join` from its vectors on the CPU."""
    leaves = list(layout.leaves)
    for vector, indices in zip(joined, layout.indices_by_device, strict=True):
        numbers, start = vector.tolist(), 0
        for index in indices:
            shape, dtype = layout.leaves[index]
            end = start + shape.numel()
            if end - start == 1:
                leaves[index] = numbers[start] if dtype.is_floating_point else int(numbers[start])
            else:
                leaves[index] = vector[start:end].to(dtype).view(shape)
            start = end
    return tree_unflatten(leaves, layout.structure)


def fetch(values: Tensor) -> Tensor:
    """Copy to the CPU. On one rank this is the only place where an update waits for its device."""
    return values.to("cpu", copy=True)


def log_gradient_norm(trainer: Trainer, norm: float | None) -> None:
    """Log ``gnorm``, and in ``clip`` the share of clipped updates in percent, under fairseq's keys."""
    if norm is None or not math.isfinite(norm):
        return
    metrics.log_speed("ups", 1.0, priority=100, round=2)
    metrics.log_scalar("gnorm", norm, priority=400, round=3)
    if (clip_norm := trainer.cfg.optimization.clip_norm) > 0:
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


def keep_norm(norm: Tensor) -> Tensor:
    """Return :data:`NOT_READ_YET`, which passes the checks of fairseq's ``train_step`` and has the norm."""
    NOT_READ_YET.on_device = norm
    return NOT_READ_YET


def true_norm(norm: Tensor | None) -> Tensor | None:
    """Return the norm on its device in place of the constant."""
    return norm.on_device if norm is NOT_READ_YET else norm
