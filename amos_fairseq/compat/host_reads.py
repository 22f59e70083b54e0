"""An update copies everything that the host needs from the device in one transfer, after all its work has been queued.

Stock fairseq reads the norm of the gradient three times before the optimizer's step and once behind it, then each
statistic by itself: two dozen times the host waits until the device has nothing to do, and the device then waits for the
host. Here clipping stays on the device, and the norm is read with the statistics, behind the step. A norm that is not
finite still ends the run (:mod:`amos_fairseq.compat.non_finite`), with weights that are not saved.

An update of AMOS waits once, in place of 23 times. ``--fp16`` needs the norm before the step, for its loss scale: it is
read there, once instead of three times. Several ranks wait for their summed sample size and to compare their norms, both
before the step, and ``--amp`` keeps fairseq's way.
"""

import functools
import math
from collections import defaultdict
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin
from fairseq.trainer import Trainer
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from amos_fairseq.compat.non_finite import stop_at_gradient

# In place of a norm that was not read: what fairseq looks at between clipping and the optimizer's step.
NOT_READ_YET = torch.zeros(())


def on_host(values: Any) -> Any:
    """The same nest of lists and dictionaries with its tensors on the CPU, from each device in one transfer.

    A tensor of one element becomes a Python number; others keep shape and dtype. They travel as float64, so that counts
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
    """Tensors of one device by one copy; a few launches, since those of a dtype are joined before they are converted."""
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
    """A copy on the CPU. With one rank this is the only place where an update waits for its device."""
    return values.to("cpu", copy=True)


def log_gradient_norm(norm: float, clip_norm: float) -> None:
    """``gnorm``, and in ``clip`` the share of updates that were clipped, in percent: fairseq's keys, as numbers."""
    metrics.log_speed("ups", 1.0, priority=100, round=2)
    metrics.log_scalar("gnorm", norm, priority=400, round=3)
    if clip_norm > 0:
        metrics.log_scalar("clip", 100.0 if norm > clip_norm else 0.0, priority=500, round=1)


def _clip_with_one_read(stock: Any) -> Any:
    @functools.wraps(stock)
    def clip_grad_norm(self: Any, max_norm: float, aggregate_norm_fn: Any = None) -> Tensor:
        if self.scaler is None:
            return stock(self, max_norm, aggregate_norm_fn)
        self._sync_fp16_grads_to_fp32()
        norm = on_host(self._multiply_factor * self.fp32_optimizer.clip_grad_norm(0, aggregate_norm_fn))
        if norm > max_norm > 0.0:
            self._multiply_factor *= max_norm / norm
        self.scaler.check_overflow(norm)
        return torch.full((), norm)

    return clip_grad_norm


def apply() -> None:
    """Call after :mod:`amos_fairseq.compat.non_finite` and :mod:`amos_fairseq.compat.distribution`: it wraps theirs."""
    _FP16OptimizerMixin.clip_grad_norm = _clip_with_one_read(_FP16OptimizerMixin.clip_grad_norm)
    clip_grad_norm, check_grad_norms = Trainer.clip_grad_norm, Trainer._check_grad_norms
    reduce_and_log_stats = Trainer._reduce_and_log_stats

    @functools.wraps(clip_grad_norm)
    def clip_without_reading(self: Trainer, clip_norm: float) -> Tensor:
        self.grad_norm_of_update = clip_grad_norm(self, clip_norm)
        return self.grad_norm_of_update if self.cfg.common.amp else NOT_READ_YET

    @functools.wraps(check_grad_norms)
    def check_the_true_norms(self: Trainer, grad_norm: Tensor) -> None:
        check_grad_norms(self, self.grad_norm_of_update if grad_norm is NOT_READ_YET else grad_norm)

    @functools.wraps(reduce_and_log_stats)
    def read_once_and_log(
        self: Trainer, logging_outputs: Any, sample_size: Any, grad_norm: Tensor | None = None
    ) -> dict[str, Any]:
        norm = self.grad_norm_of_update if grad_norm is NOT_READ_YET else grad_norm
        logging_outputs, sample_size, norm = on_host((logging_outputs, sample_size, norm))
        if norm is not None:
            if math.isfinite(norm):
                log_gradient_norm(norm, self.cfg.optimization.clip_norm)
            elif not self.cfg.common.amp:
                stop_at_gradient(self)
        return reduce_and_log_stats(self, logging_outputs, sample_size)

    Trainer.clip_grad_norm = clip_without_reading
    Trainer._check_grad_norms = check_the_true_norms
    Trainer._reduce_and_log_stats = read_once_and_log
