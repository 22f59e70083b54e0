"""Buckets of relative positions (key position minus query position).

Two schemes: ``t5`` of Raffel et al. (2019) in its bidirectional form, which Hugging Face's MPNet uses too, and ``amos`` of the
AMOS authors' released checkpoint.
"""

import math

import torch
from torch import Tensor


def t5_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Bucket of each relative position [...] int64 -> [...] int64 in [0, num_buckets).

    Half of the buckets are for keys to the left or here, half for keys to the right. Of each half, the lower half holds
    one distance a bucket, the upper half grows logarithmically up to ``max_distance`` and holds everything beyond.
    """
    half = num_buckets // 2
    exact = half // 2
    size = distance.abs()
    steps = torch.log(size.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (half - exact)
    far = (exact + steps.long()).clamp(max=half - 1)
    return torch.where(distance > 0, half, 0) + torch.where(size < exact, size, far)


def amos_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Row of each relative position [...] int64 -> [...] int64 in [0, num_buckets - 2].

    Symmetric in sign: the bucket of the distance, rounded up on its logarithmic part, carries the sign of the distance
    and is shifted by num_buckets / 2 - 1 to become a row.
    """
    half = num_buckets // 2
    exact = half // 2
    size = distance.abs()
    base = math.log((max_distance - 1) / exact)
    steps = torch.ceil(torch.log(size.float().clamp(min=1) / exact) / base * (half - 1 - exact))
    far = (exact + steps.long()).clamp(max=half - 1)
    return torch.where(size < exact, size, far) * distance.sign() + half - 1


BUCKETS = {"t5": t5_bucket, "amos": amos_bucket}


def toeplitz(values: Tensor) -> Tensor:
    """Spread a value per distance over all pairs: [H, 2T-1] for distances -(T-1)..T-1 -> [H, T, T] (query, key).

    The result is contiguous whatever the strides of ``values``: CUDA's fused attention requires ``stride(-1) == 1``. The
    gradient of a value is the sum of a diagonal of up to T terms, so ``values`` should be float32 or wider.
    """
    length = (values.size(-1) + 1) // 2
    # Window w holds distances w-(T-1)..w, which is the row of query T-1-w.
    return values.contiguous().unfold(-1, length, 1).flip(1)
