"""A linear layer that takes the faster of PyTorch's two matrix libraries on a CPU."""

import torch
from torch import Tensor
from torch.nn import functional

# Multiplications of a product from which on a convolution is faster; below, its preparation costs more than it gains.
LEAST_PRODUCTS = 2**27


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b: x [...,D], weight [F,D], bias [F] -> [...,F].

    PyTorch multiplies float32 matrices on x86 processors by MKL, and convolves by oneDNN, which was 8 to 16 % faster forward
    and backward on an AMD EPYC (2,048 x 256 x 1,024 and the like). So a large product of a CPU is written as a convolution
    with a kernel of one position; in bfloat16 both run in oneDNN.
    """
    if not takes_convolution(x, weight):
        return functional.linear(x, weight, bias)
    image = x.reshape(1, 1, -1, x.size(-1)).permute(0, 3, 1, 2)  # [1,D,1,N], channels last: a view
    return functional.conv2d(image, weight[:, :, None, None], bias).permute(0, 2, 3, 1).view(*x.shape[:-1], -1)


def takes_convolution(x: Tensor, weight: Tensor) -> bool:
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.numel() * len(weight) >= LEAST_PRODUCTS
        and torch.backends.mkldnn.is_available()
        and not torch.compiler.is_compiling()
    )
