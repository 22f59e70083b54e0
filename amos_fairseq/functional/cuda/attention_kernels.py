"""Self-attention with a learned Toeplitz bias in Triton, forward and backward, without a tensor of the size of the scores.

    O_i = sum_j D_ij P_ij v_j,   P_ij = softmax_j(q_i . k_j / sqrt(d) + c_(j - i)),   D_ij = 0 or 1 / (1 - p)

with one value c per head and distance j - i. The forward pass keeps O and the log of the softmax's denominator of every
query (FlashAttention-2, Dao 2023, algorithm 1). The backward pass computes the scores again, tile by tile (algorithm 2):

    dP_ij = D_ij dO_i . v_j,   dS_ij = P_ij (dP_ij - dO_i . O_i)
    dq_i = sum_j dS_ij k_j / sqrt(d),   dk_j = sum_i dS_ij q_i / sqrt(d),   dv_j = sum_i D_ij P_ij dO_i
    dc_w = sum over sequences and pairs with j - i = w of dS_ij

Every sum runs in a fixed order, in float32, so that the same inputs give the same bits; there are no atomic additions. One
program does the backward pass of one head of one sequence: a GPU is busy where B H is at least its number of multiprocessors.

Shapes: B sequences, T tokens, M queries (T, or some positions of every sequence), H heads, d width of a head.
"""

import math

import triton
import triton.language as tl

# Score of a masked pair, as in functional/attention.py.
MASKED_SCORE = tl.constexpr(-30_000.0)
LOG2_E = tl.constexpr(math.log2(math.e))
# Which keys a query attends to.
ALL, PAST, FUTURE = 0, 1, 2

# Triton's interpreter computes wrong products of bfloat16 matrices (version 3.6), so they are multiplied in float32 there.
IS_INTERPRETED = triton.knobs.runtime.interpret if hasattr(triton, "knobs") else False


@triton.jit
def hash_32_bits(x):
    """Compute a bijection of 32 bits whose output bits each depend on all input bits (two rounds of multiply and xor-shift)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keep_mask(seed, head, queries, keys, drop_below):
    """Return False where a weight is dropped: [BLOCK_M,BLOCK_N]. It depends on seed, head of the batch, query and key only."""
    of_head = hash_32_bits(seed.to(tl.uint32) ^ hash_32_bits(head.to(tl.uint32) + 0x9E3779B9))
    of_query = hash_32_bits(queries.to(tl.uint32) ^ of_head)
    bits = hash_32_bits(of_query[:, None] + keys.to(tl.uint32)[None, :] * 0x9E3779B1)
    return bits >= drop_below.to(tl.uint32)


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """Compute a b, summed in float32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_rows(base, rows, num_rows, row_stride, columns, D: tl.constexpr):
    """Load [len(rows),len(columns)], 0 beyond ``num_rows`` rows and D columns. Offsets within a sequence fit 32 bits."""
    inside = (rows < num_rows)[:, None] & (columns < D)[None, :]
    return tl.load(base + (rows[:, None] * row_stride + columns[None, :]), mask=inside, other=0.0)


@triton.jit
def attended_pairs(queries, keys, padding, T, HAS_PADDING: tl.constexpr, SIDE: tl.constexpr):
    """Return True where a query attends to a key: [BLOCK_M,BLOCK_N]."""
    ahead = keys[None, :] - queries[:, None]
    attended = (keys < T)[None, :] & (queries < T)[:, None]
    if SIDE == 1:
        attended = attended & (ahead <= 0)
    if SIDE == 2:
        attended = attended & (ahead >= 0)
    if HAS_PADDING:
        is_padding = (tl.load(padding + keys, mask=keys < T, other=1) != 0)[None, :]
        if SIDE != 0:  # a padding token of a one-sided encoder still attends to itself, so that no row is empty
            is_padding = is_padding & (ahead != 0)
        attended = attended & (is_padding == 0)
    return attended


@triton.jit
def scores_of(
    query,
    key,
    queries,
    keys,
    bias,
    padding,
    scale,
    T,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    SIDE: tl.constexpr,
    MASKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute scores times log2(e), [BLOCK_M,BLOCK_N] float32. Without MASKS no pair of the tile is masked or out of range."""
    scores = product(query, tl.trans(key), UPCAST) * (scale * LOG2_E)
    if HAS_BIAS:
        at = bias + (keys[None, :] - queries[:, None] + (T - 1))
        if MASKS:
            scores += LOG2_E * tl.load(at, mask=(keys < T)[None, :] & (queries < T)[:, None], other=0.0)
        else:
            scores += LOG2_E * tl.load(at)
    if MASKS:
        scores = tl.where(attended_pairs(queries, keys, padding, T, HAS_PADDING, SIDE), scores, MASKED_SCORE * LOG2_E)
        scores = tl.where((keys < T)[None, :], scores, -float("inf"))
    return scores


@triton.jit
def key_range(
    first_query, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, T, SIDE: tl.constexpr, HAS_POSITIONS: tl.constexpr
):
    """Return the range of keys that a block of consecutive queries attends to; with positions all keys."""
    low, high = 0, T
    if not HAS_POSITIONS:
        if SIDE == 1:
            high = tl.minimum(T, first_query + BLOCK_M)
        if SIDE == 2:
            low = (first_query // BLOCK_N) * BLOCK_N
    return low, high


@triton.jit
def forward_kernel(
    heads,
    bias,
    padding,
    seed,
    positions,
    out,
    lse,
    scale,
    keep_scale,
    drop_below,
    T,
    M,
    H: tl.constexpr,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    SIDE: tl.constexpr,
    DROPS: tl.constexpr,
    MASKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of a block of queries of one head: programs (B H times blocks of M), all blocks of a head in sequence."""
    blocks = tl.cdiv(M, BLOCK_M)
    first_query, head_of_batch = (tl.program_id(0) % blocks) * BLOCK_M, tl.program_id(0) // blocks
    row = first_query + tl.arange(0, BLOCK_M)
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
    low, high = key_range(first_query, BLOCK_M, BLOCK_N, T, SIDE, HAS_POSITIONS)
    for start in range(low, high, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        key = load_rows(base + H * D, keys, T, row_stride, columns, D)
        value = load_rows(base + 2 * H * D, keys, T, row_stride, columns, D)
        scores = scores_of(
            query,
            key,
            queries,
            keys,
            bias + h * (2 * T - 1),
            padding + b.to(tl.int64) * T,
            scale,
            T,
            HAS_BIAS,
            HAS_PADDING,
            SIDE,
            MASKS,
            UPCAST,
        )
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        if DROPS:
            weights = tl.where(keep_mask(seed_of_call, head_of_batch, queries, keys, drop_below), weights, 0.0)
        mixed = mixed * shrink[:, None] + product(weights.to(value.dtype), value, UPCAST)
        largest = new_largest
    mixed = mixed * (keep_scale / total)[:, None]
    inside = (row < M)[:, None] & (columns < D)[None, :]
    at = out + (b.to(tl.int64) * M + row)[:, None] * (H * D) + h * D + columns[None, :]
    tl.store(at, mixed.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head_of_batch.to(tl.int64) * M + row, largest + tl.log2(total), mask=row < M)


@triton.jit
def gradient_of_scores(
    query,
    key,
    value,
    grad,
    queries,
    keys,
    lse,
    delta,
    bias,
    padding,
    seed,
    head_of_batch,
    scale,
    keep_scale,
    drop_below,
    T,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    SIDE: tl.constexpr,
    DROPS: tl.constexpr,
    MASKS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute dS [BLOCK_M,BLOCK_N] float32, and the weights after dropout, D P."""
    scores = scores_of(query, key, queries, keys, bias, padding, scale, T, HAS_BIAS, HAS_PADDING, SIDE, MASKS, UPCAST)
    weights = tl.exp2(scores - lse[:, None])
    grad_weights, dropped = product(grad, tl.trans(value), UPCAST), weights
    if DROPS:
        keep = keep_mask(seed, head_of_batch, queries, keys, drop_below)
        grad_weights = tl.where(keep, grad_weights * keep_scale, 0.0)
        dropped = tl.where(keep, dropped * keep_scale, 0.0)
    grad_scores = weights * (grad_weights - delta[:, None])
    if MASKS:
        grad_scores = tl.where(attended_pairs(queries, keys, padding, T, HAS_PADDING, SIDE), grad_scores, 0.0)
    return grad_scores, dropped


@triton.jit
def backward_kernel(
    heads,
    bias,
    padding,
    seed,
    positions,
    grad,
    lse,
    delta,
    query_sums,
    grad_query,
    grad_heads,
    distance_sums,
    scores_out,
    scale,
    keep_scale,
    drop_below,
    T,
    M,
    H: tl.constexpr,
    D: tl.constexpr,
    query_stride,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    SIDE: tl.constexpr,
    DROPS: tl.constexpr,
    MASKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute dq, dk, dv and dc of one head of one sequence, tile by tile: programs (B H).

    One program computes all tiles of a head, so that dq and dc are sums in a fixed order without atomic additions. During the
    loop over the keys, dq is in ``query_sums`` [B,H,M,d] float32, and dc in ``distance_sums`` [B,H,2G BLOCK] float32 with G
    blocks of keys, initially zeros, where distance w is at G BLOCK + w. With positions, dS [B,H,M,T] is written to
    ``scores_out`` instead of dc.
    """
    head_of_batch = tl.program_id(0)
    b, h = (tl.full([], 0, tl.int64) + head_of_batch) // H, head_of_batch % H
    columns, lanes = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK)
    row_stride = 3 * H * D
    base = heads + b * T * row_stride + h * D
    first_row = (b * H + h) * M
    seed_of_call = tl.load(seed)
    key_blocks, query_blocks = tl.cdiv(T, BLOCK), tl.cdiv(M, BLOCK)
    sums_of_head = distance_sums + (b * H + h) * (2 * key_blocks * BLOCK)
    rotated = lanes[:, None] + lanes[None, :]
    for key_block in range(key_blocks):
        keys = key_block * BLOCK + lanes
        key = load_rows(base + H * D, keys, T, row_stride, columns, D)
        value = load_rows(base + 2 * H * D, keys, T, row_stride, columns, D)
        key_grad = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        value_grad = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        low, high = 0, query_blocks
        if not HAS_POSITIONS:
            if SIDE == 1:
                low = key_block
            if SIDE == 2:
                high = key_block + 1
        behind = tl.zeros([BLOCK], tl.float32)
        for query_block in range(low, high):
            row = query_block * BLOCK + lanes
            queries = row
            if HAS_POSITIONS:
                queries = tl.load(positions + b * M + row, mask=row < M, other=0).to(tl.int32)
            query = load_rows(base, tl.where(row < M, queries, T), T, row_stride, columns, D)
            out_grad = load_rows(grad + b * M * H * D + h * D, row, M, H * D, columns, D)
            lse_of = tl.load(lse + first_row + row, mask=row < M, other=float("inf"))
            delta_of = tl.load(delta + first_row + row, mask=row < M, other=0.0)
            grad_scores, dropped = gradient_of_scores(
                query,
                key,
                value,
                out_grad,
                queries,
                keys,
                lse_of,
                delta_of,
                bias + h * (2 * T - 1),
                padding + b * T,
                seed_of_call,
                head_of_batch,
                scale,
                keep_scale,
                drop_below,
                T,
                HAS_BIAS,
                HAS_PADDING,
                SIDE,
                DROPS,
                MASKS,
                UPCAST,
            )
            value_grad += product(tl.trans(dropped.to(out_grad.dtype)), out_grad, UPCAST)
            rounded = grad_scores.to(query.dtype)
            key_grad += product(tl.trans(rounded), query, UPCAST)

            # The first and the last block of keys that a query attends to.
            first, last = row * 0, row * 0 + key_blocks - 1
            if not HAS_POSITIONS:
                if SIDE == 1:
                    last = row // BLOCK
                if SIDE == 2:
                    first = row // BLOCK
            inside = (row < M)[:, None] & (columns < D)[None, :]
            at = query_sums + (first_row + row)[:, None] * D + columns[None, :]
            query_grad = tl.load(at, mask=inside & (first < key_block)[:, None], other=0.0)
            query_grad += product(rounded, key, UPCAST)
            tl.store(at, query_grad, mask=inside & (last > key_block)[:, None])
            at = grad_query + (b * M + row)[:, None] * query_stride + h * D + columns[None, :]
            is_whole = inside & (last == key_block)[:, None]
            tl.store(at, (query_grad * scale).to(grad_query.dtype.element_ty), mask=is_whole)

            if HAS_BIAS and HAS_POSITIONS:
                at = scores_out + (first_row + row)[:, None] * T + keys[None, :]
                tl.store(at, grad_scores, mask=(row < M)[:, None] & (keys < T)[None, :])
            if HAS_BIAS and not HAS_POSITIONS:
                # Rotate every row to the left by its index: a column then holds one distance, and after the wrap-around the
                # distance that is BLOCK smaller, which the next block of queries also has.
                rotated_grad = tl.gather(grad_scores, rotated % BLOCK, 1)
                ahead = behind + tl.sum(tl.where(rotated < BLOCK, rotated_grad, 0.0), 0)
                behind = tl.sum(tl.where(rotated >= BLOCK, rotated_grad, 0.0), 0)
                at = sums_of_head + (key_block - query_block + key_blocks) * BLOCK + lanes
                tl.store(at, tl.load(at) + ahead)
        if HAS_BIAS and not HAS_POSITIONS:
            at = sums_of_head + (key_block - high + key_blocks) * BLOCK + lanes
            tl.store(at, tl.load(at) + behind)
        at = grad_heads + (b * T + keys)[:, None] * row_stride + h * D + columns[None, :]
        inside = (keys < T)[:, None] & (columns < D)[None, :]
        tl.store(at + H * D, (key_grad * scale).to(grad_heads.dtype.element_ty), mask=inside)
        tl.store(at + 2 * H * D, value_grad.to(grad_heads.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # another thread may load these sums of dc for the next block of keys


@triton.jit
def window_kernel(scores, positions, sums, B, M, T, H, rows_each, BLOCK: tl.constexpr):
    """Sum dS [B,H,M,T] of queries at given positions by distance: programs (blocks of 2T-1, H, groups of rows)."""
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
    """Compute dO_i . O_i of every query: [B,M,H,d] twice -> [B,H,M] float32."""
    blocks = tl.cdiv(M, BLOCK_M)
    row, head_of_batch = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(0) // blocks
    b, h = head_of_batch // H, head_of_batch % H
    columns, offset = tl.arange(0, BLOCK_D), b.to(tl.int64) * M * H * D + h * D
    left = load_rows(out + offset, row, M, H * D, columns, D).to(tl.float32)
    right = load_rows(grad + offset, row, M, H * D, columns, D).to(tl.float32)
    tl.store(delta + head_of_batch.to(tl.int64) * M + row, tl.sum(left * right, 1), mask=row < M)
