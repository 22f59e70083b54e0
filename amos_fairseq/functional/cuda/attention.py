"""Self-attention with a learned Toeplitz bias as operators of PyTorch, over the kernels of :mod:`.attention_kernels`.

Shapes: B sequences, T tokens, M queries (T, or some positions of every sequence), H heads, d width of a head.
"""

import torch
import triton
from torch import Tensor, library
from torch.utils.flop_counter import register_flop_formula

from amos_fairseq.functional.cuda.attention_kernels import (
    ALL,
    FUTURE,
    IS_INTERPRETED,
    PAST,
    backward_kernel,
    delta_kernel,
    forward_kernel,
    window_kernel,
)

SIDES = {"all": ALL, "past": PAST, "future": FUTURE}


def forward_launch(width: int) -> dict[str, int]:
    """Tile sizes and warps of the forward pass for heads of ``width``; small tiles where Python interprets each program.

    Chosen by what the compiler reports for sm_80 and sm_90: up to d = 64 no register is spilled. To be tuned on a GPU (not
    run).
    """
    wide = max(16, triton.next_power_of_2(width))
    block = 16 if IS_INTERPRETED else 64
    return {"BLOCK_M": block, "BLOCK_N": block, "BLOCK_D": wide, "num_warps": 4, "num_stages": 3 if wide <= 64 else 2}


def backward_launch(width: int) -> dict[str, int]:
    """The same for the backward pass, whose tiles are square.

    It needs 255 registers for each of 256 threads, so that one program runs on a multiprocessor at a time, and spills a few
    (on sm_90 40 bytes at d = 64, on sm_80 72). Four warps, or loads that are prefetched, spilled several times as much.
    """
    wide = max(16, triton.next_power_of_2(width))
    return {"BLOCK": 16 if IS_INTERPRETED else 64, "BLOCK_D": wide, "num_warps": 8, "num_stages": 1}


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
    launch = forward_launch(D)
    check_layout(heads, bias, padding, positions)
    with torch.cuda.device_of(heads):
        forward_kernel[(triton.cdiv(M, launch["BLOCK_M"]) * B * H,)](
            heads, *given(heads, bias, padding), seed, given(heads, positions)[0], out, lse, *scalars(D, dropout), T, M, H, D,
            **flags(bias, padding, positions, side, dropout, T, launch["BLOCK_M"]), **launch,
        )  # fmt: skip
    return out, lse


@attention_op.register_fake
def _(heads, bias, padding, seed, positions, side, dropout):
    B, T, _, H, D = heads.shape
    M = T if positions is None else positions.size(1)
    return heads.new_empty(B, M, H, D), heads.new_empty(B, H, M, dtype=torch.float32)


@library.custom_op("amos_fairseq::attention_backward", mutates_args=())
def attention_backward_op(
    grad: Tensor, heads: Tensor, bias: Tensor | None, padding: Tensor | None, seed: Tensor, positions: Tensor | None,
    out: Tensor, lse: Tensor, side: int, dropout: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, T, _, H, D = heads.shape
    M = out.size(1)
    has_bias, has_positions = bias is not None, positions is not None
    launch = backward_launch(D)
    block = launch["BLOCK"]
    middle = triton.cdiv(T, block) * block
    delta, query_sums = torch.empty_like(lse), heads.new_empty(B, H, M, D, dtype=torch.float32)
    grad_heads = torch.empty_like(heads)
    grad_query = heads.new_empty(B, M, H, D) if has_positions else grad_heads
    by_distance = heads.new_zeros((B, H, 2 * middle) if has_bias and not has_positions else (1,), dtype=torch.float32)
    by_scores = heads.new_empty((B, H, M, T) if has_bias and has_positions else (1,), dtype=torch.float32)
    with torch.cuda.device_of(heads):
        delta_kernel[(triton.cdiv(M, block) * B * H,)](
            out, grad, delta, M, H, D, BLOCK_M=block, BLOCK_D=launch["BLOCK_D"]
        )
        backward_kernel[(B * H,)](
            heads, *given(heads, bias, padding), seed, given(heads, positions)[0], grad, lse, delta, query_sums, grad_query,
            grad_heads, by_distance, by_scores, *scalars(D, dropout), T, M, H, D, (1 if has_positions else 3) * H * D,
            **flags(bias, padding, positions, side, dropout, T, block), **launch,
        )  # fmt: skip
    if has_positions:
        # A position may be given several times. A product adds its gradients in a fixed order and in float32.
        is_given = positions.unsqueeze(1) == torch.arange(T, device=heads.device).unsqueeze(1)  # [B,T,M]
        grad_heads[:, :, 0] = (is_given.to(heads.dtype) @ grad_query.flatten(2)).unflatten(2, (H, D))
    if not has_bias:
        return grad_heads, heads.new_empty(0, dtype=torch.float32)
    if has_positions:
        return grad_heads, sum_of_windows(by_scores, positions)
    return grad_heads, by_distance.sum(0)[:, middle - T + 1 : middle + T].contiguous()


@attention_backward_op.register_fake
def _(grad, heads, bias, padding, seed, positions, out, lse, side, dropout):
    return torch.empty_like(heads), heads.new_empty(bias.shape if bias is not None else (0,), dtype=torch.float32)


@register_flop_formula(torch.ops.amos_fairseq.attention)
def forward_flops(heads: torch.Size, *args, out_shape: tuple[torch.Size, ...], **kwargs) -> int:
    """Scores, and their product with the values."""
    return 2 * product_flops(heads, out_shape[0])


@register_flop_formula(torch.ops.amos_fairseq.attention_backward)
def backward_flops(grad: torch.Size, heads: torch.Size, *args, **kwargs) -> int:
    """Scores again, dP, and the three gradients."""
    return 5 * product_flops(heads, grad)


def product_flops(heads: torch.Size, out: torch.Size) -> int:
    B, T, _, H, d = heads
    return 2 * B * H * out[1] * T * d


def check_layout(heads: Tensor, bias: Tensor | None, padding: Tensor | None, positions: Tensor | None) -> None:
    """The kernels compute addresses from the shapes alone."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in (heads, bias, padding, positions))
    assert bias is None or bias.dtype == torch.float32


def sum_of_windows(scores: Tensor, positions: Tensor) -> Tensor:
    """dS [B,H,M,T] of queries at ``positions`` [B,M] -> [H,2T-1], summed by distance."""
    B, H, M, T = scores.shape
    block, groups = 128, max(1, min(B * M, 16))
    sums = torch.empty(groups, H, 2 * T - 1, dtype=torch.float32, device=scores.device)
    with torch.cuda.device_of(scores):
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


def flags(
    bias: Tensor | None,
    padding: Tensor | None,
    positions: Tensor | None,
    side: int,
    dropout: float,
    length: int,
    block: int,
) -> dict[str, object]:
    """What a kernel is compiled for; ``block`` is the largest side of its tiles."""
    return {
        "HAS_BIAS": bias is not None, "HAS_PADDING": padding is not None, "HAS_POSITIONS": positions is not None, "SIDE": side,
        "DROPS": dropout > 0, "MASKS": side != ALL or padding is not None or length % block != 0, "UPCAST": IS_INTERPRETED,
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
        heads: [B,T,3,H,d], query, key and value of every head, contiguous; float16, bfloat16, interpreted also float32.
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
    padding, positions = (None if tensor is None else tensor.contiguous() for tensor in (padding, positions))
    return attention_op(heads, bias, padding, seed, positions, SIDES[side], dropout)[0]
