"""Buckets of relative positions (key position minus query position).

``t5`` of Raffel et al. (2019) in its bidirectional form, which Hugging Face's MPNet also uses, ``amos``, that of the AMOS
authors' released checkpoint, and DeBERTa's, which has its buckets, but takes query minus key.
"""

import math

import torch
from torch import Tensor


def t5_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each relative position: [...] int64 -> [...] int64 in [0, num_buckets).

    Half of the buckets are for keys to the left or at the query, half for keys to the right. In each half, the lower half of
    the buckets holds one distance each; the others grow logarithmically up to ``max_distance``, and the last one holds all
    larger distances.
    """
    half = num_buckets // 2
    exact = half // 2
    size = distance.abs()
    steps = torch.log(size.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (half - exact)
    far = (exact + steps.long()).clamp(max=half - 1)
    return torch.where(distance > 0, half, 0) + torch.where(size < exact, size, far)


def amos_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the table row of each relative position: [...] int64 -> [...] int64 in [0, num_buckets - 2].

    Symmetric in sign: the bucket of the distance, whose logarithmic part is rounded up, gets the sign of the distance and is
    shifted by num_buckets / 2 - 1.

    Departures: the authors' code shifts by the largest bucket that the model's positions reach, which is the same from
    ``max_distance`` positions on. Here a row does not depend on the number of positions; the import of their checkpoint moves
    the rows of a smaller model.
    """
    half = num_buckets // 2
    exact = half // 2
    size = distance.abs()
    base = math.log((max_distance - 1) / exact)
    steps = torch.ceil(torch.log(size.float().clamp(min=1) / exact) / base * (half - 1 - exact))
    far = (exact + steps.long()).clamp(max=half - 1)
    return torch.where(size < exact, size, far) * distance.sign() + half - 1


BUCKETS = {"t5": t5_bucket, "amos": amos_bucket}


def deberta_rows(length: int, num_rows: int, max_distance: int, device: torch.device) -> Tensor:
    """Return the row of DeBERTa's table for each distance of query minus key, from T-1 down to 1-T: [2T-1] int64 in [1, R).

    With R = ``num_rows``, distances of up to R / 4 have a row each. Beyond they share logarithmic buckets, and all from
    ``max_distance`` - 1 on the last one. Distance 0 has row R / 2; row 0 is never used.
    """
    return amos_bucket(torch.arange(length - 1, -length, -1, device=device), num_rows, max_distance) + 1


def toeplitz(values: Tensor) -> Tensor:
    """Expand one value per distance to all pairs: [H, 2T-1] for distances -(T-1)..T-1 -> [H, T, T] (query, key).

    The result is contiguous whatever the strides of ``values``: CUDA's fused attention requires ``stride(-1) == 1``. The
    gradient of a value is the sum of a diagonal of up to T terms, so ``values`` should be float32 or wider.
    """
    length = (values.size(-1) + 1) // 2
    # Window w holds the distances w-(T-1)..w, which belong to query T-1-w.
    return values.contiguous().unfold(-1, length, 1).flip(1)
