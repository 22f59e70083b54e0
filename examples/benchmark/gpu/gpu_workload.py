"""What the measurements of this folder share: the sizes of amos_base and the inputs of its attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

DROPOUT = 0.1


@dataclass(frozen=True)
class Sizes:
    """amos_base with 64 sequences of 512 tokens and 77 masked positions in each.

    Attributes:
        chunk: positions of one chunk of the output layer, of 256 MiB.
        samples: of the generator, for each masked position.
    """

    sequences: int = 64
    length: int = 512
    heads: int = 12
    head_width: int = 64
    depths: int = 3
    masked: int = 77
    vocabulary: int = 32_768
    chunk: int = 1232
    samples: int = 128
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return (
            f"{self.sequences} sequences of {self.length} tokens, {self.heads} heads of {self.head_width}, "
            f"{name_of(self.dtype)}"
        )


TINY = Sizes(1, 16, 2, 16, 2, 3, 200, 3, 4, torch.float32)  # of a rehearsal on a CPU


def sizes_on(device: torch.device) -> Sizes:
    return Sizes() if device.type == "cuda" else TINY


def attention_leaves(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return heads [B,T,3,H,d] and values of the bias [H,2T-1] float32; both require gradients."""
    torch.manual_seed(0)
    shape = (sizes.sequences, sizes.length, 3, sizes.heads, sizes.head_width)
    heads = torch.randn(shape, device=device, dtype=sizes.dtype).requires_grad_()
    bias = torch.randn(sizes.heads, 2 * sizes.length - 1, device=device).mul_(0.1).requires_grad_()
    return heads, bias


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error, for a cell of a Markdown table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:150] if lines else ''}".replace("|", "\\|")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
