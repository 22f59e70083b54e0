"""Dropout and self-attention on a CPU.

A Bernoulli sample of PyTorch takes about 6 nanoseconds there, more than the rest of a layer may need for the value. Here four
values share one random integer of 64 bits, from a generator of numpy that takes half of the time of PyTorch's own.

Attention has hand-written forward and backward passes, for a learned bias and dropout of the weights. Processor time on one
core of an AMD EPYC with AVX-512 (20 November 2026, torch 2.13), forward + backward with H=4, d=64, a learned bias and dropout
0.1, in milliseconds:

                     B=16, T=128            B=8, T=512
                     float32  bfloat16      float32  bfloat16
    PyTorch               29        29          286       277
    this function         20        13          137        98

Shapes: B sequences, n of them in a group, T tokens, H heads, d width of a head.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from amos_fairseq.functional.positions import Rotation, rotate

# A value is dropped if its uniform 16-bit integer is among the lowest ones, so probabilities are multiples of 1 / LEVELS.
LEVELS = 2**16

# Size of the scores that each thread processes at once, so that they stay in the core's cache for the operations after the
# product. Of 0.25 to 4 MiB, 1 and 2 were the fastest at T=128.
GROUP_BYTES = 2 * 2**20


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


def cpu_attention(
    heads: Tensor, learned: Tensor | None, fixed: Tensor | None, dropout: float, rotation: Rotation | None = None
) -> Tensor:
    """Compute softmax(q k^T / sqrt(d) + learned + fixed) v, each weight dropped with probability ``dropout``.

    Arguments and result are those of :func:`~amos_fairseq.functional.attention.reference_attention`. In bfloat16 the products
    round their results to bfloat16; softmax and sums are in float32.

    Args:
        heads: [B,T,3,H,d].
        learned: [H,T,T] or None, in the dtype of ``heads`` or float32. Its gradient is summed over the sequences in
            float32 (float64 for float64), group by group, without a [B,H,T,T] tensor, and has its dtype.
        fixed: [B or 1, H or 1, T or 1, T] or None; gets no gradient.
        rotation: of q and k before their product; gets no gradient.
    """
    return _CpuAttention.apply(heads, learned, fixed, dropout, rotation)


class _CpuAttention(Function):
    """Save the weights before dropout, and the keep mask, for the backward pass."""

    @staticmethod
    def forward(
        ctx, heads: Tensor, learned: Tensor | None, fixed: Tensor | None, dropout: float, rotation: Rotation | None
    ) -> Tensor:
        B, T, _, H, d = heads.shape
        *query_key, value = heads.permute(2, 0, 3, 1, 4).contiguous()  # each [B,H,T,d]
        query, key = query_key if rotation is None else (rotate(part, rotation) for part in query_key)
        learned_bias = None if learned is None else learned.to(heads.dtype)
        query *= d**-0.5  # in place: a copy but for B = T = 1, whose scores do not matter
        keep_mask = sample_keep_mask((B, H, T, T), dropout) if dropout else None
        needs_weights = any(ctx.needs_input_grad)
        all_weights = []
        out = heads.new_empty(B, T, H, d)
        # Sequences whose scores fit into the caches of all threads, one at least.
        size = max(1, GROUP_BYTES * torch.get_num_threads() // (H * T * T * heads.element_size()))
        ctx.groups = [slice(start, start + size) for start in range(0, B, size)]
        for group in ctx.groups:
            scores = query[group] @ key[group].transpose(-2, -1)  # [n,H,T,T]
            if learned_bias is not None:
                scores += learned_bias
            if fixed is not None:
                scores += fixed if fixed.size(0) == 1 else fixed[group]
            weights = scores.softmax(-1)
            if needs_weights:
                all_weights.append(weights)
            dropped = weights if keep_mask is None else apply_keep_mask(weights, keep_mask[group])
            out[group] = (dropped @ value[group]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, keep_mask, *all_weights)
        ctx.scale = keep_scale(dropout)
        ctx.rotation = rotation  # it gets no gradient and is changed nowhere
        ctx.learned_dtype = learned.dtype if ctx.needs_input_grad[1] else None
        return out.mul_(ctx.scale) if dropout else out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Compute the gradients. With P the weights, W the weights after dropout and scaling, G the gradient of W v:

        dv = W^T G,  dW = G v^T,  dscores = W * dW - P * rowsum(W * dW)
        """
        query, key, value, keep_mask, *all_weights = ctx.saved_tensors
        B, H, T, d = query.shape
        grad = grad.transpose(1, 2).mul(ctx.scale)  # [B,H,T,d]; applies the scale of W to all products with W at once
        grad_heads = query.new_empty(B, T, 3, H, d)
        grad_query, grad_key, grad_value = grad_heads.permute(2, 0, 3, 1, 4)  # each [B,H,T,d]
        grad_learned = None
        if ctx.learned_dtype is not None:
            grad_learned = query.new_zeros(H, T, T, dtype=torch.promote_types(query.dtype, torch.float32))
        for group, weights in zip(ctx.groups, all_weights, strict=True):
            grad_out = grad[group].contiguous()
            dropped = weights if keep_mask is None else apply_keep_mask(weights, keep_mask[group])
            grad_value[group] = dropped.transpose(-2, -1) @ grad_out
            grad_scores = (grad_out @ value[group].transpose(-2, -1)).mul_(dropped)  # [n,H,T,T]
            grad_scores.addcmul_(weights, grad_scores.sum(-1, keepdim=True), value=-1)
            if grad_learned is not None:
                grad_learned += grad_scores.sum(0, dtype=grad_learned.dtype)
            grad_query[group] = grad_scores @ key[group]
            grad_key[group] = grad_scores.transpose(-2, -1) @ query[group]
        grad_query *= d**-0.5
        if ctx.rotation is not None:
            for part in (grad_query, grad_key):
                part.copy_(rotate(part, ctx.rotation.inverse))
        return grad_heads, None if grad_learned is None else grad_learned.to(ctx.learned_dtype), None, None, None
