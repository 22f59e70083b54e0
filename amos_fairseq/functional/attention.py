"""Self-attention with a learned bias: by its definition, and by what is fastest on the device at hand.

Shapes: B sequences, T tokens, H heads, d width of a head.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout as torch_dropout
from torch.nn.functional import pad, scaled_dot_product_attention

from amos_fairseq.functional.cpu_attention import cpu_attention

# Added to the score of a pair that is forbidden: exp of it is exactly 0 beside any real score, float16 can hold it, and,
# unlike -inf, it leaves a query that may see nothing with finite weights and gradients (which mean nothing).
FORBIDDEN = -30_000.0

# CUDA's memory-efficient kernel reads rows of a mask whose starts are multiples of so many elements; PyTorch would copy
# others in every layer.
MASK_ALIGNMENT = 8

FLASH_WIDEST_HEAD = 256

Backend = Literal["definition", "by_hand", "flash", "efficient", "math"]


class AttentionBias(NamedTuple):
    """What is added to the scores of every layer; None stands for zeros."""

    learned: Tensor | None = None  # [H,T,T]
    fixed: Tensor | None = None  # [B or 1, H or 1, T or 1, T]; of a CPU it must not need a gradient


NO_BIAS = AttentionBias()


def choose_backend(device: torch.device, dtype: torch.dtype, head_width: int, has_bias: bool) -> Backend:
    """Which implementation :func:`fast_attention` takes.

    device  dtype                       bias  backend
    cpu     any                         any   by_hand     0.4 to 0.7 of the time of PyTorch's, whose fused kernel for it
                                                          knows neither dropout nor a bias with a gradient; under
                                                          torch.compile, which cannot trace it, the definition
    cuda    float16, bfloat16           no    flash       for heads of up to 256
    cuda    float16, bfloat16, float32  any   efficient   the fused kernel that gives a bias its gradient
    cuda    others; heads with d % 8    any   math        no fused kernel takes them
    other   any                         any   definition

    cuDNN is never taken: its backward pass gives NaN at T % 128 == 64 with a mask (torch 2.11 to 2.13). FlexAttention would
    sum the gradient of the bias over the sequences inside its kernel, but it has no dropout of the weights and sums by
    atomic additions, whose order changes from run to run. The efficient kernel writes [B,H,T,T] for one layer at a time.
    """
    if device.type == "cpu":
        return "definition" if torch.compiler.is_compiling() else "by_hand"
    if device.type != "cuda":
        return "definition"
    if head_width % 8 or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "math"
    if has_bias or dtype == torch.float32 or head_width > FLASH_WIDEST_HEAD:
        return "efficient"
    return "flash"


FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def prepare_bias(bias: AttentionBias, device: torch.device) -> AttentionBias:
    """What :func:`fast_attention` would otherwise do in every layer: on CUDA one mask, elsewhere nothing."""
    return AttentionBias(fixed=as_one_mask(bias)) if device.type == "cuda" else bias


def as_one_mask(bias: AttentionBias) -> Tensor | None:
    """The sum of ``bias``, [B or 1, H or 1, T or 1, T], with rows that start where the fused kernels want them."""
    given = [part for part in bias if part is not None]
    if not given or (bias.learned is None and bias.fixed.stride(-2) % MASK_ALIGNMENT == 0):
        return bias.fixed
    length = given[0].size(-1)
    added = pad(sum(given), (0, -length % MASK_ALIGNMENT))[..., :length]
    return added if added.ndim == 4 else added.unsqueeze(0)


def attention_by_definition(heads: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v, each weight dropped with probability ``dropout``.

    Args:
        heads: [B,T,3,H,d], query, key and value of every head.
        bias: added to the scores.
        dropout: a probability below 1; what is kept is scaled by 1 / (1 - dropout).

    Returns:
        [B,T,H,d], in the dtype of ``heads``; the softmax is in float32 or above.
    """
    query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B,H,T,d]
    scores = (query * query.size(-1) ** -0.5) @ key.transpose(-2, -1)  # [B,H,T,T]
    for part in bias:
        scores = scores if part is None else scores + part
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (torch_dropout(weights, dropout) @ value).transpose(1, 2)


def fast_attention(heads: Tensor, bias: AttentionBias, dropout: float) -> Tensor:
    """As :func:`attention_by_definition`, by :func:`choose_backend`; ``bias`` is best prepared by :func:`prepare_bias`."""
    has_bias = any(part is not None for part in bias)
    backend = choose_backend(heads.device, heads.dtype, heads.size(-1), has_bias)
    if backend == "definition":
        return attention_by_definition(heads, bias, dropout)
    if backend == "by_hand":
        return cpu_attention(heads, bias.learned, bias.fixed, dropout)
    query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B,H,T,d]
    with sdpa_kernel(FUSED[backend]):
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=as_one_mask(bias), dropout_p=dropout)
    return mixed.transpose(1, 2)
