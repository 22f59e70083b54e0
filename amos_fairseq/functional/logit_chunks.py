"""Chunks of positions whose logits fit in a given memory, and the operations on them that all output layers share.

Shapes: K depths, N positions, n positions of a chunk, V padded vocabulary size.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Size of the logits of a chunk; with intermediate results about three times as much is allocated. On a GPU enough positions
# (1,024 at V = 32,768) for a product that keeps every multiprocessor busy. On a CPU below 32 MB, from which on glibc maps
# memory for each tensor separately: with 64 MB the page faults made a pass of 320 positions in bfloat16 a third slower.
CHUNK_BYTES = {"cuda": 128 * 2**20}
CHUNK_BYTES_ELSEWHERE = 24 * 2**20

# The logit of a token that is never sampled. Finite, so that 0 times it, in a mixture of depths, is not nan.
NEVER_SAMPLED_LOGIT = -1e30


def chunks(num_positions: int, bytes_per_position: int, device: torch.device) -> Iterator[slice]:
    """Split the positions into chunks of at most CHUNK_BYTES, all of nearly one size, of at least one position each."""
    return equal_parts(num_positions, CHUNK_BYTES.get(device.type, CHUNK_BYTES_ELSEWHERE) // bytes_per_position)


def equal_parts(num_positions: int, max_size: int) -> Iterator[slice]:
    """Split the positions into parts of at most ``max_size`` (at least one) positions; no positions are one empty part."""
    num_parts = max(1, math.ceil(num_positions / max(1, max_size)))
    size = max(1, math.ceil(num_positions / num_parts))
    return (slice(start, min(start + size, num_positions)) for start in range(0, max(1, num_positions), size))


def target_index(targets: Tensor, num_depths: int) -> Tensor:
    """Return the index [K,n,1] of ``targets`` [n], for gather and scatter on [K,n,V]."""
    return targets.view(1, -1, 1).expand(num_depths, -1, -1)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left right to ``total``, which may have a wider dtype: a sum in half precision would lose small addends."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half precision, and ``dtype`` otherwise."""
    return torch.promote_types(dtype, torch.float32)
