"""A linear layer that uses the faster of PyTorch's two matrix libraries on a CPU."""

import torch
from torch import Tensor
from torch.nn import functional

# From this number of multiplications on the convolution is faster; below, its setup costs more than it saves.
MIN_MULTIPLICATIONS = 2**27


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute x W^T + b: x [...,D], weight [F,D], bias [F] -> [...,F].

    On x86 processors PyTorch multiplies float32 matrices with MKL and convolves with oneDNN. oneDNN was 8 to 16 % faster,
    forward and backward, on an AMD EPYC (2,048 x 256 x 1,024 and similar sizes). So a large float32 product on a CPU is
    computed as a convolution with a kernel of one position. The sums run in another order, so the last bits differ from
    those of ``torch.nn.functional.linear``. In bfloat16 PyTorch uses oneDNN for both.
    """
    if not uses_convolution(x, weight):
        return functional.linear(x, weight, bias)
    image = x.reshape(1, 1, -1, x.size(-1)).permute(0, 3, 1, 2)  # [1,D,1,N], channels last: a view
    return functional.conv2d(image, weight[:, :, None, None], bias).permute(0, 2, 3, 1).view(*x.shape[:-1], -1)


def uses_convolution(x: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`linear` computes this product as a convolution."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() * len(weight) >= MIN_MULTIPLICATIONS
        and torch.backends.mkldnn.is_available()
        and not torch.compiler.is_compiling()
    )
