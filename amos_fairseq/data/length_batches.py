"""Sequences of like length together, so that little of a batch is padding."""

from collections.abc import Iterator, Sequence

import numpy as np


def batches_by_length(lengths: Sequence[int] | np.ndarray, tokens_per_batch: int) -> Iterator[list[int]]:
    """Indices of ``lengths`` in batches of at most ``tokens_per_batch`` tokens with padding, the longest first.

    A sequence longer than that is a batch of its own. Sequences of equal length keep their order.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        count = max(1, tokens_per_batch // int(lengths[order[first]]))
        yield order[first : first + count].tolist()
        first += count
