"""Dropout whose masks cost a fraction of the time of PyTorch's on a CPU.

There a Bernoulli sample of PyTorch takes about 6 nanoseconds, more than the rest of the layer may need for the value. Here
four values share one random integer of 64 bits, from a generator of numpy that takes half of the time of PyTorch's own.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

# A value is dropped if its uniform 16-bit integer is among the lowest ones, so probabilities are multiples of 1 / LEVELS.
LEVELS = 2**16


def dropped_levels(probability: float) -> int:
    """Return how many of LEVELS equally likely integers drop a value: the nearest number that does not drop all values.

    The effective probability differs by at most 1 / (2 LEVELS) = 7.7e-6. :func:`keep_scale` uses the effective one, so the
    expectation is exact.
    """
    return min(round(probability * LEVELS), LEVELS - 1)


def keep_scale(probability: float) -> float:
    """Return 1 / (1 - p) for the effective probability p."""
    return LEVELS / (LEVELS - dropped_levels(probability))


def sample_keep_mask(shape: Sequence[int], probability: float) -> Tensor:
    """Return a bool tensor on the CPU, False where a value is dropped. PyTorch's default generator seeds each mask."""
    count = math.prod(shape)
    seed = torch.empty(2, dtype=torch.int64).random_().numpy()  # twice 63 bits
    raw = np.random.SFC64(seed).random_raw(max(1, (count + 3) // 4))  # all 64 bits are random
    # Uniform from -LEVELS / 2 to LEVELS / 2 - 1.
    integers = torch.frombuffer(raw, dtype=torch.int16)[:count].view(*shape)
    # Compared in place and narrowed as integers: a comparison that writes bool costs as much as the random integers.
    return integers.ge_(dropped_levels(probability) - LEVELS // 2).to(torch.uint8).view(torch.bool)


def apply_keep_mask(x: Tensor, keep_mask: Tensor) -> Tensor:
    """Return ``x`` where ``keep_mask`` is True, else 0. PyTorch's product with a bool tensor takes several times longer."""
    return keep_mask.view(torch.uint8).to(x.dtype).mul_(x)


class _CpuDropout(Function):
    @staticmethod
    def forward(ctx, x: Tensor, probability: float) -> Tensor:
        keep_mask = sample_keep_mask(x.shape, probability)
        ctx.save_for_backward(keep_mask)
        ctx.scale = keep_scale(probability)
        return apply_keep_mask(x, keep_mask).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (keep_mask,) = ctx.saved_tensors
        return apply_keep_mask(grad, keep_mask).mul_(ctx.scale), None


def dropout(x: Tensor, probability: float) -> Tensor:
    """Zero each value of ``x`` with a probability in [0, 1), and scale the others by 1 / (1 - p).

    On other devices, and under torch.compile, which fuses dropout with the operations around it, this is PyTorch's dropout.

    Args:
        x: any shape, floating point.
        probability: rounded on a CPU, see :func:`dropped_levels`.
    """
    if probability == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return functional.dropout(x, probability)
    return _CpuDropout.apply(x, probability)
