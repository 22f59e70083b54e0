"""Linear layers and dropout of the encoder, in a reference and a fast implementation."""

from torch import Tensor, nn

from amos_fairseq.functional.cpu.dropout import dropout
from amos_fairseq.functional.cpu.linear import linear


class FastLinear(nn.Linear):
    """``nn.Linear`` whose matrix product uses the faster library of a CPU."""

    def forward(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,F]."""
        return linear(states, self.weight, self.bias)


class FastDropout(nn.Dropout):
    """``nn.Dropout`` with masks that cost less on a CPU."""

    def forward(self, states: Tensor) -> Tensor:
        """[...] -> [...]."""
        return dropout(states, self.p) if self.training else states


def make_linear(width: int, output_width: int, kernels: str) -> nn.Linear:
    """Return a linear layer with a bias: PyTorch's own if ``kernels`` is ``reference``."""
    return nn.Linear(width, output_width) if kernels == "reference" else FastLinear(width, output_width)


def make_dropout(probability: float, kernels: str) -> nn.Dropout:
    """Return a dropout layer: PyTorch's own if ``kernels`` is ``reference``."""
    return nn.Dropout(probability) if kernels == "reference" else FastDropout(probability)
