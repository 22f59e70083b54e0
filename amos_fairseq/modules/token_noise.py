"""A generator that reads nothing: replacements from one distribution for every position (thesis section 5.3.2)."""

import torch
from torch import Tensor, nn


class TokenNoise(nn.Module):
    """Counts of the vocabulary's rows: one of each, until :meth:`set_counts` tells how often each token occurs.

    They are saved with the model, so that a checkpoint samples without its corpus; whole numbers, which no cast to half
    precision rounds.
    """

    def __init__(self, num_rows: int):
        super().__init__()
        self.register_buffer("counts", torch.ones(num_rows, dtype=torch.int64))

    def set_counts(self, counts: Tensor) -> None:
        """``counts`` [tokens] int64 of the dictionary, which has at most as many tokens as there are rows."""
        self.counts.zero_()
        self.counts[: len(counts)] = counts

    def forward(self, positions: Tensor) -> Tensor:
        """Logits for every one of ``positions`` [...]: [...,V] float32, a view that holds each number once."""
        return self.counts.float().log().expand(*positions.shape, -1)
