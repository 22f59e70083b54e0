"""Self-attention with a learned Toeplitz bias in Triton, forward and backward, without a mask or weights of size T x T.

    O_i = sum_j D_ij P_ij v_j,   P_ij = softmax_j(q_i . k_j / sqrt(d) + c_(j - i)),   D_ij = 0 or 1 / (1 - p)

with one value c per head and distance j - i. The forward pass keeps O and the log of the softmax's denominator of every
query (FlashAttention-2, Dao 2023, algorithm 1). The backward pass computes the scores again, tile by tile (algorithm 2):

    dP_ij = D_ij dO_i . v_j,   dS_ij = P_ij (dP_ij - dO_i . O_i)
    dq_i = sum_j dS_ij k_j / sqrt(d),   dk_j = sum_i dS_ij q_i / sqrt(d),   dv_j = sum_i D_ij P_ij dO_i
    dc_w = sum over sequences and pairs with j - i = w of dS_ij

in two kernels: one program per block of queries computes dq and its part of dc, one program per block of keys dk and dv. Both
compute the scores, so that there are seven products instead of five, but every sum stays in registers and runs in a fixed
order: the same inputs give the same bits, without atomic additions.

The elementwise code between the products takes longer than the products themselves, so it is written for few
instructions; tests/reliability/test_machine_code.py counts them.

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
# Sums of dS over pairs of one distance start with sums over cells of CELL x CELL pairs: 8 rows of a tile are in 8 different
# groups of threads of a warp, so that cells of 8 rows are added up without exchanging data between threads.
CELL = tl.constexpr(8)

# Triton's interpreter computes wrong products of bfloat16 matrices (version 3.6), so they are multiplied in float32 there.
IS_INTERPRETED = triton.knobs.runtime.interpret if hasattr(triton, "knobs") else False


@triton.jit
def hash_32_bits(x):
    """Compute a bijection of 32 bits whose output bits each depend on all input bits (two rounds of multiply and xor-shift)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def dropout_keys(seed, head):
    """Compute two numbers of 32 bits for a seed and a head of the batch; with one, two heads could have shifted masks."""
    first = hash_32_bits(seed.to(tl.uint32) ^ hash_32_bits(head.to(tl.uint32) + 0x9E3779B9))
    return first, hash_32_bits(first ^ 0x85EBCA6B)


@triton.jit
def keep_mask(first, second, first_row, rows, first_key, keys, drop_below):
    """Return False where a weight is dropped: the shape of ``rows`` and ``keys``, which are relative to the given first ones.

    The weights of rows m and m + 8 and keys n and n + 8 share one hash of 32 bits (m and n without bit 3) and compare it with
    ``drop_below`` after turning it by 0, 8, 16 or 24 bits. Every weight is dropped with the same probability, exact to
    2^-32. Two of the four agree only in the bits that decide when the 8 highest ones equal those of the threshold, so the
    correlation of their decisions is below 1 / 256. A thread has all four, in tiles of queries by keys and of keys by queries,
    and computes the hash once. ``first_row`` and ``first_key`` are multiples of 16. M and T are below 65,536; otherwise
    weights far from each other would share a hash.
    """
    words = (first + first_row * 65536 + first_key) + ((rows & ~8) * 65536 + (keys & ~8)).to(tl.uint32)
    words = (words ^ (words >> 16)) * 0x7FEB352D
    words = (words ^ (words >> 15) ^ second) * 0x846CA68B
    words = words ^ (words >> 16)
    turn = ((rows & 8) * 2 + (keys & 8)).to(tl.uint32)
    return ((words << turn) | (words >> ((32 - turn) & 31))) >= drop_below.to(tl.uint32)


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """Compute a b, summed in float32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_rows(at, rows, num_rows, columns, CHECKS_ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load [len(rows),BLOCK_D] from ``at``, 0 beyond ``num_rows`` rows and D columns. Only the given rows are checked."""
    if CHECKS_ROWS:
        return tl.load(at, mask=(rows < num_rows)[:, None] & (columns < D)[None, :], other=0.0)
    if D < BLOCK_D:
        return tl.load(at, mask=(columns < D)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def attended_pairs(queries, keys, padding, T, HAS_PADDING: tl.constexpr, SIDE: tl.constexpr):
    """Return True where a query attends to a key. One of ``queries`` and ``keys`` is a row, the other a column."""
    ahead = keys - queries
    attended = (keys < T) & (queries < T)
    if SIDE == 1:
        attended = attended & (ahead <= 0)
    if SIDE == 2:
        attended = attended & (ahead >= 0)
    if HAS_PADDING:
        is_padding = tl.load(padding + keys, mask=keys < T, other=1) != 0
        if SIDE != 0:  # a padding token of a one-sided encoder still attends to itself, so that no row is empty
            is_padding = is_padding & (ahead != 0)
        attended = attended & (is_padding == 0)
    return attended


@triton.jit
def scores_of(
    products,
    queries,
    keys,
    bias_at,
    padding,
    scale,
    T,
    HAS_BIAS: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    SIDE: tl.constexpr,
    MASKS: tl.constexpr,
):
    """Compute scores from q . k; exp2 of them times :func:`exponent_factor` are the weights.

    One of ``queries`` and ``keys`` is a row, the other a column, so that the tile may be either way around. Without MASKS no
    pair of the tile is masked or out of range.
    """
    if not HAS_BIAS and not MASKS:
        return products
    scores = products * scale
    if HAS_BIAS:
        if MASKS:
            scores += tl.load(bias_at, mask=(keys < T) & (queries < T), other=0.0)
        else:
            scores += tl.load(bias_at)
    if MASKS:
        scores = tl.where(attended_pairs(queries, keys, padding, T, HAS_PADDING, SIDE), scores, MASKED_SCORE)
        scores = tl.where(keys < T, scores, -float("inf"))
    return scores


@triton.jit
def exponent_factor(scale, HAS_BIAS: tl.constexpr, MASKS: tl.constexpr):
    """Return what the results of :func:`scores_of` are multiplied by; they contain ``scale`` only where they are a sum."""
    if HAS_BIAS or MASKS:
        return tl.full([], LOG2_E, tl.float32)
    return scale * LOG2_E


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
def query_addresses(base, first_row, rows, queries, columns, row_stride, HAS_POSITIONS: tl.constexpr):
    """Return the addresses of queries [len(rows),len(columns)]; of consecutive ones, a scalar and offsets of 32 bits."""
    if HAS_POSITIONS:
        return base + queries[:, None] * row_stride + columns[None, :]
    return base + first_row * row_stride + (rows[:, None] * row_stride + columns[None, :])


@triton.jit
def bias_addresses(bias_of_key, first_row, rows, queries, keys, HAS_POSITIONS: tl.constexpr):
    """Return the addresses of the bias of queries and keys, where ``bias_of_key`` is that of query 0 and the first key.

    The addresses of consecutive queries are a scalar and small offsets; the offsets become constants of the instructions.
    Addresses made of the queries' own numbers needed 80 more registers.
    """
    if HAS_POSITIONS:
        return bias_of_key - queries[:, None] + keys[None, :]
    return (bias_of_key - first_row) - rows[:, None] + keys[None, :]


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
    CHECKS_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attention of a block of queries of one head: programs (B H times blocks of M), all blocks of a head in sequence."""
    # The blocks of a head run one after another, so that its keys and values stay in the L2 cache. 64 bits: B T 3 H d may be
    # beyond 2^31.
    blocks = tl.cdiv(M, BLOCK_M)
    first_row, head_of_batch = (tl.program_id(0) % blocks) * BLOCK_M, tl.program_id(0) // blocks
    b, h = (tl.full([], 0, tl.int64) + head_of_batch) // H, head_of_batch % H
    columns, rows, keys = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    row_stride = 3 * H * D
    base = heads + b * T * row_stride + h * D
    row = first_row + rows
    queries = row
    if HAS_POSITIONS:
        queries = tl.load(positions + b * M + row, mask=row < M, other=0).to(tl.int32)
    query_at = query_addresses(base, first_row, rows, queries, columns, row_stride, HAS_POSITIONS)
    query = load_rows(query_at, row, M, columns, CHECKS_ROWS, D, BLOCK_D)
    low, high = key_range(first_row, BLOCK_M, BLOCK_N, T, SIDE, HAS_POSITIONS)
    key_at = base + H * D + (low + keys)[:, None] * row_stride + columns[None, :]
    bias_at = bias_addresses(bias + h * (2 * T - 1) + (low + T - 1), first_row, rows, queries, keys, HAS_POSITIONS)
    if DROPS:
        first, second = dropout_keys(tl.load(seed), head_of_batch)
        # A zero that the compiler does not know: for a known one it would select after rounding to 16 bits, and then need one
        # more instruction per weight to pack two of them into a register.
        zero = tl.minimum(scale, 0.0)
    # Softmax over all keys without keeping their scores: of the tiles so far, the largest score of each query, the sum of
    # exp(score - largest), and the values with these weights. A tile with a larger score shrinks both sums.
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    factor = exponent_factor(scale, HAS_BIAS, MASKS)
    for first_key in range(low, high, BLOCK_N):
        key = load_rows(key_at, first_key + keys, T, columns, MASKS, D, BLOCK_D)
        value = load_rows(key_at + H * D, first_key + keys, T, columns, MASKS, D, BLOCK_D)
        # The queries stay in registers or shared memory for all tiles; keys and values are read once for each block of queries.
        products = product(query, tl.trans(key), UPCAST)
        scores = scores_of(
            products,
            queries[:, None],
            (first_key + keys)[None, :],
            bias_at,
            padding + b * T,
            scale,
            T,
            HAS_BIAS,
            HAS_PADDING,
            SIDE,
            MASKS,
        )
        # A query's scores are in four threads of one warp, which exchange their maxima and sums by shuffles.
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores * factor - (new_largest * factor)[:, None])
        shrink = tl.exp2((largest - new_largest) * factor)
        total = total * shrink + tl.sum(weights, 1)
        if DROPS:  # after the sum: the softmax is that of all keys
            keep = keep_mask(first, second, first_row, rows[:, None], first_key, keys[None, :], drop_below)
            weights = tl.where(keep, weights, zero)
        mixed = mixed * shrink[:, None] + product(weights.to(value.dtype), value, UPCAST)
        largest = new_largest
        key_at += BLOCK_N * row_stride
        bias_at += BLOCK_N
    # Both factors are the same for all keys, so they are applied once.
    mixed = mixed * (keep_scale / total)[:, None]
    inside = (row < M)[:, None] & (columns < D)[None, :]
    out_at = out + (b * M + first_row) * (H * D) + h * D + (rows[:, None] * (H * D) + columns[None, :])
    tl.store(out_at, mixed.to(out.dtype.element_ty), mask=inside)
    # In base 2, as exp2 of the backward pass takes it: one number from which a score gives its weight again.
    tl.store(lse + (b * H + h) * M + first_row + rows, largest * factor + tl.log2(total), mask=row < M)


@triton.jit
def weights_and_gradient(scores, factor, lse, grad_weights, delta, keep, zero, keep_scale, DROPS: tl.constexpr):
    """Compute dS and the weights after dropout but for the factor 1 / (1 - p), both float32, in the shape of ``scores``.

    Both are 0 at masked pairs and beyond the last query and key: there the weight is exp2 of -30,000, or of -inf. A row that is
    masked as a whole has equal weights, as in :func:`~amos_fairseq.functional.attention.reference_attention`.
    """
    weights = tl.exp2(scores * factor - lse)
    if DROPS:
        return weights * tl.where(keep, grad_weights * keep_scale - delta, -delta), tl.where(keep, weights, zero)
    return weights * (grad_weights - delta), weights


@triton.jit
def query_kernel(
    heads,
    bias,
    padding,
    seed,
    positions,
    out,
    grad,
    lse,
    delta,
    grad_query,
    cell_sums,
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
    CHECKS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute dq and sums of dS of a block of queries, and dO . O for the other kernel: programs as of the forward pass.

    For dc, a tile of dS is divided into cells of 8 x 8 pairs. Cells on one diagonal of cells are added up by a product with a
    matrix of zeros and ones, on dS as it is rounded for dq, into 2 BLOCK / 8 cells; half of them also get sums from the next
    tile. ``cell_sums`` [B,H,blocks of M,cells,8,8] float32 gets one cell for each 8 keys, and one for each 8 queries; cell
    u has the pairs with j - i = 8 (u + 1) - BLOCK (1 + block of queries) + column - row. With positions, dS [B,H,M,T] is
    written to ``scores_out`` instead.
    """
    blocks = tl.cdiv(M, BLOCK)
    first_row, head_of_batch = (tl.program_id(0) % blocks) * BLOCK, tl.program_id(0) // blocks
    b, h = (tl.full([], 0, tl.int64) + head_of_batch) // H, head_of_batch % H
    columns, rows, keys = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    row_stride = 3 * H * D
    base = heads + b * T * row_stride + h * D
    row = first_row + rows
    queries = row
    if HAS_POSITIONS:
        queries = tl.load(positions + b * M + row, mask=row < M, other=0).to(tl.int32)
    query_at = query_addresses(base, first_row, rows, queries, columns, row_stride, HAS_POSITIONS)
    query = load_rows(query_at, row, M, columns, CHECKS_ROWS, D, BLOCK_D)
    offset, offsets = (b * M + first_row) * (H * D) + h * D, rows[:, None] * (H * D) + columns[None, :]
    out_grad = load_rows(grad + offset + offsets, row, M, columns, CHECKS_ROWS, D, BLOCK_D)
    result = load_rows(out + offset + offsets, row, M, columns, CHECKS_ROWS, D, BLOCK_D)
    # sum_j P_ij dP_ij = dO_i . O_i: the sum over all keys, before the first tile, in which each dS needs it.
    delta_of = tl.sum(out_grad.to(tl.float32) * result.to(tl.float32), 1)
    of_block = (b * H + h) * M + first_row
    tl.store(delta + of_block + rows, delta_of, mask=row < M)
    # Beyond the last query exp2(score - inf) makes every weight 0.
    lse_of = tl.load(lse + of_block + rows, mask=row < M, other=float("inf"))
    low, high = key_range(first_row, BLOCK, BLOCK, T, SIDE, HAS_POSITIONS)
    key_at = base + H * D + (low + keys)[:, None] * row_stride + columns[None, :]
    bias_at = bias_addresses(bias + h * (2 * T - 1) + (low + T - 1), first_row, rows, queries, keys, HAS_POSITIONS)
    zero, first, second = scale, scale, scale
    if DROPS:
        first, second = dropout_keys(tl.load(seed), head_of_batch)
        zero = tl.minimum(scale, 0.0)  # as in the forward pass
    factor = exponent_factor(scale, HAS_BIAS, MASKS)
    query_grad = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    SIDE_CELLS: tl.constexpr = BLOCK // CELL
    NUM_CELLS: tl.constexpr = SIDE_CELLS * SIDE_CELLS
    PAIRS: tl.constexpr = CELL * CELL
    if HAS_BIAS and not HAS_POSITIONS:
        # Column u selects the cells (I, J), in the order I SIDE_CELLS + J, with J - I + SIDE_CELLS - 1 = u.
        cell, pair = tl.arange(0, NUM_CELLS), tl.arange(0, PAIRS)
        diagonal = cell % SIDE_CELLS - cell // SIDE_CELLS + SIDE_CELLS - 1
        selection = diagonal[:, None] == tl.arange(0, 2 * SIDE_CELLS)[None, :]
        selection = selection.to(tl.float32).to(heads.dtype.element_ty)  # the interpreter takes bits for bfloat16
        of_next = tl.zeros([PAIRS, SIDE_CELLS], tl.float32)
        cells_at = cell_sums + tl.program_id(0).to(tl.int64) * ((tl.cdiv(T, BLOCK) + 1) * SIDE_CELLS * PAIRS)
        cells_at += low // BLOCK * (SIDE_CELLS * PAIRS)
        cells_at = cells_at + pair[:, None] + tl.arange(0, SIDE_CELLS)[None, :] * PAIRS
    for first_key in range(low, high, BLOCK):
        key = load_rows(key_at, first_key + keys, T, columns, MASKS, D, BLOCK_D)
        value = load_rows(key_at + H * D, first_key + keys, T, columns, MASKS, D, BLOCK_D)
        # Recomputed, as is the keep mask from the seed: nothing of size M x T was kept by the forward pass.
        products = product(query, tl.trans(key), UPCAST)
        scores = scores_of(
            products,
            queries[:, None],
            (first_key + keys)[None, :],
            bias_at,
            padding + b * T,
            scale,
            T,
            HAS_BIAS,
            HAS_PADDING,
            SIDE,
            MASKS,
        )
        grad_weights = product(out_grad, tl.trans(value), UPCAST)
        keep = grad_weights
        if DROPS:
            keep = keep_mask(first, second, first_row, rows[:, None], first_key, keys[None, :], drop_below)
        grad_scores, _ = weights_and_gradient(
            scores, factor, lse_of[:, None], grad_weights, delta_of[:, None], keep, zero, keep_scale, DROPS
        )
        # As the operand of the next product it stays in the registers in which it was computed, rounded to 16 bits.
        rounded = grad_scores.to(key.dtype)
        query_grad += product(rounded, key, UPCAST)
        if HAS_BIAS and HAS_POSITIONS:
            scores_at = scores_out + of_block * T + rows[:, None] * T + (first_key + keys)[None, :]
            tl.store(scores_at, grad_scores, mask=(row < M)[:, None] & (first_key + keys < T)[None, :])
        if HAS_BIAS and not HAS_POSITIONS:
            # 64 rows, as the other products: Hopper computes one of 16 rows by other instructions, and then waits for each of
            # the other products before the next one starts.
            cells = tl.permute(tl.reshape(rounded, [SIDE_CELLS, CELL, SIDE_CELLS, CELL]), [1, 3, 0, 2])
            sums = product(tl.reshape(cells, [PAIRS, NUM_CELLS]), selection, UPCAST)
            whole, unfinished = tl.split(tl.permute(tl.reshape(sums, [PAIRS, 2, SIDE_CELLS]), [0, 2, 1]))
            # Diagonals that end in this tile are complete with what the tile before left; the others wait for the next one.
            tl.store(cells_at, of_next + whole)
            of_next = unfinished
            cells_at += SIDE_CELLS * PAIRS
        key_at += BLOCK * row_stride
        bias_at += BLOCK
    if HAS_BIAS and not HAS_POSITIONS:
        tl.store(cells_at, of_next)
    grad_at = grad_query + (b * M + first_row) * query_stride + h * D
    inside = (row < M)[:, None] & (columns < D)[None, :]
    tl.store(
        grad_at + (rows[:, None] * query_stride + columns[None, :]),
        (query_grad * scale).to(grad_query.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def key_kernel(
    heads,
    bias,
    padding,
    seed,
    positions,
    grad,
    lse,
    delta,
    grad_heads,
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
    CHECKS_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute dk and dv of a block of keys of one head: programs (B H times blocks of T), all blocks of a head in sequence.

    Tiles are keys by queries, so that weights and dS are in the registers from which the products for dv and dk read them.
    """
    blocks = tl.cdiv(T, BLOCK_N)
    first_key, head_of_batch = (tl.program_id(0) % blocks) * BLOCK_N, tl.program_id(0) // blocks
    b, h = (tl.full([], 0, tl.int64) + head_of_batch) // H, head_of_batch % H
    columns, rows, keys = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    row_stride = 3 * H * D
    base = heads + b * T * row_stride + h * D
    # Keys and values are loaded once, and queries pass by: the loops of the two kernels of the backward pass are exchanged, so
    # that each gradient is summed up by one program.
    offsets = keys[:, None] * row_stride + columns[None, :]
    key_at = base + first_key * row_stride + H * D
    key = load_rows(key_at + offsets, first_key + keys, T, columns, MASKS, D, BLOCK_D)
    value = load_rows(key_at + H * D + offsets, first_key + keys, T, columns, MASKS, D, BLOCK_D)
    # The queries that attend to these keys: the mirror image of key_range().
    low, high = 0, M
    if not HAS_POSITIONS:
        if SIDE == 1:
            low = (first_key // BLOCK_M) * BLOCK_M
        if SIDE == 2:
            high = tl.minimum(M, first_key + BLOCK_N)
    query_at = base + (low + rows)[:, None] * row_stride + columns[None, :]
    grad_at = grad + b * M * (H * D) + h * D + (low + rows)[:, None] * (H * D) + columns[None, :]
    bias_of_head = bias + h * (2 * T - 1) + (first_key + T - 1)
    bias_at = bias_of_head - low + keys[:, None] - rows[None, :]
    zero, first, second = scale, scale, scale
    if DROPS:
        first, second = dropout_keys(tl.load(seed), head_of_batch)
        zero = tl.minimum(scale, 0.0)  # as in the forward pass
    factor = exponent_factor(scale, HAS_BIAS, MASKS)
    key_grad = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_grad = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for first_row in range(low, high, BLOCK_M):
        row = first_row + rows
        queries = row
        if HAS_POSITIONS:
            queries = tl.load(positions + b * M + row, mask=row < M, other=0).to(tl.int32)
            query_at = base + queries[:, None] * row_stride + columns[None, :]
            bias_at = bias_of_head + keys[:, None] - queries[None, :]
        query = load_rows(query_at, row, M, columns, CHECKS_ROWS, D, BLOCK_D)
        out_grad = load_rows(grad_at, row, M, columns, CHECKS_ROWS, D, BLOCK_D)
        of_block = (b * H + h) * M + first_row
        if CHECKS_ROWS:
            lse_of = tl.load(lse + of_block + rows, mask=row < M, other=float("inf"))
            delta_of = tl.load(delta + of_block + rows, mask=row < M, other=0.0)
        else:
            lse_of = tl.load(lse + of_block + rows)
            delta_of = tl.load(delta + of_block + rows)
        # The same scores as in query_kernel, transposed.
        products = product(key, tl.trans(query), UPCAST)
        scores = scores_of(
            products,
            queries[None, :],
            (first_key + keys)[:, None],
            bias_at,
            padding + b * T,
            scale,
            T,
            HAS_BIAS,
            HAS_PADDING,
            SIDE,
            MASKS,
        )
        grad_weights = product(value, tl.trans(out_grad), UPCAST)
        keep = grad_weights
        if DROPS:
            keep = keep_mask(first, second, first_row, rows[None, :], first_key, keys[:, None], drop_below)
        grad_scores, dropped = weights_and_gradient(
            scores, factor, lse_of[None, :], grad_weights, delta_of[None, :], keep, zero, keep_scale, DROPS
        )
        value_grad += product(dropped.to(out_grad.dtype), out_grad, UPCAST)
        key_grad += product(grad_scores.to(query.dtype), query, UPCAST)
        query_at += BLOCK_M * row_stride
        grad_at += BLOCK_M * H * D
        bias_at -= BLOCK_M  # key - query falls as the query advances
    at = grad_heads + (b * T + first_key) * row_stride + h * D
    inside = (first_key + keys < T)[:, None] & (columns < D)[None, :]
    tl.store(at + H * D + offsets, (key_grad * scale).to(grad_heads.dtype.element_ty), mask=inside)
    tl.store(at + 2 * H * D + offsets, (value_grad * keep_scale).to(grad_heads.dtype.element_ty), mask=inside)


@triton.jit
def distance_kernel(cell_sums, sums, sequences, T, M, H, sequences_each, BLOCK: tl.constexpr, DISTANCES: tl.constexpr):
    """Sum the cells of :func:`query_kernel` by distance: programs (blocks of 2T-1, H, groups of sequences).

    A distance is on a diagonal of 8 pairs in two neighbouring cells of each block of queries.
    """
    # A program sums its distances in a fixed order; groups of sequences give enough programs to fill a GPU.
    distance = tl.program_id(0) * DISTANCES + tl.arange(0, DISTANCES) - (T - 1)
    h, group = tl.program_id(1), tl.program_id(2)
    in_cell = tl.arange(0, CELL)
    blocks, num_cells = tl.cdiv(M, BLOCK), (tl.cdiv(T, BLOCK) + 1) * (BLOCK // CELL)
    total = tl.zeros([DISTANCES], tl.float32)
    for b in range(group * sequences_each, tl.minimum(sequences, (group + 1) * sequences_each)):
        for block in range(blocks):
            # Row 0 and column 0 of cell 0 have offset 8. The offset is positive where the block has the distance.
            offset = (distance + BLOCK * (1 + block))[:, None]
            column = offset % CELL + in_cell[None, :]
            cell = offset // CELL + column // CELL - 1
            of_block = ((tl.full([], 0, tl.int64) + b) * H + h) * blocks + block
            at = cell_sums + (of_block * num_cells + cell) * (CELL * CELL) + in_cell[None, :] * CELL + column % CELL
            total += tl.sum(tl.load(at, mask=(offset > 0) & (cell >= 0) & (cell < num_cells), other=0.0), 1)
    tl.store(sums + (group * H + h) * (2 * T - 1) + distance + T - 1, total, mask=distance < T)


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
