"""Dropout of hidden states."""

from torch import Tensor, nn

from amos_fairseq.functional.dropout import dropout


class FastDropout(nn.Dropout):
    """``nn.Dropout`` with masks that cost less on a CPU."""

    def forward(self, states: Tensor) -> Tensor:
        """[...] -> [...]."""
        return dropout(states, self.p) if self.training else states


def make_dropout(probability: float, kernels: str) -> nn.Dropout:
    """PyTorch's own where ``kernels`` is reference."""
    return nn.Dropout(probability) if kernels == "reference" else FastDropout(probability)
