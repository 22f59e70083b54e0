"""Bidirectional self-attention with an additive bias."""

from torch import Tensor, nn

from amos_fairseq.functional.attention import (
    NO_BIAS,
    AttentionBias,
    ToeplitzBias,
    attention_by_definition,
    fast_attention,
    toeplitz_attention,
)
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.modules.linear import make_linear


class SelfAttention(nn.Module):
    """Multi-head self-attention: softmax(q k^T / sqrt(d) + bias) v, then an output projection.

    Args:
        width: D, a multiple of ``num_heads``.
        num_heads: H.
        dropout: probability of dropping an attention weight while training.
        kernels: ``fast`` or ``triton``, or ``reference`` for the definition; their values are equal up to rounding.

    Raises:
        ValueError: ``width`` is no multiple of ``num_heads``.
    """

    def __init__(self, width: int, num_heads: int, dropout: float, kernels: str = "fast"):
        super().__init__()
        if width % num_heads:
            raise ValueError(f"the width {width} must be a multiple of the number of attention heads {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.attend = attention_by_definition if kernels == "reference" else fast_attention
        self.query_key_value = make_linear(width, 3 * width, kernels)
        self.output = make_linear(width, width, kernels)

    def forward(
        self, states: Tensor, bias: AttentionBias | ToeplitzBias = NO_BIAS, positions: Tensor | None = None
    ) -> Tensor:
        """[B,T,D] -> [B,T,D], or at ``positions`` [B,M] int64 alone [B,M,D]; ``bias`` is added to the scores.

        A :class:`ToeplitzBias` is read by Triton's kernels, which compute nothing else than the given positions.
        """
        B, T, D = states.shape
        heads = self.query_key_value(states).view(B, T, 3, self.num_heads, D // self.num_heads)  # [B,T,3,H,d]
        dropout = self.dropout if self.training else 0.0
        if isinstance(bias, ToeplitzBias):
            return self.output(toeplitz_attention(heads, bias, dropout, positions).flatten(2))
        mixed = self.attend(heads, bias, dropout).reshape(B, T, D)
        return self.output(mixed if positions is None else gather_positions(mixed, positions))
