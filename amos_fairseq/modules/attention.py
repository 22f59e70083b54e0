"""Bidirectional self-attention with an additive bias."""

from torch import Tensor, nn

from amos_fairseq.functional.attention import (
    NO_BIAS,
    AttentionBias,
    ToeplitzBias,
    fast_attention,
    reference_attention,
    toeplitz_attention,
)
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.modules.layers import make_linear


class SelfAttention(nn.Module):
    """Multi-head self-attention: softmax(q k^T / sqrt(d) + bias) v, then an output projection.

    Args:
        width: D, a multiple of ``num_heads``.
        num_heads: H.
        dropout: probability of dropping an attention weight in training.
        kernels: ``fast``, ``triton`` or ``reference``; the results are equal up to rounding.

    Raises:
        ValueError: ``width`` is not a multiple of ``num_heads``.
    """

    def __init__(self, width: int, num_heads: int, dropout: float, kernels: str = "fast"):
        super().__init__()
        if width % num_heads:
            raise ValueError(f"the width {width} must be a multiple of the number of attention heads {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.attend = reference_attention if kernels == "reference" else fast_attention
        self.query_key_value = make_linear(width, 3 * width, kernels)
        self.output = make_linear(width, width, kernels)

    def forward(
        self, states: Tensor, bias: AttentionBias | ToeplitzBias = NO_BIAS, positions: Tensor | None = None
    ) -> Tensor:
        """Compute attention: [B,T,D] -> [B,T,D], or [B,M,D] at ``positions`` [B,M] int64.

        ``bias`` is added to the scores. With a :class:`ToeplitzBias` the Triton kernels run, which compute only the given
        positions; the other backends compute all positions and select.
        """
        B, T, D = states.shape
        heads = self.query_key_value(states).view(B, T, 3, self.num_heads, D // self.num_heads)  # [B,T,3,H,d]
        dropout = self.dropout if self.training else 0.0
        if isinstance(bias, ToeplitzBias):
            return self.output(toeplitz_attention(heads, bias, dropout, positions).flatten(2))
        attended = self.attend(heads, bias, dropout).reshape(B, T, D)
        return self.output(attended if positions is None else gather_positions(attended, positions))
