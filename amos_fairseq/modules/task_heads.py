"""What a discriminator with several tasks is made of: layers that two encoders share, and a branch for each task."""

import copy

from fairseq.modules import LayerNorm
from torch import Tensor, nn
from torch.nn.functional import gelu

from amos_fairseq.modules.dropout import make_dropout
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder, TransformerLayer


class FeedForwardHead(nn.Module):
    """A Transformer layer without attention: each token on its own (TEAMS Figure 2, left)."""

    def __init__(self, shape: TransformerConfig):
        super().__init__()
        self.ffn_in = nn.Linear(shape.width, shape.ffn_width)
        self.ffn_out = nn.Linear(shape.ffn_width, shape.width)
        self.ffn_norm = LayerNorm(shape.width, shape.layer_norm_eps)
        self.activation_dropout = make_dropout(shape.activation_dropout, shape.kernels)
        self.dropout = make_dropout(shape.dropout, shape.kernels)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        expanded = self.activation_dropout(gelu(self.ffn_in(states)))
        return self.ffn_norm(states + self.dropout(self.ffn_out(expanded)))


def share_bottom(encoder: TransformerEncoder, owner: TransformerEncoder, num_layers: int) -> None:
    """Give ``encoder`` what lies below the layers of ``owner``, of the same width, and its ``num_layers`` lowest layers."""
    encoder.share_embeddings(owner)
    encoder.embedding_projection = owner.embedding_projection
    encoder.relative_position = owner.relative_position
    for number in range(num_layers):
        encoder.layers[number] = owner.layers[number]


def with_last_layer(encoder: TransformerEncoder, layer: TransformerLayer) -> TransformerEncoder:
    """``encoder`` with another last layer. Nothing is copied: both hold the same parameters."""
    view = copy.copy(encoder)
    view._modules = {**encoder._modules, "layers": nn.ModuleList([*encoder.layers[:-1], layer])}
    return view
