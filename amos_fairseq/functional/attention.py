"""Self-attention with a learned bias: the reference implementation, and the fastest one for each device; attention to keys
within a distance, in blocks.

Shapes: B sequences, T tokens, n blocks of w tokens, H heads, d width of a head.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout as torch_dropout
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from amos_fairseq.functional.cpu import cpu_attention
from amos_fairseq.functional.positions import Rotation, rotate, rotate_queries_and_keys

# Added to the score of a masked pair. Its exponential is exactly 0 beside any real score, and float16 can represent it. Unlike
# -inf it gives a query whose keys are all masked finite weights and gradients (which have no meaning).
MASKED_SCORE = -30_000.0

# CUDA's memory-efficient kernel requires rows of the mask to start at multiples of this number of elements. PyTorch would
# otherwise copy the mask in every layer.
MASK_ALIGNMENT = 8

FLASH_MAX_HEAD_WIDTH = 256
CUDNN_MAX_HEAD_WIDTH = 128
CUDNN_LENGTHS = 128  # and its multiples
TRITON_HEAD_WIDTHS = range(16, 129)
AMPERE, HOPPER = 8, 9  # major compute capabilities
HALF_PRECISION = (torch.float16, torch.bfloat16)

# Lengths from which blocks are used, in multiples of the largest distance. Forward and backward, w = 64, H = 6, d = 64, 4,096
# tokens, one busy core of an AMD EPYC (25 November 2026), all pairs and blocks: T = 512 in float32 343 and 218 milliseconds, in
# bfloat16 187 and 250; T = 1024 in float32 739 and 226, in bfloat16 354 and 274. GPUs: not run.
BLOCKS_FROM = 8
BLOCKS_FROM_IN_HALF_PRECISION_ON_A_CPU = 16

Backend = Literal["reference", "cpu", "cudnn", "flash", "efficient", "math", "triton", "varlen"]
# In the order in which PyTorch tries them: its flash kernel runs where PyTorch was built without cuDNN or refuses it.
SDPA_BACKENDS = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}


class AttentionBias(NamedTuple):
    """Terms that are added to the scores of every layer; None means zeros."""

    learned: Tensor | None = None  # [H,T,T], float32 or the dtype of the heads; its gradient has its dtype
    fixed: Tensor | None = None  # [B or 1, H or 1, T or 1, T]; must not require a gradient on a CPU


NO_BIAS = AttentionBias()


def masked_pairs(
    length: int, padding_mask: Tensor | None, side: str = "all", reach: int | None = None, *, device: torch.device
) -> Tensor | None:
    """Return True where a query must not attend to a key: [B or 1, 1, T or 1 (queries), T (keys)] bool; None: nowhere.

    Args:
        length: T.
        padding_mask: [B,T] bool, True at padding; None if there is none.
        side: attend to all keys, or to the "past" or "future" keys and the query's own position.
        reach: largest distance of a key; None for any.
    """
    padding = None if padding_mask is None else padding_mask[:, None, None, :]
    is_local = reach is not None and reach < length - 1
    if side == "all" and not is_local:
        return padding
    positions = torch.arange(length, device=device)
    ahead = positions - positions[:, None]  # [T,T], key position minus query position
    excluded = is_excluded(ahead, side, reach)[None, None]
    # A query that is padding may see no text; it always attends to itself.
    return excluded if padding is None else excluded | (padding & (ahead != 0))


def is_excluded(ahead: Tensor, side: str, reach: int | None) -> Tensor:
    """Return True where a key, ``ahead`` positions after its query, is on the wrong side or too far away: bool."""
    if side == "all":
        excluded = torch.zeros_like(ahead, dtype=torch.bool)
    else:
        excluded = ahead > 0 if side == "past" else ahead < 0
    return excluded if reach is None else excluded | (ahead.abs() > reach)


def scores_of_masked_pairs(masked: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to the scores: 0, or ``MASKED_SCORE`` at ``masked`` pairs."""
    return None if masked is None else masked.to(dtype) * MASKED_SCORE


class ToeplitzBias(NamedTuple):
    """The same terms for the backend ``triton``: one value per distance, and a rule for the masked pairs."""

    values: Tensor | None  # [H,2T-1] float32, contiguous, indexed by key - query + T - 1; None means zeros
    padding: Tensor | None  # [B,T] bool, True at keys that are not attended to
    side: str = "all"  # attend to all keys, or to the "past" or "future" keys and the query's own position


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_width: int,
    has_bias: bool,
    with_triton: bool = False,
    length: int = 1,
    dropout: float = 0.0,
    by_distance: bool = False,
) -> Backend:
    """Choose the attention implementation.

    Args:
        has_bias: whether anything is added to the scores: a learned bias, or a mask of padding or of one side.
        with_triton: the setting ``model.kernels=triton``.
        length: T.
        dropout: probability of dropping a weight in this call.
        by_distance: whether the keys of a query are a window of its sequence, or all of it, which ``varlen_attention``
            supports.

    device  dtype                       bias  backend
    cpu     any                         any   cpu         takes 0.4 to 0.7 of the time of PyTorch's, whose fused CPU kernel
                                                          supports neither dropout nor a bias with a gradient; torch.compile
                                                          cannot trace it and gets ``reference``
    cuda    float16, bfloat16           any   triton      if with_triton, for heads of 16 to 128: loads one value per
                                                          distance instead of a mask, and sums its gradient in the kernel;
                                                          float32 products need more registers than there are
    cuda    float16, bfloat16           no    varlen      if by_distance: packed or local, without dropout, for heads of up to
                                                          256, from PyTorch 2.11 on, which has windows (2.10 has the function
                                                          without them); not under autocast, where dtype is float32
    cuda    float16, bfloat16           no    cudnn       on Hopper and newer, for heads of up to 128, T a multiple of 128, no
                                                          dropout, without ``torch.use_deterministic_algorithms``; flash
                                                          where PyTorch has no cuDNN
    cuda    float16, bfloat16           no    flash       for heads of up to 256; like varlen, from compute capability 8.0 on
    cuda    float16, bfloat16, float32  any   efficient   the only fused kernel that computes the gradient of a bias
    cuda    others; heads with d % 8    any   math        not supported by any fused kernel
    other   any                         any   reference

    Where ``varlen`` is not available, packed sequences are padded for their attention, and local attention has a mask, also in
    blocks (``window_attention``; on a CPU these take PyTorch's own attention, because their queries and keys differ in
    number).

    Layers with attention dropout keep flash, as all of the base recipes do in training. cuDNN on Hopper takes 0.7 to 0.85 of
    the time of flash (https://arxiv.org/abs/2407.08608, figures 5 and 6, T = 512, d = 64; not timed here). Its limits, and why
    the table leaves them out:

    - a mask, and T % 128 == 64: NaN in the backward pass where log-sum-exps are below -88.7, with a mask (torch 2.11 to 2.13,
      pytorch issue 196678) and without one (seen with torch 2.11 on an H200). No mask was tried at multiples of 128;
    - T that is not a multiple of 128: invalid accesses to memory before cuDNN 9.15.1 (pytorch issue 169849);
    - dropout: its kernels round the probability to a multiple of 1/16, which PyTorch refuses only in newer versions (pytorch
      174245), so that 0.1 would be another value; with dropout 9.11 to 9.13 do not work;
    - its backward pass adds in any order: PyTorch refuses it under ``torch.use_deterministic_algorithms``.

    FlexAttention would sum the gradient of the bias over the sequences inside its kernel, but it has no dropout of the weights,
    and it sums with atomic additions, whose order changes from run to run, also under ``torch.use_deterministic_algorithms``;
    for packed sequences and windows it would compile a kernel, although ``varlen`` supports both. The efficient kernel writes
    [B,H,T,T] for one layer at a time.
    """
    if device.type == "cpu":
        return "reference" if torch.compiler.is_compiling() else "cpu"
    if device.type != "cuda":
        return "reference"
    if with_triton and head_width in TRITON_HEAD_WIDTHS and dtype in HALF_PRECISION:
        return "triton"
    if head_width % 8 or dtype not in (*HALF_PRECISION, torch.float32):
        return "math"
    if has_bias or dtype == torch.float32 or head_width > FLASH_MAX_HEAD_WIDTH:
        return "efficient"
    generation = compute_generation(device)
    if generation < AMPERE:
        return "efficient"
    if by_distance and dropout == 0 and has_varlen():
        return "varlen"
    suits_cudnn = dropout == 0 and head_width <= CUDNN_MAX_HEAD_WIDTH and length % CUDNN_LENGTHS == 0
    if suits_cudnn and not torch.are_deterministic_algorithms_enabled() and generation >= HOPPER:
        return "cudnn"
    return "flash"


@functools.cache
def has_varlen() -> bool:
    """Return whether PyTorch has attention for packed sequences with a window."""
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen")
    except ModuleNotFoundError:
        return False
    return "window_size" in inspect.signature(varlen.varlen_attn).parameters


def compute_generation(device: torch.device) -> int:
    """Return the first number of the compute capability of a CUDA device, such as ``AMPERE``."""
    # torch.compile replaces this call by its result; it cannot trace torch.cuda.get_device_capability.
    return torch.cuda.get_device_properties(device).major


def prepare_bias(bias: AttentionBias, device: torch.device, dtype: torch.dtype) -> AttentionBias:
    """Build the mask once, which ``fast_attention`` would otherwise do in every layer; only CUDA needs one.

    ``dtype`` is the dtype of the heads. (Under autocast the heads have another dtype, and every layer casts the mask.) On CUDA
    every layer gives the mask a gradient in ``dtype``, and autograd adds these in ``dtype``; the sums over the pairs of a
    distance, which follow, are in the dtype of the learned bias.
    """
    return AttentionBias(fixed=as_attention_mask(bias, dtype)) if device.type == "cuda" else bias


def as_attention_mask(bias: AttentionBias, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of ``bias`` in ``dtype``, [B or 1, H or 1, T or 1, T], in the layout that the fused kernels require.

    The last stride is 1 and all others are multiples of ``MASK_ALIGNMENT`` elements. Rows are padded in memory where T is
    not a multiple of it. A mask that already has this layout is returned unchanged.
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
    # A clone gets the strides of its shape, also for dimensions of size 1, which contiguous() leaves unchanged.
    return pad(mask, (0, missing))[..., :length] if missing else mask.clone(memory_format=torch.contiguous_format)


def reference_attention(heads: Tensor, bias: AttentionBias, dropout: float, rotation: Rotation | None = None) -> Tensor:
    """Compute softmax(q k^T / sqrt(d) + bias) v, each weight dropped with probability ``dropout``.

    Args:
        heads: [B,T,3,H,d], query, key and value of every head.
        bias: added to the scores.
        dropout: a probability below 1; the other weights are scaled by 1 / (1 - dropout).
        rotation: of q and k before their product; None for none.

    Returns:
        [B,T,H,d], in the dtype of ``heads``; the softmax is in float32 or above.
    """
    query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [B,H,T,d]
    if rotation is not None:
        query, key = rotate(query, rotation), rotate(key, rotation)
    scores = (query * query.size(-1) ** -0.5) @ key.transpose(-2, -1)
    for part in bias:
        scores = scores if part is None else scores + part  # float32 where the learned bias is
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (torch_dropout(weights, dropout) @ value).transpose(1, 2)


def fast_attention(heads: Tensor, bias: AttentionBias, dropout: float, rotation: Rotation | None = None) -> Tensor:
    """Compute ``reference_attention`` with the backend of ``choose_backend``.

    Prepare ``bias`` with ``prepare_bias`` when several layers use it.
    """
    has_bias = any(part is not None for part in bias)
    length, head_width = heads.size(1), heads.size(-1)
    backend = choose_backend(heads.device, heads.dtype, head_width, has_bias, length=length, dropout=dropout)
    if backend == "reference":
        return reference_attention(heads, bias, dropout, rotation)
    if backend == "cpu":
        return cpu_attention(heads, bias.learned, bias.fixed, dropout, rotation)
    if rotation is not None:
        heads = rotate_queries_and_keys(heads, rotation)
    # Unbind query, key and value without a permutation: autograd then stacks the three gradients to one packed [B,T,3,H,d],
    # in one kernel. After a permutation it would stack them in another order and copy the result.
    query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))  # each [B,H,T,d]
    return fused_attention(query, key, value, as_attention_mask(bias, heads.dtype), dropout, backend).transpose(1, 2)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, backend: Backend
) -> Tensor:
    """Call PyTorch's attention with one kernel: [B,H,T,d] each, and a mask from ``as_attention_mask`` -> [B,H,T,d].

    ``check_fused_attention`` of ``tests/helpers/fake_cuda.py`` states what each kernel accepts.
    """
    with sdpa_kernel(SDPA_BACKENDS[backend], set_priority=len(SDPA_BACKENDS[backend]) > 1):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def disentangled_attention(
    query: Tensor, key_value: Tensor, table: Tensor, rows: Tensor, masked: Tensor | None, dropout: Callable
) -> Tensor:
    """Compute softmax((q_i.k_j + q_i.kr_ij + k_j.qr_ij) / sqrt(3 d)) v_j (DeBERTa: He et al., 2020, Eq. 4).

    qr_ij and kr_ij are projections of the row of the relative position i - j. In the last term the paper prints j - i; the
    authors' code and its released weights have i - j in both.

    Scores are float32 or above, also under autocast: float16 ends at 65,504, which sums of large states exceed.

    Args:
        query: [B,T,H,d].
        key_value: [B,T,2,H,d].
        table: [R,2,H,d], qr and kr of each row.
        rows: [2T-1] int64, the row of each distance i - j, from T-1 down to 1-T.
        masked: [B or 1, 1, T or 1, T] bool, True where a query must not attend to a key; None: nowhere.
        dropout: of the weights, a function of them.

    Returns:
        [B,T,H,d], in the dtype of ``query``.
    """
    dtype, device_type = torch.promote_types(query.dtype, torch.float32), query.device.type
    is_real = device_type != "meta"  # which has no autocast
    key, value = key_value.transpose(1, 3).unbind(2)  # each [B,H,T,d]
    with torch.autocast(device_type, enabled=False) if is_real else contextlib.nullcontext():
        q, k, scale = query.transpose(1, 2).to(dtype), key.to(dtype), (3 * query.size(-1)) ** -0.5
        # A row for each distance, and windows instead of an index for each pair: the gradient has one order of summation.
        of_distances = embedding(rows, table.to(dtype).flatten(1)).view(-1, *table.shape[1:]) * scale
        relative_query, relative_key = of_distances.permute(1, 2, 3, 0)  # each [H,d,2T-1]
        of_keys = _windows(k @ relative_query.flip(-1)).transpose(-2, -1)
        scores = (q * scale) @ k.transpose(-2, -1) + _windows(q @ relative_key) + of_keys
        if masked is not None:
            scores = scores.masked_fill(masked, torch.finfo(dtype).min)
        weights = dropout(scores.softmax(-1)).to(value.dtype)
        return (weights @ value).transpose(1, 2)


def _windows(scores: Tensor) -> Tensor:
    """Return, for row t of [B,H,T,2T-1], its columns T-1-t to 2T-2-t: [B,H,T,T]."""
    batch, heads, length, width = scores.shape
    strides = (heads * length * width, length * width, width - 1, 1)
    return scores.contiguous().as_strided((batch, heads, length, length), strides, length - 1)


class PackedKeys(NamedTuple):
    """Which keys the queries of packed sequences attend to, for ``varlen_attention``."""

    starts: Tensor  # [B+1] int32, the first token of each sequence, and the number of all tokens
    longest: int  # number of tokens of the longest sequence, or more
    window: tuple[int, int]  # largest distance to a key before and after the query; -1 for any


def window_of(side: str, reach: int | None) -> tuple[int, int]:
    """Return the window of ``PackedKeys``; arguments as for ``masked_pairs``."""
    distance = -1 if reach is None else reach
    return (0 if side == "future" else distance, 0 if side == "past" else distance)


def varlen_attention(heads: Tensor, keys: PackedKeys) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v within each sequence and window: [N,3,H,d] float16 or bfloat16 -> [N,H,d].

    PyTorch's FlashAttention on CUDA. PyTorch 2.15 would prefer cuDNN's kernel on Hopper, whose backward pass adds in any order.
    """
    from torch.nn.attention.varlen import varlen_attn  # not in every PyTorch, see has_varlen()

    starts, longest, window = keys
    query, key, value = heads.unbind(1)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return varlen_attn(query, key, value, starts, starts, longest, longest, window_size=window)


def toeplitz_attention(heads: Tensor, bias: ToeplitzBias, dropout: float, positions: Tensor | None) -> Tensor:
    """Compute ``reference_attention`` in Triton for all queries, or only those at ``positions`` [B,M] int64.

    ``heads`` must be contiguous, float16 or bfloat16; the result is [B,T,H,d] or [B,M,H,d].

    Raises:
        ValueError: Triton is not installed.
    """
    # Imported here because only CUDA builds of PyTorch include Triton. torch.compile traces the statement.
    from amos_fairseq.functional.cuda.attention import triton_attention

    return triton_attention(heads, bias.values, bias.padding, bias.side, dropout, positions)


def runs_in_blocks(length: int, reach: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``window_attention`` is used for sequences of T = ``length`` tokens, rather than a T x T mask."""
    is_slow = device.type == "cpu" and dtype in HALF_PRECISION
    return reach > 0 and length >= reach * (BLOCKS_FROM_IN_HALF_PRECISION_ON_A_CPU if is_slow else BLOCKS_FROM)


def window_attention(heads: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v over the keys within the distance w of each query.

    Args:
        heads: [B,T,3,H,d], query, key and value of every head.
        mask: [Bn,1,w,3w] from ``block_mask``, added to the scores.
        dropout: probability of dropping a weight.

    Returns:
        [B,T,H,d].
    """
    B, T, _, H, d = heads.shape
    n, w = len(mask) // B, mask.size(2)
    query, key, value = pad(heads, (0, 0) * 3 + (0, n * w - T)).unbind(2)  # each [B,nw,H,d]
    query = query.view(B * n, w, H, d).transpose(1, 2)  # [Bn,H,w,d]
    # Each block of queries with the block before, its own, and the one after.
    key, value = (
        pad(part, (0, 0, 0, 0, w, w)).unfold(1, 3 * w, w).permute(0, 1, 2, 4, 3).reshape(B * n, H, 3 * w, d)
        for part in (key, value)
    )
    if heads.device.type == "cuda":
        backend = choose_backend(heads.device, heads.dtype, d, has_bias=True)
        mask = as_attention_mask(AttentionBias(fixed=mask), heads.dtype)
        attended = fused_attention(query, key, value, mask, dropout, backend)
    else:
        attended = scaled_dot_product_attention(query, key, value, mask.to(heads.dtype), dropout)
    return attended.transpose(1, 2).reshape(B, n * w, H, d)[:, :T]


def block_mask(
    length: int, reach: int, padding_mask: Tensor | None, side: str, num_sequences: int, like: Tensor
) -> Tensor:
    """Return what is added to the scores of each block of queries and the three blocks of keys around it: [Bn,1,w,3w].

    Args:
        length: T; n is T / w, rounded up.
        reach: w, the largest distance.
        padding_mask: [B,T] bool, True at padding; None if there is none.
        side: attend to "all" keys, or to the "past" or "future" keys and the query's own position.
        num_sequences: B.
        like: a tensor of the dtype and on the device of the result.
    """
    n, device = -(-length // reach), like.device
    queries = torch.arange(n * reach, device=device).view(n, reach, 1)
    keys = torch.arange(-reach, 2 * reach, device=device) + torch.arange(0, n * reach, reach, device=device)[:, None]
    ahead = keys[:, None] - queries  # [n,w,3w]
    is_outside = ((keys < 0) | (keys >= length))[:, None]  # [n,1,3w]
    masked = (is_excluded(ahead, side, reach) | is_outside)[None].expand(num_sequences, -1, -1, -1)  # [B,n,w,3w]
    if padding_mask is not None:
        padding = pad(padding_mask, (reach, n * reach - length + reach), value=True)
        masked = masked | padding.unfold(1, 3 * reach, reach).unsqueeze(2)
    masked = masked & (ahead != 0)  # padding, too, attends to itself
    return scores_of_masked_pairs(masked, like.dtype).reshape(num_sequences * n, 1, reach, 3 * reach)
