"""Self-attention with a learned Toeplitz bias as PyTorch operators that launch the kernels of :mod:`.attention_kernels`.

Shapes: B sequences, T tokens, M queries (T, or some positions of every sequence), H heads, d width of a head.
"""

import torch
import triton
from torch import Tensor, library
from torch.utils.flop_counter import register_flop_formula

from amos_fairseq.functional.cuda import launches
from amos_fairseq.functional.cuda.attention_kernels import (
    ALL,
    CELL,
    FUTURE,
    IS_INTERPRETED,
    PAST,
    distance_kernel,
    forward_kernel,
    key_kernel,
    query_kernel,
    window_kernel,
)

SIDES = {"all": ALL, "past": PAST, "future": FUTURE}


@library.custom_op("amos_fairseq::attention", mutates_args=())
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
    launch = launches.launch_of("attention_forward", D, heads.device)
    check_layout(heads, bias, padding, positions)
    with torch.cuda.device_of(heads):
        forward_kernel[(triton.cdiv(M, launch["BLOCK_M"]) * B * H,)](
            heads,
            *pointers(heads, bias, padding),
            seed,
            *pointers(heads, positions),
            out,
            lse,
            *scalars(D, dropout),
            T,
            M,
            H,
            D,
            **flags(bias, padding, positions, side, dropout, T, M, launch),
            **launch,
        )
    return out, lse


@attention_op.register_fake
def _(heads, bias, padding, seed, positions, side, dropout):
    B, T, _, H, D = heads.shape
    M = T if positions is None else positions.size(1)
    return heads.new_empty(B, M, H, D), heads.new_empty(B, H, M, dtype=torch.float32)


@library.custom_op("amos_fairseq::attention_backward", mutates_args=())
def attention_backward_op(
    grad: Tensor,
    heads: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    seed: Tensor,
    positions: Tensor | None,
    out: Tensor,
    lse: Tensor,
    side: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    B, T, _, H, D = heads.shape
    M = out.size(1)
    has_bias, has_positions = bias is not None, positions is not None
    of_queries, of_keys = (
        launches.launch_of(f"attention_backward_{what}", D, heads.device) for what in ("query", "key")
    )
    block = of_queries["BLOCK"]
    query_blocks, num_cells = triton.cdiv(M, block), (triton.cdiv(T, block) + 1) * (block // CELL.value)
    delta = torch.empty_like(lse)
    grad_heads = torch.empty_like(heads)
    grad_query = heads.new_empty(B, M, H, D) if has_positions else grad_heads
    # A one-sided block writes the cells of the keys that it attends to.
    new_cells = heads.new_empty if side == ALL else heads.new_zeros
    cell_shape = (B, H, query_blocks, num_cells, CELL.value, CELL.value)
    cell_sums = new_cells(cell_shape if has_bias and not has_positions else (1,), dtype=torch.float32)
    grad_scores = heads.new_empty((B, H, M, T) if has_bias and has_positions else (1,), dtype=torch.float32)
    with torch.cuda.device_of(heads):
        query_kernel[(query_blocks * B * H,)](
            heads,
            *pointers(heads, bias, padding),
            seed,
            *pointers(heads, positions),
            out,
            grad,
            lse,
            delta,
            grad_query,
            cell_sums,
            grad_scores,
            *scalars(D, dropout),
            T,
            M,
            H,
            D,
            (1 if has_positions else 3) * H * D,
            **flags(bias, padding, positions, side, dropout, T, M, of_queries),
            **of_queries,
        )
        key_kernel[(triton.cdiv(T, of_keys["BLOCK_N"]) * B * H,)](
            heads,
            *pointers(heads, bias, padding),
            seed,
            *pointers(heads, positions),
            grad,
            lse,
            delta,
            grad_heads,
            *scalars(D, dropout),
            T,
            M,
            H,
            D,
            **flags(bias, padding, positions, side, dropout, T, M, of_keys),
            **of_keys,
        )
    if has_positions:
        # A position may occur several times. A product adds its gradients in a fixed order.
        is_position = positions.unsqueeze(1) == torch.arange(T, device=heads.device).unsqueeze(1)  # [B,T,M]
        grad_heads[:, :, 0] = (is_position.to(heads.dtype) @ grad_query.flatten(2)).unflatten(2, (H, D))
    if not has_bias:
        return grad_heads, heads.new_empty(0, dtype=torch.float32)
    if has_positions:
        return grad_heads, sum_of_windows(grad_scores, positions)
    return grad_heads, sum_by_distance(cell_sums, T, M, block)


@attention_backward_op.register_fake
def _(grad, heads, bias, padding, seed, positions, out, lse, side, dropout):
    return torch.empty_like(heads), heads.new_empty(bias.shape if bias is not None else (0,), dtype=torch.float32)


@register_flop_formula(torch.ops.amos_fairseq.attention)
def forward_flops(heads: torch.Size, *args, out_shape: tuple[torch.Size, ...], **kwargs) -> int:
    """Count the scores and their product with the values."""
    return 2 * product_flops(heads, out_shape[0])


@register_flop_formula(torch.ops.amos_fairseq.attention_backward)
def backward_flops(grad: torch.Size, heads: torch.Size, *args, **kwargs) -> int:
    """Count the scores again, dP, and the three gradients; the two kernels compute the first two twice."""
    return 5 * product_flops(heads, grad)


def product_flops(heads: torch.Size, out: torch.Size) -> int:
    B, T, _, H, d = heads
    return 2 * B * H * out[1] * T * d


def check_layout(heads: Tensor, bias: Tensor | None, padding: Tensor | None, positions: Tensor | None) -> None:
    """Check that tensors are contiguous: the kernels compute addresses from the shapes alone. Dropout counts to 2^16."""
    assert heads.size(1) < 2**16
    assert positions is None or positions.size(1) < 2**16
    assert all(tensor is None or tensor.is_contiguous() for tensor in (heads, bias, padding, positions))
    assert bias is None or bias.dtype == torch.float32


def sum_by_distance(cell_sums: Tensor, T: int, M: int, block: int) -> Tensor:
    """Sum the cells [B,H,blocks of M,cells,8,8] of dS by distance: [H,2T-1]."""
    B, H = cell_sums.shape[:2]
    distances, groups = 128, min(B, 16)
    each = triton.cdiv(B, groups)
    sums = torch.empty(groups, H, 2 * T - 1, dtype=torch.float32, device=cell_sums.device)
    with torch.cuda.device_of(cell_sums):
        distance_kernel[(triton.cdiv(2 * T - 1, distances), H, groups)](
            cell_sums, sums, B, T, M, H, each, BLOCK=block, DISTANCES=distances
        )
    return sums.sum(0)


def sum_of_windows(scores: Tensor, positions: Tensor) -> Tensor:
    """Sum dS [B,H,M,T] of queries at ``positions`` [B,M] by distance: [H,2T-1]."""
    B, H, M, T = scores.shape
    block, groups = 128, max(1, min(B * M, 16))
    sums = torch.empty(groups, H, 2 * T - 1, dtype=torch.float32, device=scores.device)
    with torch.cuda.device_of(scores):
        window_kernel[(triton.cdiv(2 * T - 1, block), H, groups)](
            scores, positions, sums, B, M, T, H, triton.cdiv(B * M, groups), BLOCK=block
        )
    return sums.sum(0)


def pointers(placeholder: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Replace None by ``placeholder``: a kernel needs a pointer also for an absent tensor."""
    return [placeholder if tensor is None else tensor for tensor in tensors]


def scalars(width: int, dropout: float) -> tuple[float, float, int]:
    """Return 1 / sqrt(d), 1 / (1 - p), and the number below which 32 random bits drop a weight."""
    return width**-0.5, 1 / (1 - dropout), min(round(dropout * 2**32), 2**32 - 1)


def flags(
    bias: Tensor | None,
    padding: Tensor | None,
    positions: Tensor | None,
    side: int,
    dropout: float,
    length: int,
    num_queries: int,
    launch: dict[str, int],
) -> dict[str, object]:
    """Return the compile-time constants of a kernel besides those of ``launch``."""
    block_m, block_n = (launch.get(name, launch.get("BLOCK")) for name in ("BLOCK_M", "BLOCK_N"))
    # A masked score is computed from the queries' and keys' numbers, so that both sides of a tile must be checked.
    partial = length % block_n != 0 or (positions is None and length % block_m != 0)
    return {
        "HAS_BIAS": bias is not None,
        "HAS_PADDING": padding is not None,
        "HAS_POSITIONS": positions is not None,
        "SIDE": side,
        "DROPS": dropout > 0,
        "MASKS": side != ALL or padding is not None or partial,
        "CHECKS_ROWS": num_queries % block_m != 0,
        "UPCAST": IS_INTERPRETED,
    }


def _save_for_backward(ctx, inputs, output) -> None:
    heads, bias, padding, seed, positions, ctx.side, ctx.dropout = inputs
    ctx.save_for_backward(heads, bias, padding, seed, positions, *output)


def _backward(ctx, grad: Tensor, _) -> tuple[Tensor | None, ...]:
    heads, bias, padding, seed, positions, out, lse = ctx.saved_tensors
    grad_heads, grad_bias = attention_backward_op(
        grad.contiguous(), heads, bias, padding, seed, positions, out, lse, ctx.side, ctx.dropout
    )
    return grad_heads, None if bias is None else grad_bias, None, None, None, None, None


attention_op.register_autograd(_backward, setup_context=_save_for_backward)


def triton_attention(
    heads: Tensor,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    side: str = "all",
    dropout: float = 0.0,
    positions: Tensor | None = None,
) -> Tensor:
    """Compute attention of every query, or only of those at ``positions``.

    Args:
        heads: [B,T,3,H,d], query, key and value of every head, contiguous; float16 or bfloat16 (interpreted also float32).
        bias: [H,2T-1] float32, contiguous, added to the score of every pair by key - query + T - 1; None for zeros.
        padding: [B,T] bool, True at keys that are not attended to; None if there are none.
        side: attend to ``all`` keys, or to the ``past`` or ``future`` keys and the query's own position.
        dropout: a probability below 1; the other weights are scaled by 1 / (1 - dropout). PyTorch's generator gives the seed.
        positions: [B,M] int64.

    Returns:
        [B,T,H,d] or [B,M,H,d], in the dtype of ``heads``.
    """
    seed = (
        torch.randint(2**31 - 1, (1,), device=heads.device, dtype=torch.int64)
        if dropout
        else heads.new_empty(1, dtype=torch.int64)
    )
    padding, positions = (None if tensor is None else tensor.contiguous() for tensor in (padding, positions))
    return attention_op(heads, bias, padding, seed, positions, SIDES[side], dropout)[0]
