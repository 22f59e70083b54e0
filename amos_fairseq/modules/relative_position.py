"""A learned bias per head and relative position, with one table for all layers of an encoder."""

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from amos_fairseq.functional.relative_position import BUCKETS, toeplitz


class RelativePositionBias(nn.Module):
    """The bias that is added to q.k / sqrt(d) (T5: Raffel et al., 2019; AMOS section 4).

    The table does not depend on the sequence length, so the model accepts longer sequences than in training.

    Args:
        scheme: ``t5`` or ``amos``, see :mod:`amos_fairseq.functional.relative_position`.
        num_buckets: rows of the table.
        max_distance: distances from here on share a bucket.
        num_heads: columns of the table.

    Raises:
        ValueError: an odd number of buckets, or so few buckets or so small a maximum distance that none is logarithmic.
    """

    def __init__(self, scheme: str, num_buckets: int, max_distance: int, num_heads: int):
        super().__init__()
        check_buckets(scheme, num_buckets, max_distance)
        self.bucket = BUCKETS[scheme]
        self.max_distance = max_distance
        self.table = nn.Embedding(num_buckets, num_heads)

    def forward(self, length: int) -> Tensor:
        """Return [H, T, T] for T = ``length``, contiguous; entry (h, i, j) belongs to query i and key j."""
        return toeplitz(self.values(length))

    def values(self, length: int) -> Tensor:
        """Return [H, 2T-1] for T = ``length``, contiguous; entry (h, w) belongs to key - query = w - (T-1).

        The result is float32 (float64 for a float64 table), also for a table in 16 bits: the gradient of a row sums
        thousands of entries, and in bfloat16 such a sum is wrong by several percent. It is cast to the dtype of the table
        once, at the end.
        """
        table = self.table.weight
        distance = torch.arange(1 - length, length, device=table.device)
        rows = self.bucket(distance, self.table.num_embeddings, self.max_distance)
        values = embedding(rows, table.to(torch.promote_types(table.dtype, torch.float32)))  # [2T-1, H]
        return values.t().contiguous()


def check_buckets(scheme: str, num_buckets: int, max_distance: int) -> None:
    """Raise ValueError if the logarithm of the buckets has no base above 1, or the two directions no equal share."""
    if num_buckets < 4:
        raise ValueError(f"--relative-position-buckets {num_buckets} is too few: give at least 4, an even number")
    if num_buckets % 2:
        raise ValueError(
            f"--relative-position-buckets {num_buckets} is odd: give an even number, half of them for each direction"
        )
    largest_exact = num_buckets // 4 + 1 if scheme == "amos" else num_buckets // 4
    if max_distance <= largest_exact:
        raise ValueError(
            f"--relative-position-max-distance {max_distance} is too small for --relative-position-buckets {num_buckets} "
            f"of scheme {scheme}: give more than {largest_exact}"
        )
