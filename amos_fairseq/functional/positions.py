"""Some positions of every sequence, through an index tensor of static shape; sequences end to end, without padding.

Also rotary positions (RoFormer: Su et al., 2021, section 3.2.2): queries and keys are rotated by angles that grow with the
position, so that their product depends on the distance alone.

Shapes: B sequences, T tokens with padding, M masked positions, N tokens of all sequences together, D width, H heads, d width of
a head; "..." any further dimensions. Padded slots of M hold position 0 and weight 0; position 0 is ``<s>``, which is never
masked, so a padded slot can be gathered and written back without changing a masked position.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def gather_positions(states: Tensor, positions: Tensor) -> Tensor:
    """Return ``states`` [B,T,D] at ``positions`` [B,M]: [B,M,D]."""
    return states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.size(-1)))


def replace_positions(tokens: Tensor, positions: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Return a copy of ``tokens`` [B,T] with ``values`` [B,M] at ``positions`` [B,M] wherever ``weights`` [B,M] is not 0.

    A padded slot writes back the present token: several slots may have position 0, and all write the same value.
    """
    present = tokens.gather(1, positions)
    return tokens.scatter(1, positions, values.where(weights != 0, present))


def add_at_positions(states: Tensor, positions: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Return ``states`` [B,T,D] plus ``weights`` [B,M] * ``values`` [B,M,D] at ``positions`` [B,M]."""
    weighted = values * weights.unsqueeze(-1).to(values.dtype)
    return states.scatter_add(1, positions.unsqueeze(-1).expand_as(weighted), weighted.to(states.dtype))


def mean_state(states: Tensor, is_token: Tensor) -> Tensor:
    """Return the mean of ``states`` [B,T,D] over the tokens [B,T] bool: [B,D]. Values at padding may be anything."""
    return states.masked_fill(~is_token[..., None], 0).sum(1) / is_token.sum(1, keepdim=True)


def mark_positions(positions: Tensor, weights: Tensor, num_tokens: int) -> Tensor:
    """Return the ``positions`` [B,M] whose weight is not 0 as a mask: [B,T] bool."""
    marks = weights.new_zeros(len(positions), num_tokens)
    return marks.scatter_add(1, positions, weights) != 0


def random_positions(candidates: Tensor, counts: Tensor) -> Tensor:
    """Sample ``counts`` [B] of each sequence's ``candidates`` [B,T] bool without replacement: [B,T] bool.

    Every set of that size is equally likely. Random numbers come from PyTorch's default generator of the device. A sequence
    must have at least as many candidates as are sampled.
    """
    scores = torch.rand(candidates.shape, device=candidates.device).masked_fill(~candidates, 2.0)
    ranks = scores.argsort(1).argsort(1)  # 0 for the smallest score
    return ranks < counts.unsqueeze(1)


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
    """``take_rows``, whose backward pass is ``put_rows``: that of ``index_select`` would add, with atomic operations,
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
    """``put_rows``, whose backward pass is ``take_rows``."""

    @staticmethod
    def forward(ctx, states: Tensor, rows: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(rows)
        return put_rows(states, rows, num_rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return take_rows(grad, rows), None, None


class Rotation(NamedTuple):
    """The angles of all positions, as their cosines and sines."""

    cos: Tensor  # [T,d/2] float32
    sin: Tensor  # [T,d/2] float32

    @property
    def inverse(self) -> "Rotation":
        """The rotation back, which is also that of the gradient."""
        return Rotation(self.cos, -self.sin)


def rotation(length: int, head_width: int, theta: float, device: torch.device) -> Rotation:
    """Return the rotation of the positions 0 to T - 1: pair i of position t turns by t * theta^(-2 i / d) radians.

    The angles are float32, as in Hugging Face's models: at position 8,192 they are exact to 5e-4.
    """
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / theta ** (pairs / head_width)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return Rotation(angles.cos(), angles.sin())


def rotate(states: Tensor, by: Rotation) -> Tensor:
    """Rotate the pairs (x_i, x_{i+d/2}) of each vector, in float32 or above: [...,T,d] -> [...,T,d] in the same dtype.

    The pairs are those of Hugging Face's models; RoFormer's own are neighbors, which is another order of the same weights.
    """
    first, second = states.to(torch.promote_types(states.dtype, torch.float32)).chunk(2, dim=-1)
    turned = (torch.addcmul(first * by.cos, second, by.sin, value=-1), torch.addcmul(second * by.cos, first, by.sin))
    return torch.cat(turned, dim=-1).to(states.dtype)


def rotate_queries_and_keys(heads: Tensor, by: Rotation) -> Tensor:
    """Rotate the queries and keys of ``heads`` [B,T,3,H,d]; values stay. The result is contiguous."""
    # torch.compile makes one kernel of this, and cannot trace kernels that write into given memory.
    if torch.compiler.is_compiling():
        queries_and_keys, values = heads.split([2, 1], dim=2)
        turned = rotate(queries_and_keys.movedim(1, -2), by).movedim(-2, 1)
        return torch.cat([turned, values], dim=2)
    return _RotateQueriesAndKeys.apply(heads, *by)


class _RotateQueriesAndKeys(Function):
    """``rotate_queries_and_keys`` in two kernels for each half of the vectors, which read half precision and compute in
    float32, and one that copies the values: a third of the memory traffic of one kernel for each conversion, product and sum.
    """

    @staticmethod
    def forward(ctx, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, Rotation(cos, sin))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotated(grad, Rotation(*ctx.saved_tensors).inverse), None, None


def _rotated(heads: Tensor, by: Rotation) -> Tensor:
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    cos, sin = (part[:, None, None] for part in by)  # [T,1,1,d/2]
    first, second = heads[:, :, :2].chunk(2, dim=-1)  # [B,T,2,H,d/2]
    out_first, out_second = out[:, :, :2].chunk(2, dim=-1)
    torch.addcmul(second * -sin, first, cos, out=out_first)
    torch.addcmul(first * sin, second, cos, out=out_second)
    out[:, :, 2] = heads[:, :, 2]
    return out
