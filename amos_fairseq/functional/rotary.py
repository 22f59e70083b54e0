"""Rotary positions (RoFormer: Su et al., 2021, section 3.2.2): queries and keys are rotated by angles that grow with the
position, so that their product depends on the distance alone.

Shapes: B sequences, T tokens, H heads, d width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


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
    """:func:`rotate_queries_and_keys` in two kernels for each half of the vectors, which read half precision and compute in
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
