"""Attention to keys within a distance, in blocks: no score of a pair that is farther apart than three blocks is computed.

Shapes: B sequences, T tokens, n blocks of w tokens, H heads, d width of a head.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from amos_fairseq.functional import attention
from amos_fairseq.functional.attention import HALF_PRECISION, AttentionBias, is_excluded, scores_of_masked_pairs

# Lengths from which blocks are used, in multiples of the largest distance. Forward and backward, w = 64, H = 6, d = 64, 4,096
# tokens, one busy core of an AMD EPYC (25 November 2026), all pairs and blocks: T = 512 in float32 343 and 218 milliseconds, in
# bfloat16 187 and 250; T = 1024 in float32 739 and 226, in bfloat16 354 and 274. GPUs: not run.
BLOCKS_FROM = 8
BLOCKS_FROM_IN_HALF_PRECISION_ON_A_CPU = 16


def runs_in_blocks(length: int, reach: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether :func:`window_attention` is used for sequences of T = ``length`` tokens, rather than a T x T mask."""
    is_slow = device.type == "cpu" and dtype in HALF_PRECISION
    return reach > 0 and length >= reach * (BLOCKS_FROM_IN_HALF_PRECISION_ON_A_CPU if is_slow else BLOCKS_FROM)


def window_attention(heads: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v over the keys within the distance w of each query.

    Args:
        heads: [B,T,3,H,d], query, key and value of every head.
        mask: [Bn,1,w,3w] from :func:`block_mask`, added to the scores.
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
        backend = attention.choose_backend(heads.device, heads.dtype, d, has_bias=True)
        mask = attention.as_attention_mask(AttentionBias(fixed=mask), heads.dtype)
        attended = attention.fused_attention(query, key, value, mask, dropout, backend)
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
