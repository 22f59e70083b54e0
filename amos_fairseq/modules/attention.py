"""Bidirectional self-attention with an additive bias."""

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# cuDNN's backward gives NaN at T % 128 == 64 with a mask (torch 2.11 to 2.13), so it is left out; PyTorch takes the first
# of the others that can do the job on the device at hand.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class SelfAttention(nn.Module):
    """Multi-head self-attention: softmax(q k^T / sqrt(d) + bias) v, then an output projection.

    Args:
        width: D, a multiple of ``num_heads``.
        num_heads: H.
        dropout: probability of dropping an attention weight while training.

    Raises:
        ValueError: ``width`` is no multiple of ``num_heads``.
    """

    def __init__(self, width: int, num_heads: int, dropout: float):
        super().__init__()
        if width % num_heads:
            raise ValueError(f"the width {width} must be a multiple of the number of attention heads {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """[B,T,D] -> [B,T,D]. ``bias`` [B or 1, H or 1, T, T] is added to the scores; -inf forbids a pair."""
        B, T, D = states.shape
        heads = self.query_key_value(states).view(B, T, 3, self.num_heads, D // self.num_heads)  # [B,T,3,H,d]
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each [B,H,T,d]
        with sdpa_kernel(BACKENDS):
            mixed = scaled_dot_product_attention(
                query, key, value, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0
            )
        return self.output(mixed.transpose(1, 2).reshape(B, T, D))
