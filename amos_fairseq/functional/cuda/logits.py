"""Triton kernels over a chunk of logits: summary, sampling of tokens, and gradient, each as a custom operator of PyTorch.

A chunk of logits has the dtype of the output layer. Each kernel converts its input to float32 in registers. The only tensor
of the size of the chunk that a kernel writes is the gradient, in place of the logits. Every sum runs in a fixed order, without
atomic additions, so that the same inputs give the same bits.

Tokens are sampled from the mixture of the depths, softmax(sum_d gamma^(d) logits^(d)), in two steps, as in
:mod:`amos_fairseq.functional.sampling`: first a block of BLOCK_ROWS rows by the sums of the blocks, then a row of the
block. A row is a token of the padded vocabulary.

Shapes: K depths, n positions of a chunk, V padded vocabulary size, G blocks of BLOCK_ROWS rows, P parts of PART_BLOCKS blocks,
S samples, X rows of each position that are excluded from sampling.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, library

from amos_fairseq.functional.cuda import launches
from amos_fairseq.functional.cuda.attention_kernels import IS_INTERPRETED

# Rows of a block. Sampling loads 8 bytes per block of a position, and 64 logits of each depth per sample. With V = 32,768,
# K = 3 and the 128 samples of AMOS this is 4 KB and 49 KB; all bfloat16 logits of a position are 196 KB. Blocks of 128 rows
# would save 2 KB of the former and double the latter. 64 logits of 16 bits fill a cache line of 128 bytes.
BLOCK_ROWS = 64
# Blocks per program of the summary: 2,048 rows of one position, for all depths.
PART_BLOCKS = 32
# A program of the gradient handles this number of positions and writes one float32 sum over them for each row: 4 bytes per 64
# logits.
GRADIENT_POSITIONS = 64


def sampling_launch(kernel: str, num_samples: int, device: torch.device) -> dict[str, int]:
    """Return the launch constants of ``block_summary`` or ``pick`` for S samples of each position."""
    samples = min(triton.next_power_of_2(max(1, num_samples)), 512 if IS_INTERPRETED else 16)
    return {"SAMPLES_PER_PROGRAM": samples, **launches.launch_of(kernel, samples, device)}


@triton.jit
def load_logits(logits, depth, position, rows, n, V):
    """float32 logits of one depth and position, -inf beyond row V."""
    start = (depth * n + position).to(tl.int64) * V
    return tl.load(logits + start + rows, mask=rows < V, other=-float("inf")).to(tl.float32)


@triton.jit
def max_and_weights(logits):
    """The maximum of each line of a tile, and exp(logits - maximum), 0 in a line of -inf alone."""
    largest = tl.max(logits, 1)
    # -inf - (-inf) is nan: a line without a row is compared with 0.
    return largest, tl.exp(logits - tl.where(largest == -float("inf"), 0.0, largest)[:, None])


@triton.jit
def mixed_logits(
    logits,
    mixture_weights,
    never_sampled_mask,
    excluded,
    position,
    blocks,
    n,
    V,
    K: tl.constexpr,
    X: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The mixture's logits [len(blocks),ROWS] float32, -inf at rows that cannot be sampled, and the rows [len(blocks),ROWS]."""
    rows = blocks[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    mixed = tl.zeros(rows.shape, tl.float32)
    for depth in tl.static_range(K):
        gamma = tl.load(mixture_weights + position * K + depth)
        mixed += gamma * load_logits(logits, depth, position, rows, n, V)
    can_be_sampled = tl.load(never_sampled_mask + rows, mask=rows < V, other=1) == 0
    for number in tl.static_range(X):
        can_be_sampled = can_be_sampled & (rows != tl.load(excluded + position * X + number))
    return tl.where(can_be_sampled, mixed, -float("inf")), rows


@triton.jit
def summary_kernel(
    logits,
    mixture_weights,
    never_sampled_mask,
    part_max,
    part_sum,
    block_max,
    block_sum,
    n,
    V,
    G,
    P,
    K: tl.constexpr,
    SAMPLES: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Maxima and sums of exp(logits - maximum): of each depth for each part of the rows, of the mixture for each block.

    Programs (n, P). A block's sum is relative to the block's own maximum, so that it does not underflow.
    """
    # One position: its rows are contiguous, so that a warp loads whole cache lines and all depths share the mask.
    position, part = tl.program_id(0), tl.program_id(1)
    blocks = part * BLOCKS + tl.arange(0, BLOCKS)
    rows = blocks[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    mixed = tl.zeros([BLOCKS, ROWS], tl.float32)
    # Each logit is loaded once: it counts in its depth's sum, over all rows, and in the mixture, over rows that may be sampled.
    for depth in tl.static_range(K):
        depth_logits = load_logits(logits, depth, position, rows, n, V)
        largest, weights = max_and_weights(depth_logits)
        max_of_part = tl.max(largest, 0)
        # The lines of the tile have their own maxima; their sums are brought to that of the part. -inf - 0 where all are -inf.
        shrink = tl.exp(largest - tl.where(max_of_part == -float("inf"), 0.0, max_of_part))
        at = (depth * n + position).to(tl.int64) * P + part
        tl.store(part_max + at, max_of_part)
        tl.store(part_sum + at, tl.sum(tl.sum(weights, 1) * shrink, 0))
        if SAMPLES:
            mixed += tl.load(mixture_weights + position * K + depth) * depth_logits
    if SAMPLES:
        can_be_sampled = tl.load(never_sampled_mask + rows, mask=rows < V, other=1) == 0
        largest, weights = max_and_weights(tl.where(can_be_sampled, mixed, -float("inf")))
        at = position.to(tl.int64) * G + blocks
        tl.store(block_max + at, largest, mask=blocks < G)
        tl.store(block_sum + at, tl.sum(weights, 1), mask=blocks < G)


@triton.jit
def block_summary_kernel(
    logits,
    mixture_weights,
    never_sampled_mask,
    excluded,
    blocks,
    largest,
    total,
    n,
    V,
    S,
    K: tl.constexpr,
    X: tl.constexpr,
    SAMPLES_PER_PROGRAM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """As :func:`summary_kernel`, for given blocks of each position and without the excluded rows: programs (n, groups of S)."""
    position, samples = tl.program_id(0), tl.program_id(1) * SAMPLES_PER_PROGRAM + tl.arange(0, SAMPLES_PER_PROGRAM)
    at = position.to(tl.int64) * S + samples
    block = tl.load(blocks + at, mask=samples < S, other=0).to(tl.int32)
    mixed, _ = mixed_logits(logits, mixture_weights, never_sampled_mask, excluded, position, block, n, V, K, X, ROWS)
    max_of_block, weights = max_and_weights(mixed)
    tl.store(largest + at, max_of_block, mask=samples < S)
    tl.store(total + at, tl.sum(weights, 1), mask=samples < S)


@triton.jit
def pick_kernel(
    logits,
    mixture_weights,
    never_sampled_mask,
    excluded,
    blocks,
    points,
    picked,
    picked_logits,
    n,
    V,
    S,
    K: tl.constexpr,
    X: tl.constexpr,
    SAMPLES_PER_PROGRAM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The row of each given block that its point selects, and the logits of that row: programs (n, groups of S)."""
    position, samples = tl.program_id(0), tl.program_id(1) * SAMPLES_PER_PROGRAM + tl.arange(0, SAMPLES_PER_PROGRAM)
    at = position.to(tl.int64) * S + samples
    # A line of the tile is the block of one sample: 64 logits are one cache line, at an address of its own.
    block = tl.load(blocks + at, mask=samples < S, other=0).to(tl.int32)
    point = tl.load(points + at, mask=samples < S, other=0.0)
    mixed, _ = mixed_logits(logits, mixture_weights, never_sampled_mask, excluded, position, block, n, V, K, X, ROWS)
    _, weights = max_and_weights(mixed)
    # The inverse of the distribution function: the first row whose cumulative weight is beyond the point. In float64 the sum
    # does not lose the weights of 64 rows that differ by many orders of magnitude.
    ends = tl.cumsum(weights.to(tl.float64), 1)
    # A parallel cumulative sum may change by a rounding error at a row of weight 0; such a row must not be selected.
    has_weight = weights > 0
    columns = tl.arange(0, ROWS)[None, :]
    reached = has_weight & (ends > (point * tl.max(ends, 1))[:, None])
    first = tl.min(tl.where(reached, columns, ROWS), 1)
    last = tl.max(tl.where(has_weight, columns, 0), 1)  # row 0 of the block where all weights are nan
    row = block * ROWS + tl.minimum(first, last)
    tl.store(picked + at, row.to(tl.int64), mask=samples < S)
    for depth in tl.static_range(K):
        tl.store(picked_logits + at * K + depth, load_logits(logits, depth, position, row, n, V), mask=samples < S)


@triton.jit
def gradient_kernel(
    logits, log_sum, targets, grad_nll, sums, n, V, K, POSITIONS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    """(softmax - onehot(target)) times the gradient of the loss, in place of the logits, and its sum over some positions.

    Programs (groups of POSITIONS of n, blocks of ROWS of V, K).
    """
    group, depth = tl.program_id(0), tl.program_id(2)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # TILE positions at a time; the sum over them is taken once, after the loop.
    total = tl.zeros([TILE, ROWS], tl.float32)
    for start in range(group * POSITIONS, tl.minimum(n, (group + 1) * POSITIONS), TILE):
        positions = start + tl.arange(0, TILE)
        inside = positions < n
        log_sums = tl.load(log_sum + depth * n + positions, mask=inside, other=0.0)
        factors = tl.load(grad_nll + depth * n + positions, mask=inside, other=0.0)
        target = tl.load(targets + positions, mask=inside, other=-1).to(tl.int32)
        at = logits + (depth * n + positions).to(tl.int64)[:, None] * V + rows[None, :]
        mask = inside[:, None] & (rows < V)[None, :]
        tile_logits = tl.load(at, mask=mask, other=-float("inf")).to(tl.float32)
        # Loaded before the store below overwrites it. Beyond the last row exp(-inf) is 0.
        probs = tl.exp(tile_logits - log_sums[:, None])
        grad_logits = (probs - (rows[None, :] == target[:, None]).to(tl.float32)) * factors[:, None]
        tl.store(at, grad_logits.to(logits.dtype.element_ty), mask=mask)
        total += grad_logits
    tl.store(sums + (group * K + depth).to(tl.int64) * V + rows, tl.sum(total, 0), mask=rows < V)


@library.custom_op("amos_fairseq::summarize_logits", mutates_args=())
def summarize_logits(
    logits: Tensor, mixture_weights: Tensor | None, never_sampled_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute maxima and sums of exp(logits - maximum), in one pass over the logits.

    Args:
        logits: [K,n,V], contiguous; float16, bfloat16 or float32.
        mixture_weights: gamma [n,K] float32, contiguous; None if nothing will be sampled.
        never_sampled_mask: [V] bool, rows that are never sampled; None with ``mixture_weights``.

    Returns:
        Maximum and sum of each depth and part, [K,n,P] float32, over every row; maximum and sum of the mixture's blocks,
        [n,G] float32 (G = 0 if nothing will be sampled), over the rows that may be sampled: -inf and 0 in a block without
        any.
    """
    K, n, V = logits.shape
    outputs = empty_summary(logits, mixture_weights is not None)
    assert logits.is_contiguous()  # the kernel computes addresses from the shape alone
    with torch.cuda.device_of(logits):
        summary_kernel[(n, outputs[0].size(-1))](
            logits,
            logits if mixture_weights is None else mixture_weights,
            logits if never_sampled_mask is None else never_sampled_mask,
            *outputs,
            n,
            V,
            outputs[2].size(-1),
            outputs[0].size(-1),
            K=K,
            SAMPLES=mixture_weights is not None,
            BLOCKS=PART_BLOCKS,
            ROWS=BLOCK_ROWS,
            **launches.launch_of("summary", 0, logits.device),
        )
    return outputs


@summarize_logits.register_fake
def _(logits, mixture_weights, never_sampled_mask):
    return empty_summary(logits, mixture_weights is not None)


def empty_summary(logits: Tensor, samples: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    K, n, V = logits.shape
    num_blocks = num_parts(V, BLOCK_ROWS)
    part_shape, block_shape = (K, n, num_parts(num_blocks, PART_BLOCKS)), (n, num_blocks if samples else 0)
    shapes = (part_shape, part_shape, block_shape, block_shape)
    return tuple(logits.new_empty(shape, dtype=torch.float32) for shape in shapes)


def num_parts(count: int, size: int) -> int:
    return -(-count // size)


@library.custom_op("amos_fairseq::summarize_blocks", mutates_args=())
def summarize_blocks(
    logits: Tensor, mixture_weights: Tensor, never_sampled_mask: Tensor, excluded: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor]:
    """As :func:`summarize_logits`, for given blocks of each position and without the excluded rows.

    Loads BLOCK_ROWS logits of K depths for each of the n S blocks, not the whole chunk.

    Args:
        logits, mixture_weights, never_sampled_mask: as for :func:`summarize_logits`.
        excluded: [n,X] int64 rows, contiguous; X is at least 1.
        blocks: [n,S] int64, contiguous.

    Returns:
        Maximum and sum, [n,S] float32.
    """
    K, n, V = logits.shape
    largest, total = (torch.empty(blocks.shape, dtype=torch.float32, device=logits.device) for _ in range(2))
    launch = sampling_launch("block_summary", blocks.size(1), logits.device)
    assert logits.is_contiguous()  # the kernel computes addresses from the shape alone
    with torch.cuda.device_of(logits):
        block_summary_kernel[(n, triton.cdiv(blocks.size(1), launch["SAMPLES_PER_PROGRAM"]))](
            logits,
            mixture_weights,
            never_sampled_mask,
            excluded,
            blocks,
            largest,
            total,
            n,
            V,
            blocks.size(1),
            K=K,
            X=excluded.size(1),
            ROWS=BLOCK_ROWS,
            **launch,
        )
    return largest, total


@summarize_blocks.register_fake
def _(logits, mixture_weights, never_sampled_mask, excluded, blocks):
    return tuple(logits.new_empty(blocks.shape, dtype=torch.float32) for _ in range(2))


@library.custom_op("amos_fairseq::pick_rows", mutates_args=())
def pick_rows(
    logits: Tensor,
    mixture_weights: Tensor,
    never_sampled_mask: Tensor,
    excluded: Tensor,
    blocks: Tensor,
    points: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the first row of each block whose cumulative weight exceeds a point, summed in float64; never a row of weight 0.

    Loads BLOCK_ROWS logits of K depths for each of the n S samples, not the whole chunk. Where no row of the block has a weight
    above 0, or weights are nan, the result is a valid but meaningless row.

    Args:
        logits, mixture_weights, never_sampled_mask: as for :func:`summarize_logits`.
        excluded: [n,X] int64 rows that are not picked at the position, contiguous; X may be 0.
        blocks: [n,S] int64, contiguous.
        points: [n,S] float64 in [0, 1), contiguous; shares of the block's sum.

    Returns:
        Rows [n,S] int64 and the logits of each depth there, [n,S,K] float32.
    """
    K, n, V = logits.shape
    rows, depth_logits = empty_picked(logits, blocks)
    launch = sampling_launch("pick", blocks.size(1), logits.device)
    assert logits.is_contiguous()  # the kernel computes addresses from the shape alone
    with torch.cuda.device_of(logits):
        pick_kernel[(n, triton.cdiv(blocks.size(1), launch["SAMPLES_PER_PROGRAM"]))](
            logits,
            mixture_weights,
            never_sampled_mask,
            excluded,
            blocks,
            points,
            rows,
            depth_logits,
            n,
            V,
            blocks.size(1),
            K=K,
            X=excluded.size(1),
            ROWS=BLOCK_ROWS,
            **launch,
        )
    return rows, depth_logits


@pick_rows.register_fake
def _(logits, mixture_weights, never_sampled_mask, excluded, blocks, points):
    return empty_picked(logits, blocks)


def empty_picked(logits: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(blocks), logits.new_empty((*blocks.shape, len(logits)), dtype=torch.float32)


@library.custom_op("amos_fairseq::gradient_of_logits", mutates_args=("logits",))
def gradient_of_logits(logits: Tensor, log_sum: Tensor, targets: Tensor, grad_nll: Tensor) -> Tensor:
    """Compute d nll / d logits times ``grad_nll``, (softmax(logits) - onehot(target)) grad_nll, in place of the logits.

    One pass: it loads every logit and writes its gradient, rounded once from float32.

    Args:
        logits: [K,n,V], contiguous; becomes the gradient.
        log_sum: [K,n] float32, contiguous, the log of each softmax's denominator.
        targets: [n] int64, contiguous.
        grad_nll: [K,n] float32, contiguous.

    Returns:
        The gradient before it was rounded, summed over the positions of each group: [groups,K,V] float32. All groups
        together hold 4 bytes for every GRADIENT_POSITIONS logits.
    """
    K, n, V = logits.shape
    sums = empty_sums(logits)
    assert logits.is_contiguous()  # the kernel computes addresses from the shape alone
    launch = launches.launch_of("gradient", 0, logits.device)
    with torch.cuda.device_of(logits):
        gradient_kernel[(len(sums), triton.cdiv(V, launch["ROWS"]), K)](
            logits, log_sum, targets, grad_nll, sums, n, V, K, POSITIONS=GRADIENT_POSITIONS, **launch
        )
    return sums


@gradient_of_logits.register_fake
def _(logits, log_sum, targets, grad_nll):
    return empty_sums(logits)


def empty_sums(logits: Tensor) -> Tensor:
    K, n, V = logits.shape
    return logits.new_empty((num_parts(n, GRADIENT_POSITIONS), K, V), dtype=torch.float32)
