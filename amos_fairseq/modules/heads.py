"""Prediction heads on top of an encoder."""

import torch
from fairseq.modules import LayerNorm
from torch import Tensor, nn
from torch.nn.functional import gelu


class MlmHead(nn.Module):
    """The projection before the tied output layer of a masked language model: dense, gelu, LayerNorm; and its bias.

    AMOS: f^(d) goes in, h^(d) comes out (section 3.3); the logits are h^(d) E^T + bias with the token embeddings E.
    """

    def __init__(self, width: int, vocabulary_rows: int, layer_norm_eps: float):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = LayerNorm(width, layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocabulary_rows))

    def forward(self, features: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.norm(gelu(self.dense(features)))


class DetectionHead(nn.Module):
    """One linear layer to the logit of "replaced" (AMOS Eq. 1 has one weight vector w, and the sign for "original")."""

    def __init__(self, width: int):
        super().__init__()
        self.output = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [...] float32."""
        return self.output(states).squeeze(-1).float()
