"""Linear layers of the encoder."""

from torch import Tensor, nn

from amos_fairseq.functional.linear import linear


class FastLinear(nn.Linear):
    """``nn.Linear`` with its matrix product by the faster library of a CPU."""

    def forward(self, states: Tensor) -> Tensor:
        """[...,D] -> [...,F]."""
        return linear(states, self.weight, self.bias)


def make_linear(width: int, output_width: int, kernels: str) -> nn.Linear:
    """With a bias; PyTorch's own where ``kernels`` is reference."""
    return nn.Linear(width, output_width) if kernels == "reference" else FastLinear(width, output_width)
