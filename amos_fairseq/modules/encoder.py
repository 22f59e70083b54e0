"""The Transformer encoder of every objective: post-LayerNorm BERT, with relative positions beside absolute ones."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from fairseq.modules import LayerNorm
from torch import Tensor, nn
from torch.nn.functional import gelu

from amos_fairseq.modules.attention import SelfAttention
from amos_fairseq.modules.relative_position import RelativePositionBias


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of one encoder; dropouts are probabilities, ``position_scheme`` is none, t5 or amos."""

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    max_positions: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    layer_norm_eps: float
    position_scheme: str
    position_buckets: int
    position_max_distance: int


class TransformerLayer(nn.Module):
    """Attention and feed-forward network, each followed by dropout, residual and LayerNorm (post-LayerNorm)."""

    def __init__(self, shape: EncoderShape):
        super().__init__()
        self.attention = SelfAttention(shape.width, shape.num_heads, shape.attention_dropout)
        self.attention_norm = LayerNorm(shape.width, shape.layer_norm_eps)
        self.ffn_in = nn.Linear(shape.width, shape.ffn_width)
        self.ffn_out = nn.Linear(shape.ffn_width, shape.width)
        self.ffn_norm = LayerNorm(shape.width, shape.layer_norm_eps)
        self.activation_dropout = nn.Dropout(shape.activation_dropout)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, states: Tensor, bias: Tensor | None) -> Tensor:
        """[B,T,D] -> [B,T,D]; ``bias`` as for :class:`SelfAttention`."""
        states = self.attention_norm(states + self.dropout(self.attention(states, bias)))
        expanded = self.activation_dropout(gelu(self.ffn_in(states)))
        return self.ffn_norm(states + self.dropout(self.ffn_out(expanded)))


class TransformerEncoder(nn.Module):
    """Absolute positions, LayerNorm and dropout on top of given token embeddings, then the layers.

    Token embeddings belong to the model, which shares them between its encoders. With scheme ``t5`` this is exactly
    Hugging Face's ``MPNetModel`` (positions count from 0 here).
    """

    def __init__(self, shape: EncoderShape):
        super().__init__()
        self.shape = shape
        self.embed_positions = nn.Embedding(shape.max_positions, shape.width)
        self.embedding_norm = LayerNorm(shape.width, shape.layer_norm_eps)
        self.dropout = nn.Dropout(shape.dropout)
        self.relative_position = (
            None
            if shape.position_scheme == "none"
            else RelativePositionBias(
                shape.position_scheme, shape.position_buckets, shape.position_max_distance, shape.num_heads
            )
        )
        self.layers = nn.ModuleList(TransformerLayer(shape) for _ in range(shape.num_layers))

    def forward(
        self, embeddings: Tensor, padding_mask: Tensor | None = None, detach_after: Collection[int] = ()
    ) -> list[Tensor]:
        """Token embeddings [B,T,D] -> the output of every layer, ``num_layers`` tensors [B,T,D].

        Args:
            embeddings: [B,T,D] token embeddings.
            padding_mask: [B,T] bool, True at padding, which nothing attends to; None when there is none.
            detach_after: layers (counted from 1) whose output the next layer reads without a gradient.
        """
        length = embeddings.size(1)
        bias = self.attention_bias(length, padding_mask, embeddings.dtype)
        states = self.dropout(self.embedding_norm(embeddings + self.embed_positions.weight[:length]))
        outputs = []
        for depth, layer in enumerate(self.layers, start=1):
            outputs.append(layer(states, bias))
            states = outputs[-1].detach() if depth in detach_after else outputs[-1]
        return outputs

    def attention_bias(self, length: int, padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Relative positions [1,H,T,T], padding [B,1,1,T], their sum, or None when there is neither."""
        bias = None if self.relative_position is None else self.relative_position(length).unsqueeze(0)
        if padding_mask is None:
            return bias
        padding = torch.zeros_like(padding_mask, dtype=dtype).masked_fill(padding_mask, float("-inf"))[:, None, None, :]
        return padding if bias is None else bias + padding
