"""Attention to keys within a distance, in blocks: no score of a pair that is farther apart than three blocks is computed.

Shapes: B sequences, T tokens, n blocks of w tokens, H heads, d width of a head.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from amos_fairseq.functional.attention import is_excluded

# Lengths from which blocks are used, in multiples of the largest distance. Below, one product of all pairs is faster.
BLOCKS_FROM = 8


def runs_in_blocks(length: int, reach: int) -> bool:
    """Return whether :func:`window_attention` is used for sequences of T = ``length`` tokens."""
    return reach > 0 and length >= BLOCKS_FROM * reach


def window_attention(heads: Tensor, mask: Tensor, dropout: float) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v over the keys within the distance w of each query.

    Args:
        heads: [B,T,3,H,d], query, key and value of every head.
        mask: [B or 1, n, w, 3w] bool from :func:`block_mask`, True where a query attends to a key.
        dropout: probability of dropping a weight.

    Returns:
        [B,T,H,d].
    """
    B, T, _, H, d = heads.shape
    n, w = mask.shape[1:3]
    query, key, value = pad(heads, (0, 0) * 3 + (0, n * w - T)).unbind(2)  # each [B,nw,H,d]
    query = query.view(B * n, w, H, d).transpose(1, 2)  # [Bn,H,w,d]
    # Each block of queries with the block before, its own, and the one after.
    key, value = (
        pad(part, (0, 0, 0, 0, w, w)).unfold(1, 3 * w, w).permute(0, 1, 2, 4, 3).reshape(B * n, H, 3 * w, d)
        for part in (key, value)
    )
    attends = mask.expand(B, n, w, 3 * w).reshape(B * n, 1, w, 3 * w)
    attended = scaled_dot_product_attention(query, key, value, attn_mask=attends, dropout_p=dropout)
    return attended.transpose(1, 2).reshape(B, n * w, H, d)[:, :T]


def block_mask(
    length: int, reach: int, padding_mask: Tensor | None, side: str = "all", *, device: torch.device
) -> Tensor:
    """Return True where a query of a block attends to a key of the three blocks around it: [B or 1, n, w, 3w] bool.

    Args:
        length: T; n is T / w, rounded up.
        reach: w, the largest distance.
        padding_mask: [B,T] bool, True at padding; None if there is none.
        side: attend to all keys, or to the "past" or "future" keys and the query's own position.
    """
    n = -(-length // reach)
    queries = torch.arange(n * reach, device=device).view(n, reach, 1)
    keys = torch.arange(-reach, 2 * reach, device=device) + torch.arange(0, n * reach, reach, device=device)[:, None]
    ahead = keys[:, None] - queries  # [n,w,3w]
    is_key = ((keys >= 0) & (keys < length))[:, None]  # [n,1,3w]
    attends = (~is_excluded(ahead, side, reach) & is_key)[None]
    if padding_mask is not None:
        is_text = pad(~padding_mask, (reach, n * reach - length + reach))
        attends = attends & is_text.unfold(1, 3 * reach, reach).unsqueeze(2)
    return attends | (ahead == 0)  # padding, too, attends to itself
