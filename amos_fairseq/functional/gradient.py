"""Multiply a gradient in the backward pass without changing the value."""

from torch import Tensor
from torch.autograd import Function


class _ScaleGradient(Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x`` (any shape), with its gradient times ``factor``. A factor of 0 detaches, so that no zeros are computed."""
    return x.detach() if factor == 0 else _ScaleGradient.apply(x, factor)


def reverse_gradient(x: Tensor) -> Tensor:
    """Apply the gradient reversal layer R of Ganin et al. (2016): identity forward, times -1 backward (AMOS, section 3.3)."""
    return scale_gradient(x, -1.0)
