"""Self-attention with a learned Toeplitz bias in Triton, forward and backward, without a tensor of the size of the scores.

    O_i = sum_j D_ij P_ij v_j,   P_ij = softmax_j(q_i . k_j / sqrt(d) + c_(j - i)),   D_ij = 0 or 1 / (1 - p)

with one value c per head and distance j - i. The forward pass keeps O and the log of the softmax's denominator of every
query (FlashAttention-2, Dao 2023, algorithm 1). The backward pass computes the scores again, once for each gradient:

    dP_ij = D_ij dO_i . v_j,   dS_ij = P_ij (dP_ij - dO_i . O_i)
    dq_i = sum_j dS_ij k_j / sqrt(d),   dk_j = sum_i dS_ij q_i / sqrt(d),   dv_j = sum_i D_ij P_ij dO_i
    dc_w = sum over sequences and pairs with j - i = w of dS_ij

Every sum runs in a fixed order, in float32, so that the same inputs give the same bits; there are no atomic additions.

Shapes: B sequences, T tokens, M queries (T, or some positions of every sequence), H heads, d width of a head.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# Score of a pair that must not be seen; see FORBIDDEN in functional/attention.py.
FORBIDDEN = tl.constexpr(-30_000.0)
LOG2_E = tl.constexpr(math.log2(math.e))
# Which keys a query sees.
ALL, PAST, FUTURE = 0, 1, 2
SIDES = {"all": ALL, "past": PAST, "future": FUTURE}

# Triton's interpreter multiplies bfloat16 matrices wrongly (version 3.6), so that it has to multiply them in float32.
IS_INTERPRETED = triton.knobs.runtime.interpret if hasattr(triton, "knobs") else False


@triton.jit
def mix(x):
    """A bijection of 32 bits whose output bits each depend on all input bits (two rounds of multiply and xor-shift)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(seed, head, queries, keys, drop_below):
    """[BLOCK_M,BLOCK_N]: whether a weight is kept. A function of the seed, the head of the batch, query and key alone."""
    of_head = mix(seed.to(tl.uint32) ^ mix(head.to(tl.uint32) + 0x9E3779B9))
    of_query = mix(queries.to(tl.uint32) ^ of_head)
    bits = mix(of_query[:, None] + keys.to(tl.uint32)[None, :] * 0x9E3779B1)
    return bits >= drop_below.to(tl.uint32)


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """a b, summed in float32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_rows(base, rows, num_rows, row_stride, columns, D):
    """[len(rows),len(columns)], 0 beyond ``num_rows`` rows and D columns."""
    inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def scores_of(
    query, key, queries, keys, bias, padding, scale, T,
    HAS_BIAS: tl.constexpr, HAS_PADDING: tl.constexpr, SIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK_M,BLOCK_N] float32 in units of log 2, and where they carry a gradient."""
    scores = product(query, tl.trans(key), UPCAST) * scale
    ahead = keys[None, :] - queries[:, None]
    inside = (keys < T)[None, :] & (queries < T)[:, None]
    if HAS_BIAS:
        scores += tl.load(bias + ahead + (T - 1), mask=inside, other=0.0)
    seen = inside
    if SIDE == 1:
        seen = seen & (ahead <= 0)
    if SIDE == 2:
        seen = seen & (ahead >= 0)
    if HAS_PADDING:
        is_padding = tl.load(padding + keys, mask=keys < T, other=1) != 0
        hidden = is_padding[None, :]
        if SIDE != 0:  # padding behind a text has nothing on its side but itself to see
            hidden = hidden & (ahead != 0)
        seen = seen & (hidden == 0)
    scores = tl.where(seen, scores, FORBIDDEN) * LOG2_E
    return tl.where((keys < T)[None, :], scores, -float("inf")), seen


@triton.jit
def key_range(
    first_query, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T, SIDE: tl.constexpr, HAS_POSITIONS: tl.constexpr
):
    """Keys that a block of consecutive queries sees; where there may be padding a row must not be left without keys."""
    low, high = 0, T
    if not HAS_POSITIONS:
        if SIDE == 1:
            high = tl.minimum(T, first_query + BLOCK_M)
        if SIDE == 2:
            low = (first_query // BLOCK_N) * BLOCK_N
    return low, high


@triton.jit
def forward_kernel(
    heads, bias, padding, seed, positions, out, lse, scale, keep_scale, drop_below, T, M, H, D,
    HAS_BIAS: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_POSITIONS: tl.constexpr, SIDE: tl.constexpr,
    DROPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: programs (blocks of M, B H)."""
    row, head_of_batch = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    b, h = head_of_batch // H, head_of_batch % H
    columns = tl.arange(0, BLOCK_D)
    row_stride = 3 * H * D
    base = heads + b.to(tl.int64) * T * row_stride + h * D
    queries = row
    if HAS_POSITIONS:
        queries = tl.load(positions + b.to(tl.int64) * M + row, mask=row < M, other=0).to(tl.int32)
    query = load_rows(base, tl.where(row < M, queries, T), T, row_stride, columns, D)
    if DROPS:
        seed_of_call = tl.load(seed)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, high = key_range(tl.program_id(0) * BLOCK_M, BLOCK_M, BLOCK_N, T, SIDE, HAS_POSITIONS)
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        key = load_rows(base + H * D, keys, T, row_stride, columns, D)
        value = load_rows(base + 2 * H * D, keys, T, row_stride, columns, D)
        scores, _ = scores_of(
            query, key, queries, keys, bias + h * (2 * T - 1), padding + b.to(tl.int64) * T, scale, T,
            HAS_BIAS, HAS_PADDING, SIDE, UPCAST,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        if DROPS:
            weights = tl.where(kept(seed_of_call, head_of_batch, queries, keys, drop_below), weights, 0.0)
        mixed = mixed * shrink[:, None] + product(weights.to(value.dtype), value, UPCAST)
        largest = new_largest
    mixed = mixed * (keep_scale / total)[:, None]
    inside = (row < M)[:, None] & (columns < D)[None, :]
    at = out + (b.to(tl.int64) * M + row)[:, None] * (H * D) + h * D + columns[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head_of_batch.to(tl.int64) * M + row, largest + tl.log2(total), mask=row < M)


@triton.jit
def gradient_of_scores(
    query, key, value, grad, queries, keys, lse, delta, bias, padding, seed, head_of_batch, scale, keep_scale, drop_below, T,
    HAS_BIAS: tl.constexpr, HAS_PADDING: tl.constexpr, SIDE: tl.constexpr, DROPS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dS [BLOCK_M,BLOCK_N] float32, and the weights that were used, D P."""
    scores, seen = scores_of(
        query, key, queries, keys, bias, padding, scale, T, HAS_BIAS, HAS_PADDING, SIDE, UPCAST
    )  # fmt: skip
    weights = tl.exp2(scores - lse[:, None])
    by_weights = product(grad, tl.trans(value), UPCAST) * keep_scale
    used = weights * keep_scale
    if DROPS:
        keep = kept(seed, head_of_batch, queries, keys, drop_below)
        by_weights = tl.where(keep, by_weights, 0.0)
        used = tl.where(keep, used, 0.0)
    return tl.where(seen, weights * (by_weights - delta[:, None]), 0.0), used


@triton.jit
def query_kernel(
    heads, bias, padding, seed, positions, grad, lse, delta, grad_query, scores_out, scale, keep_scale, drop_below,
    T, M, H, D, out_stride,
    HAS_BIAS: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_POSITIONS: tl.constexpr, SIDE: tl.constexpr,
    DROPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head; at given positions also dS, for the gradient of the bias."""
    row, head_of_batch = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    b, h = head_of_batch // H, head_of_batch % H
    columns = tl.arange(0, BLOCK_D)
    row_stride = 3 * H * D
    base = heads + b.to(tl.int64) * T * row_stride + h * D
    queries = row
    if HAS_POSITIONS:
        queries = tl.load(positions + b.to(tl.int64) * M + row, mask=row < M, other=0).to(tl.int32)
    query = load_rows(base, tl.where(row < M, queries, T), T, row_stride, columns, D)
    by_out = load_rows(grad + b.to(tl.int64) * M * H * D + h * D, row, M, H * D, columns, D)
    of_rows = head_of_batch.to(tl.int64) * M + row
    lse_of = tl.load(lse + of_rows, mask=row < M, other=float("inf"))
    delta_of = tl.load(delta + of_rows, mask=row < M, other=0.0)
    seed_of_call = tl.load(seed)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, high = key_range(tl.program_id(0) * BLOCK_M, BLOCK_M, BLOCK_N, T, SIDE, HAS_POSITIONS)
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        key = load_rows(base + H * D, keys, T, row_stride, columns, D)
        value = load_rows(base + 2 * H * D, keys, T, row_stride, columns, D)
        by_scores, _ = gradient_of_scores(
            query, key, value, by_out, queries, keys, lse_of, delta_of, bias + h * (2 * T - 1),
            padding + b.to(tl.int64) * T, seed_of_call, head_of_batch, scale, keep_scale, drop_below, T,
            HAS_BIAS, HAS_PADDING, SIDE, DROPS, UPCAST,
        )  # fmt: skip
        if HAS_POSITIONS and HAS_BIAS:
            at = scores_out + of_rows[:, None] * T + keys[None, :]
            tl.store(at, by_scores, mask=(row < M)[:, None] & (keys < T)[None, :])
        result += product(by_scores.to(key.dtype), key, UPCAST)
    at = grad_query + (b.to(tl.int64) * M + row)[:, None] * out_stride + h * D + columns[None, :]
    tl.store(at, (result * scale).to(grad_query.dtype.element_ty), mask=(row < M)[:, None] & (columns < D)[None, :])


@triton.jit
def key_value_kernel(
    heads, bias, padding, seed, positions, grad, lse, delta, grad_heads, scale, keep_scale, drop_below, T, M, H, D,
    HAS_BIAS: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_POSITIONS: tl.constexpr, SIDE: tl.constexpr,
    DROPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys of one head, into the packed gradient."""
    keys, head_of_batch = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1)
    b, h = head_of_batch // H, head_of_batch % H
    columns = tl.arange(0, BLOCK_D)
    row_stride = 3 * H * D
    base = heads + b.to(tl.int64) * T * row_stride + h * D
    key = load_rows(base + H * D, keys, T, row_stride, columns, D)
    value = load_rows(base + 2 * H * D, keys, T, row_stride, columns, D)
    seed_of_call = tl.load(seed)
    by_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    by_value = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    low, high = 0, M
    if not HAS_POSITIONS:
        if SIDE == 1:
            low = (tl.program_id(0) * BLOCK_N // BLOCK_M) * BLOCK_M
        if SIDE == 2:
            high = tl.minimum(M, (tl.program_id(0) + 1) * BLOCK_N)
    for start in range(low, high, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        queries = row
        if HAS_POSITIONS:
            queries = tl.load(positions + b.to(tl.int64) * M + row, mask=row < M, other=0).to(tl.int32)
        query = load_rows(base, tl.where(row < M, queries, T), T, row_stride, columns, D)
        by_out = load_rows(grad + b.to(tl.int64) * M * H * D + h * D, row, M, H * D, columns, D)
        of_rows = head_of_batch.to(tl.int64) * M + row
        lse_of = tl.load(lse + of_rows, mask=row < M, other=float("inf"))
        delta_of = tl.load(delta + of_rows, mask=row < M, other=0.0)
        by_scores, used = gradient_of_scores(
            query, key, value, by_out, queries, keys, lse_of, delta_of, bias + h * (2 * T - 1),
            padding + b.to(tl.int64) * T, seed_of_call, head_of_batch, scale, keep_scale, drop_below, T,
            HAS_BIAS, HAS_PADDING, SIDE, DROPS, UPCAST,
        )  # fmt: skip
        by_value += product(tl.trans(used.to(by_out.dtype)), by_out, UPCAST)
        by_key += product(tl.trans(by_scores.to(query.dtype)), query, UPCAST)
    at = grad_heads + (b.to(tl.int64) * T + keys)[:, None] * row_stride + h * D + columns[None, :]
    inside = (keys < T)[:, None] & (columns < D)[None, :]
    tl.store(at + H * D, (by_key * scale).to(grad_heads.dtype.element_ty), mask=inside)
    tl.store(at + 2 * H * D, by_value.to(grad_heads.dtype.element_ty), mask=inside)


@triton.jit
def bias_kernel(
    heads, bias, padding, seed, grad, lse, delta, tiles, scale, keep_scale, drop_below, B, T, H, D, sequences_each,
    HAS_PADDING: tl.constexpr, SIDE: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """dS summed over sequences and over the tiles of one diagonal of tiles, which have equal distances.

    Programs (diagonals of tiles, H, groups of sequences); each writes one tile [BLOCK,BLOCK] float32.
    """
    num_blocks = tl.cdiv(T, BLOCK)
    shift = tl.program_id(0) - (num_blocks - 1)  # key block minus query block
    h, group = tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, BLOCK_D)
    row_stride = 3 * H * D
    seed_of_call = tl.load(seed)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for b in range(group * sequences_each, tl.minimum(B, (group + 1) * sequences_each)):
        sequence = tl.full([], 0, tl.int64) + b  # a loop counts in 32 bits
        base = heads + sequence * T * row_stride + h * D
        for block in range(tl.maximum(0, -shift), tl.minimum(num_blocks, num_blocks - shift)):
            queries = block * BLOCK + tl.arange(0, BLOCK)
            keys = (block + shift) * BLOCK + tl.arange(0, BLOCK)
            query = load_rows(base, queries, T, row_stride, columns, D)
            key = load_rows(base + H * D, keys, T, row_stride, columns, D)
            value = load_rows(base + 2 * H * D, keys, T, row_stride, columns, D)
            by_out = load_rows(grad + sequence * T * H * D + h * D, queries, T, H * D, columns, D)
            head_of_batch = b * H + h
            of_rows = (sequence * H + h) * T + queries
            lse_of = tl.load(lse + of_rows, mask=queries < T, other=float("inf"))
            delta_of = tl.load(delta + of_rows, mask=queries < T, other=0.0)
            by_scores, _ = gradient_of_scores(
                query, key, value, by_out, queries, keys, lse_of, delta_of, bias + h * (2 * T - 1),
                padding + sequence * T, seed_of_call, head_of_batch, scale, keep_scale, drop_below, T,
                True, HAS_PADDING, SIDE, DROPS, UPCAST,
            )  # fmt: skip
            total += by_scores
    rows = tl.arange(0, BLOCK)
    tile = (group * H + h) * (2 * num_blocks - 1) + tl.program_id(0)
    tl.store(tiles + tile.to(tl.int64) * BLOCK * BLOCK + rows[:, None] * BLOCK + rows[None, :], total)


@triton.jit
def window_kernel(scores, positions, sums, B, M, T, H, rows_each, BLOCK: tl.constexpr):
    """dS [B,H,M,T] of queries at given positions, summed by distance: programs (blocks of 2T-1, H, groups of rows)."""
    distance, h, group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) - (T - 1), tl.program_id(1), tl.program_id(2)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(group * rows_each, tl.minimum(B * M, (group + 1) * rows_each)):
        b, m = (tl.full([], 0, tl.int64) + row) // M, row % M
        keys = distance + tl.load(positions + row).to(tl.int32)
        at = scores + ((b * H + h) * M + m) * T + keys
        total += tl.load(at, mask=(keys >= 0) & (keys < T), other=0.0)
    at = sums + (group * H + h) * (2 * T - 1) + distance + T - 1
    tl.store(at, total, mask=distance < T)


@triton.jit
def delta_kernel(out, grad, delta, M, H, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """dO_i . O_i of every query: [B,M,H,d] twice -> [B,H,M] float32."""
    row, head_of_batch = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    b, h = head_of_batch // H, head_of_batch % H
    columns, offset = tl.arange(0, BLOCK_D), b.to(tl.int64) * M * H * D + h * D
    left = load_rows(out + offset, row, M, H * D, columns, D).to(tl.float32)
    right = load_rows(grad + offset, row, M, H * D, columns, D).to(tl.float32)
    tl.store(delta + head_of_batch.to(tl.int64) * M + row, tl.sum(left * right, 1), mask=row < M)


def block_sizes(width: int) -> dict[str, int]:
    """Tile sizes; small where Python interprets each program. They are to be tuned on a GPU (not run)."""
    wide = max(16, triton.next_power_of_2(width))
    return {
        "BLOCK_M": 16 if IS_INTERPRETED else 128 if wide <= 64 else 64,
        "BLOCK_N": 16 if IS_INTERPRETED else 64,
        "BLOCK_D": wide,
    }


@torch.library.custom_op("amos_fairseq::attention", mutates_args=())
def attention_op(
    heads: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    seed: Tensor,
    positions: Tensor | None,
    side: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    B, T, _, H, D = heads.shape
    M = T if positions is None else positions.size(1)
    out = heads.new_empty(B, M, H, D)
    lse = torch.empty(B, H, M, dtype=torch.float32, device=heads.device)
    sizes = block_sizes(D)
    forward_kernel[(triton.cdiv(M, sizes["BLOCK_M"]), B * H)](
        heads, *given(heads, bias, padding), seed, given(heads, positions)[0], out, lse, *scalars(D, dropout), T, M, H, D,
        HAS_POSITIONS=positions is not None, **flags(bias, padding, side, dropout), **sizes,
    )  # fmt: skip
    return out, lse


@attention_op.register_fake
def _(heads, bias, padding, seed, positions, side, dropout):
    B, T, _, H, D = heads.shape
    M = T if positions is None else positions.size(1)
    return heads.new_empty(B, M, H, D), heads.new_empty(B, H, M, dtype=torch.float32)


@torch.library.custom_op("amos_fairseq::attention_backward", mutates_args=())
def attention_backward_op(
    grad: Tensor, heads: Tensor, bias: Tensor | None, padding: Tensor | None, seed: Tensor, positions: Tensor | None,
    out: Tensor, lse: Tensor, side: int, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, T, _, H, D = heads.shape
    M = out.size(1)
    sizes, numbers = block_sizes(D), scalars(D, dropout)
    settings = flags(bias, padding, side, dropout)
    queries, keys = triton.cdiv(M, sizes["BLOCK_M"]), triton.cdiv(T, sizes["BLOCK_N"])
    delta = torch.empty_like(lse)
    delta_kernel[(queries, B * H)](out, grad, delta, M, H, D, BLOCK_M=sizes["BLOCK_M"], BLOCK_D=sizes["BLOCK_D"])
    grad_heads = torch.empty_like(heads)
    has_positions = positions is not None
    # At given positions dq is added to zeros afterwards, since a position may be given twice.
    grad_query = heads.new_empty(B, M, H, D) if has_positions else grad_heads
    scores = (
        torch.empty(B, H, M, T, dtype=torch.float32, device=heads.device) if has_positions and bias is not None else lse
    )
    common = (heads, *given(heads, bias, padding), seed, given(heads, positions)[0], grad, lse, delta)
    query_kernel[(queries, B * H)](
        *common, grad_query, scores, *numbers, T, M, H, D, (1 if has_positions else 3) * H * D,
        HAS_POSITIONS=has_positions, **settings, **sizes,
    )  # fmt: skip
    key_value_kernel[(keys, B * H)](
        *common, grad_heads, *numbers, T, M, H, D, HAS_POSITIONS=has_positions, **settings, **sizes
    )
    if has_positions:
        at = positions[:, :, None, None].expand_as(grad_query)
        grad_heads[:, :, 0] = torch.zeros_like(heads[:, :, 0]).scatter_add(1, at, grad_query)
    if bias is None:
        return grad_heads, heads.new_empty(0, dtype=torch.float32)
    if has_positions:
        return grad_heads, sum_of_windows(scores, positions)
    block, groups = sizes["BLOCK_N"], min(B, 4)
    diagonals = 2 * triton.cdiv(T, block) - 1
    tiles = torch.empty(groups, H, diagonals, block, block, dtype=torch.float32, device=heads.device)
    del settings["HAS_BIAS"]
    bias_kernel[(diagonals, H, groups)](
        heads, *given(heads, bias, padding), seed, grad, lse, delta, tiles, *numbers, B, T, H, D, triton.cdiv(B, groups),
        **settings, BLOCK=block, BLOCK_D=sizes["BLOCK_D"],
    )  # fmt: skip
    return grad_heads, sum_of_diagonals(tiles.sum(0), T)


@attention_backward_op.register_fake
def _(grad, heads, bias, padding, seed, positions, out, lse, side, dropout):
    return torch.empty_like(heads), heads.new_empty(bias.shape if bias is not None else (0,), dtype=torch.float32)


@register_flop_formula(torch.ops.amos_fairseq.attention)
def forward_flops(heads: torch.Size, *args, out_shape: tuple[torch.Size, ...], **kwargs) -> int:
    """Scores, and their product with the values."""
    return 2 * product_flops(heads, out_shape[0])


@register_flop_formula(torch.ops.amos_fairseq.attention_backward)
def backward_flops(grad: torch.Size, heads: torch.Size, bias: torch.Size | None, *args, **kwargs) -> int:
    """What runs: scores and dP again for each of dq, for dk and dv, and for the bias at all positions, and three gradients."""
    has_bias_kernel = bias is not None and grad[1] == heads[1]
    return (9 if has_bias_kernel else 7) * product_flops(heads, grad)


def product_flops(heads: torch.Size, out: torch.Size) -> int:
    B, T, _, H, d = heads
    return 2 * B * H * out[1] * T * d


def sum_of_diagonals(tiles: Tensor, length: int) -> Tensor:
    """Tiles [H,G,N,N] of the G diagonals of tiles of a matrix [T,T] (key block minus query block ascending) -> [H,2T-1]."""
    H, G, N, _ = tiles.shape
    # Each row, from the last to the first, one column further to the right: then equal distances are in one column.
    padded = torch.nn.functional.pad(tiles.flip(2), (0, N)).flatten(2)  # rows of 2N
    sheared = padded[..., : N * (2 * N - 1)].unflatten(2, (N, 2 * N - 1)).sum(2)  # [H,G,2N-1]
    sums = tiles.new_zeros(H, G + 1, N)
    sums[:, :G] += sheared[..., :N]
    sums[:, 1:, : N - 1] += sheared[..., N:]
    first = (G + 1) // 2 * N - length
    return sums.flatten(1)[:, first : first + 2 * length - 1]


def sum_of_windows(scores: Tensor, positions: Tensor) -> Tensor:
    """dS [B,H,M,T] of queries at ``positions`` [B,M] -> [H,2T-1], summed by distance."""
    B, H, M, T = scores.shape
    block, groups = 128, min(B * M, 16)
    sums = torch.empty(groups, H, 2 * T - 1, dtype=torch.float32, device=scores.device)
    window_kernel[(triton.cdiv(2 * T - 1, block), H, groups)](
        scores, positions, sums, B, M, T, H, triton.cdiv(B * M, groups), BLOCK=block
    )
    return sums.sum(0)


def given(stand_in: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """A kernel needs a pointer also for what its flags say is not there."""
    return [stand_in if tensor is None else tensor for tensor in tensors]


def scalars(width: int, dropout: float) -> tuple[float, float, int]:
    """1 / sqrt(d), 1 / (1 - p), and the number below which 32 random bits drop a weight."""
    return width**-0.5, 1 / (1 - dropout), min(round(dropout * 2**32), 2**32 - 1)


def flags(bias: Tensor | None, padding: Tensor | None, side: int, dropout: float) -> dict[str, object]:
    return {
        "HAS_BIAS": bias is not None, "HAS_PADDING": padding is not None, "SIDE": side, "DROPS": dropout > 0,
        "UPCAST": IS_INTERPRETED,
    }  # fmt: skip


def _keep(ctx, inputs, output) -> None:
    heads, bias, padding, seed, positions, ctx.side, ctx.dropout = inputs
    ctx.save_for_backward(heads, bias, padding, seed, positions, *output)


def _backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
    heads, bias, padding, seed, positions, out, lse = ctx.saved_tensors
    grad_heads, grad_bias = attention_backward_op(
        grad.contiguous(), heads, bias, padding, seed, positions, out, lse, ctx.side, ctx.dropout
    )
    return grad_heads, None if bias is None else grad_bias, None, None, None, None, None


attention_op.register_autograd(_backward, setup_context=_keep)


def triton_attention(
    heads: Tensor,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    side: str = "all",
    dropout: float = 0.0,
    positions: Tensor | None = None,
) -> Tensor:
    """Attention of every query, or of those at ``positions``.

    Args:
        heads: [B,T,3,H,d], query, key and value of every head, contiguous; float16, bfloat16 or float32.
        bias: [H,2T-1] float32, contiguous, added to the score of every pair by key - query + T - 1; None for zeros.
        padding: [B,T] bool, True at keys that nothing attends to; None where there are none.
        side: ``all`` keys, or those of the ``past`` or the ``future``, each with the query itself.
        dropout: a probability below 1; what is kept is scaled by 1 / (1 - dropout). The seed comes from PyTorch's generator.
        positions: [B,M] int64.

    Returns:
        [B,T,H,d] or [B,M,H,d], in the dtype of ``heads``.
    """
    seed = (
        torch.randint(2**31 - 1, (1,), device=heads.device, dtype=torch.int64)
        if dropout
        else heads.new_empty(1, dtype=torch.int64)
    )
    return attention_op(heads, bias, padding, seed, positions, SIDES[side], dropout)[0]
