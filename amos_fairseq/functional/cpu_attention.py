"""Self-attention on a CPU, forward and backward by hand, so that a bias may learn and weights may be dropped.

Processor time on one core of an AMD EPYC with AVX-512 (20 November 2026, torch 2.13), forward + backward with H=4, d=64, a
learned bias and dropout 0.1, in milliseconds:

              B=16, T=128            B=8, T=512
              float32  bfloat16      float32  bfloat16
    PyTorch        29        29          286       277
    here           20        13          137        98

Shapes: B sequences, n of them in a group, T tokens, H heads, d width of a head.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from amos_fairseq.functional.dropout import draw_kept, scale_of_kept, zero_dropped

# The scores of so many bytes are worked on at once for each thread, so that what follows the product finds them in the
# core's cache: of 0.25 to 4 MiB, 1 and 2 were the fastest at T=128.
GROUP_BYTES = 2 * 2**20


def cpu_attention(heads: Tensor, learned: Tensor | None, fixed: Tensor | None, dropout: float) -> Tensor:
    """softmax(q k^T / sqrt(d) + learned + fixed) v, each weight dropped with probability ``dropout``.

    Args:
        heads: [B,T,3,H,d], query, key and value of every head.
        learned: [H,T,T] or None, in the dtype of ``heads`` or float32. Its gradient is summed over the sequences in
            float32 (float64 for float64), group by group, so no [B,H,T,T] is written for it, and has its dtype.
        fixed: [B or 1, H or 1, T or 1, T] or None; gets no gradient.
        dropout: a probability below 1; what is kept is scaled by 1 / (1 - dropout).

    Returns:
        [B,T,H,d]. In bfloat16 the products round their results to it; softmax and sums are in float32.
    """
    return _CpuAttention.apply(heads, learned, fixed, dropout)


class _CpuAttention(Function):
    """For the backward pass it keeps the weights before dropout and a bool of each that says whether it was kept."""

    @staticmethod
    def forward(ctx, heads: Tensor, learned: Tensor | None, fixed: Tensor | None, dropout: float) -> Tensor:
        B, T, _, H, d = heads.shape
        query, key, value = heads.permute(2, 0, 3, 1, 4).contiguous()  # each [B,H,T,d]
        added = None if learned is None else learned.to(heads.dtype)
        query *= d**-0.5
        kept = draw_kept((B, H, T, T), dropout) if dropout else None
        needs_weights = any(ctx.needs_input_grad)
        all_weights = []
        mixed = heads.new_empty(B, T, H, d)
        ctx.groups = sequence_groups(B, H * T * T * heads.element_size())
        for group in ctx.groups:
            scores = query[group] @ key[group].transpose(-2, -1)  # [n,H,T,T]
            if added is not None:
                scores += added
            if fixed is not None:
                scores += fixed if fixed.size(0) == 1 else fixed[group]
            weights = scores.softmax(-1)
            if needs_weights:
                all_weights.append(weights)
            used = weights if kept is None else zero_dropped(weights, kept[group])
            mixed[group] = (used @ value[group]).transpose(1, 2)
        ctx.save_for_backward(query, key, value, kept, *all_weights)
        ctx.scale = scale_of_kept(dropout)
        ctx.learned_dtype = learned.dtype if ctx.needs_input_grad[1] else None
        return mixed.mul_(ctx.scale) if dropout else mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """With P the weights, W those that are left and scaled, G the gradient of W v:

        dv = W^T G,  dW = G v^T,  dscores = W * dW - P * rowsum(W * dW)
        """
        query, key, value, kept, *all_weights = ctx.saved_tensors
        B, H, T, d = query.shape
        grad = grad.transpose(1, 2).mul(ctx.scale)  # [B,H,T,d]; the scale of W, once for all that W is multiplied with
        grad_heads = query.new_empty(B, T, 3, H, d)
        grad_query, grad_key, grad_value = grad_heads.permute(2, 0, 3, 1, 4)  # each [B,H,T,d]
        grad_learned = None
        if ctx.learned_dtype is not None:
            grad_learned = query.new_zeros(H, T, T, dtype=torch.promote_types(query.dtype, torch.float32))
        for group, weights in zip(ctx.groups, all_weights, strict=True):
            grad_mixed = grad[group].contiguous()
            used = weights if kept is None else zero_dropped(weights, kept[group])
            grad_value[group] = used.transpose(-2, -1) @ grad_mixed
            grad_scores = (grad_mixed @ value[group].transpose(-2, -1)).mul_(used)  # [n,H,T,T]
            grad_scores.addcmul_(weights, grad_scores.sum(-1, keepdim=True), value=-1)
            if grad_learned is not None:
                grad_learned += grad_scores.sum(0, dtype=grad_learned.dtype)
            grad_query[group] = grad_scores @ key[group]
            grad_key[group] = grad_scores.transpose(-2, -1) @ query[group]
        grad_query *= d**-0.5
        return grad_heads, None if grad_learned is None else grad_learned.to(ctx.learned_dtype), None, None


def sequence_groups(num_sequences: int, bytes_per_sequence: int) -> list[slice]:
    """Slices of the sequences whose scores fit into the caches of all threads, one sequence at least."""
    size = max(1, GROUP_BYTES * torch.get_num_threads() // bytes_per_sequence)
    return [slice(start, start + size) for start in range(0, num_sequences, size)]
