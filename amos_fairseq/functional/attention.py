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
TRITON_HEADS = range(16, 129)  # widths of a head that Triton's kernels take
HALF_PRECISION = (torch.float16, torch.bfloat16)

Backend = Literal["definition", "by_hand", "flash", "efficient", "math", "triton"]


class AttentionBias(NamedTuple):
    """What is added to the scores of every layer; None stands for zeros."""

    learned: Tensor | None = None  # [H,T,T], float32 or the dtype of the heads; its gradient has its dtype
    fixed: Tensor | None = None  # [B or 1, H or 1, T or 1, T]; of a CPU it must not need a gradient


NO_BIAS = AttentionBias()


class ToeplitzBias(NamedTuple):
    """The same for the backend ``triton``: one value for each distance, and the forbidden pairs by their rule."""

    values: Tensor | None  # [H,2T-1] float32, contiguous, by key - query + T - 1; None stands for zeros
    padding: Tensor | None  # [B,T] bool, True at keys that nothing attends to
    side: str = "all"  # of the keys, or those of the "past" or the "future", each with the query itself


def choose_backend(
    device: torch.device, dtype: torch.dtype, head_width: int, has_bias: bool, with_triton: bool = False
) -> Backend:
    """Which implementation of attention runs; ``with_triton`` is the setting ``model.kernels=triton``.

    device  dtype                       bias  backend
    cpu     any                         any   by_hand     0.4 to 0.7 of the time of PyTorch's, whose fused kernel for it
                                                          knows neither dropout nor a bias with a gradient; under
                                                          torch.compile, which cannot trace it, the definition
    cuda    float16, bfloat16           any   triton      with_triton, for heads of 16 to 128: reads a value per distance
                                                          in place of a mask, and sums its gradient in the kernel; for
                                                          float32 products, its registers do not suffice
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
    if with_triton and head_width in TRITON_HEADS and dtype in HALF_PRECISION:
        return "triton"
    if head_width % 8 or dtype not in (*HALF_PRECISION, torch.float32):
        return "math"
    if has_bias or dtype == torch.float32 or head_width > FLASH_WIDEST_HEAD:
        return "efficient"
    return "flash"


FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def prepare_bias(bias: AttentionBias, device: torch.device, dtype: torch.dtype) -> AttentionBias:
    """Do once what :func:`fast_attention` would otherwise repeat in every layer: on CUDA build one mask, elsewhere nothing.

    ``dtype`` is that of the heads (under autocast the heads have another one, and every layer casts the mask). On CUDA every
    layer gives the mask a gradient in ``dtype``, and autograd adds these in ``dtype``; the sums over the pairs of a distance,
    which follow, are in the dtype of the learned bias.
    """
    return AttentionBias(fixed=as_one_mask(bias, dtype)) if device.type == "cuda" else bias


def as_one_mask(bias: AttentionBias, dtype: torch.dtype) -> Tensor | None:
    """The sum of ``bias`` in ``dtype``, [B or 1, H or 1, T or 1, T], in the layout that the fused kernels require.

    The last stride is 1 and all others are multiples of :data:`MASK_ALIGNMENT` elements, at every T: rows are padded in
    memory where T is no multiple of it. A mask that has this layout is returned as it is.
    """
    parts = [part.to(dtype) for part in bias if part is not None]
    if not parts:
        return None
    mask = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    mask = mask if mask.ndim == 4 else mask.unsqueeze(0)
    if mask.stride(-1) == 1 and all(stride % MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.size(-1)
    missing = -length % MASK_ALIGNMENT
    # A clone has the strides of its shape, also for dimensions of size 1, which contiguous() leaves as they are.
    return pad(mask, (0, missing))[..., :length] if missing else mask.clone(memory_format=torch.contiguous_format)


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
        scores = scores if part is None else scores + part  # float32 where the learned bias is
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
    # Unbind query, key and value where they are: autograd then writes the three gradients into one packed [B,T,3,H,d]. After a
    # permutation it would stack them in another order and copy the result.
    query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))  # each [B,H,T,d]
    return fused_attention(query, key, value, as_one_mask(bias, heads.dtype), dropout, backend).transpose(1, 2)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, backend: Backend
) -> Tensor:
    """PyTorch's attention by one of its kernels alone: [B,H,T,d] each, a mask as :func:`as_one_mask` gives it -> [B,H,T,d].

    What each kernel accepts is stated in :func:`amos_fairseq.bench.fake_cuda.check_fused_attention`.
    """
    with sdpa_kernel(FUSED[backend]):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def toeplitz_attention(heads: Tensor, bias: ToeplitzBias, dropout: float, positions: Tensor | None) -> Tensor:
    """:func:`attention_by_definition` by Triton, of every query or of those at ``positions`` [B,M] int64 alone.

    Args:
        heads: [B,T,3,H,d], contiguous; float16 or bfloat16.
        bias: what is added to the scores.
        dropout: a probability below 1; the seed of the mask comes from PyTorch's generator.

    Returns:
        [B,T,H,d] or [B,M,H,d], in the dtype of ``heads``.

    Raises:
        ValueError: Triton is not installed.
    """
    # Imported here, because only CUDA builds of PyTorch bring Triton along; torch.compile traces the statement.
    from amos_fairseq.functional.cuda.attention import triton_attention

    return triton_attention(heads, bias.values, bias.padding, bias.side, dropout, positions)
