"""Sequences of different lengths end to end, without padding.

Shapes: B sequences, T tokens with padding, N tokens of all sequences together; "..." any further dimensions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class Packing(NamedTuple):
    """Where the tokens of B padded sequences lie in a single sequence of N tokens. Padding follows the tokens."""

    slots: Tensor  # [N] int64, the place of each token among the B * T of the padded batch
    starts: Tensor  # [B+1] int32, the first token of each sequence among the N, and N
    shape: tuple[int, int]  # (B, T)
    longest: int  # number of tokens of the longest sequence

    def pack(self, padded: Tensor) -> Tensor:
        """Leave the padding out: [B,T,...] -> [1,N,...]."""
        return _TakeRows.apply(padded.flatten(0, 1).unsqueeze(0), self.slots)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the padded batch, with zeros as padding: [1,N,...] -> [B,T,...]."""
        num_slots = self.shape[0] * self.shape[1]
        return _PutRows.apply(packed, self.slots, num_slots).squeeze(0).unflatten(0, self.shape)

    def positions(self) -> Tensor:
        """Return the position of each token in its sequence: [N] int64."""
        return self.slots % self.shape[1]


def pack_lengths(lengths: Sequence[int], length: int, device: torch.device) -> Packing | None:
    """Return how sequences of ``lengths`` tokens, padded to T = ``length``, are packed; None if none is padded.

    The lengths are known to the host, which therefore does not wait for the device.

    Raises:
        ValueError: a length is below 1 or above T.
    """
    if not all(1 <= each <= length for each in lengths):
        raise ValueError(f"lengths of 1 to {length} expected, got {list(lengths)}")
    if sum(lengths) == len(lengths) * length:
        return None
    slots = torch.cat([torch.arange(row * length, row * length + each) for row, each in enumerate(lengths)])
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return Packing(slots.to(device), starts.to(device), (len(lengths), length), max(lengths))


class _TakeRows(Function):
    """Different rows of a tensor: [1,R,...] and [N] int64 -> [1,N,...].

    The backward pass writes each gradient to its row: unlike that of ``index_select`` it adds nothing, and so needs no atomic
    additions, whose order changes. The result is no view, for which torch.compile would make graphs of its own.
    """

    @staticmethod
    def forward(ctx, states: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = states.size(1)
        return states.index_select(1, rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(1, ctx.num_rows, *grad.shape[2:]).index_copy_(1, rows, grad), None


class _PutRows(Function):
    """The reverse of :class:`_TakeRows`, [1,N,...] -> [1,R,...]: other rows are zeros."""

    @staticmethod
    def forward(ctx, states: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(rows)
        return states.new_zeros(1, num_rows, *states.shape[2:]).index_copy_(1, rows, states)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.index_select(1, rows), None, None
