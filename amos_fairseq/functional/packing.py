"""Sequences of different lengths end to end, without padding.

Shapes: B sequences, T tokens with padding, N tokens of all sequences together; "..." any further dimensions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class Packing(NamedTuple):
    """Maps the tokens of B padded sequences to a single sequence of N tokens. Padding follows the tokens."""

    slots: Tensor  # [N] int64, the place of each token among the B * T of the padded batch
    starts: Tensor  # [B+1] int32, the first token of each sequence among the N, and N
    shape: tuple[int, int]  # (B, T)
    longest: int  # number of tokens of the longest sequence

    def pack(self, padded: Tensor) -> Tensor:
        """Leave the padding out: [B,T,...] -> [1,N,...]. Returns a copy: torch.compile would compile views once more."""
        return _TakeRows.apply(padded.flatten(0, 1).unsqueeze(0), self.slots)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the padded batch, with zeros as padding: [1,N,...] -> [B,T,...]."""
        num_slots = self.shape[0] * self.shape[1]
        return _PutRows.apply(packed, self.slots, num_slots).squeeze(0).unflatten(0, self.shape)

    def positions(self) -> Tensor:
        """Return the position of each token in its sequence: [N] int64."""
        return self.slots % self.shape[1]

    def padding_mask(self) -> Tensor:
        """Return True at padding: [B,T] bool."""
        is_padding = self.slots.new_ones(self.shape, dtype=torch.bool)
        return is_padding.view(-1).index_fill_(0, self.slots, False).view(self.shape)


def pack_lengths(lengths: Sequence[int], shape: tuple[int, int], device: torch.device) -> Packing | None:
    """Return how sequences of ``lengths`` tokens, padded to ``shape`` = (B, T), are packed; None if none is padded.

    The lengths are Python ints, so the host does not wait for the device.

    Raises:
        ValueError: there are not B lengths from 1 to T.
    """
    num_sequences, length = shape
    if len(lengths) != num_sequences or not all(1 <= each <= length for each in lengths):
        raise ValueError(f"{num_sequences} lengths from 1 to {length} expected, got {list(lengths)}")
    if sum(lengths) == num_sequences * length:
        return None
    slots = torch.cat([torch.arange(row * length, row * length + each) for row, each in enumerate(lengths)])
    starts = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    slots, starts = (part.to(device, non_blocking=True) for part in (slots, starts))
    return Packing(slots, starts, (num_sequences, length), max(lengths))


def take_rows(states: Tensor, rows: Tensor) -> Tensor:
    """Return different rows: [1,R,...] and [N] int64 -> [1,N,...]."""
    return states.index_select(1, rows)


def put_rows(states: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return zeros with ``states`` in different rows: [1,N,...] and [N] int64 -> [1,R,...]."""
    # Not in place: torch.compile of PyTorch 2.11 gives gradients of 0 for that within a Function (pytorch issue 180642).
    return states.new_zeros(1, num_rows, *states.shape[2:]).index_copy(1, rows, states)


class _TakeRows(Function):
    """:func:`take_rows`, whose backward pass is :func:`put_rows`: that of ``index_select`` would add, with atomic operations,
    whose order changes.
    """

    @staticmethod
    def forward(ctx, states: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = states.size(1)
        return take_rows(states, rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return put_rows(grad, rows, ctx.num_rows), None


class _PutRows(Function):
    """:func:`put_rows`, whose backward pass is :func:`take_rows`."""

    @staticmethod
    def forward(ctx, states: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(rows)
        return put_rows(states, rows, num_rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return take_rows(grad, rows), None, None
