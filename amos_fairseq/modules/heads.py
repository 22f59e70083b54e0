"""Prediction heads on top of an encoder."""

import torch
from fairseq.modules import LayerNorm
from torch import Tensor, nn
from torch.nn.functional import gelu

from amos_fairseq.modules.encoder import TransformerConfig
from amos_fairseq.modules.layers import make_dropout


class EmbeddingHead(nn.Module):
    """Project states to the space of the token embeddings, for comparison with them: dense, gelu, LayerNorm."""

    def __init__(self, width: int, embedding_width: int, layer_norm_eps: float):
        super().__init__()
        self.dense = nn.Linear(width, embedding_width)
        self.norm = LayerNorm(embedding_width, layer_norm_eps)

    def forward(self, features: Tensor) -> Tensor:
        """[..., D] -> [..., E], the width of the token embeddings."""
        return self.norm(gelu(self.dense(features)))


class MlmHead(EmbeddingHead):
    """The projection before the tied output layer of a masked language model, and that layer's bias.

    In AMOS the input is f^(d) and the output h^(d) (section 3.3); the logits are h^(d) E^T + bias with the token embeddings E.
    """

    def __init__(self, width: int, embedding_width: int, vocabulary_size: int, layer_norm_eps: float):
        super().__init__(width, embedding_width, layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocabulary_size))


class DetectionHead(nn.Module):
    """One linear layer to the logit of "replaced": w . h of AMOS Eq. 1 and TEAMS Eq. 3 and 6.

    Departures: the papers' sigmoid is the probability of "original", so our w has the opposite sign; the layer has a bias.
    """

    def __init__(self, width: int):
        super().__init__()
        self.output = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [...] float32."""
        return self.output(states).squeeze(-1).float()


class DenseDetectionHead(DetectionHead):
    """The head of ELECTRA's released code: dense, gelu, then one linear layer to the logit of "replaced"."""

    def __init__(self, width: int):
        super().__init__(width)
        self.dense = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [...] float32."""
        return super().forward(gelu(self.dense(states)))


class FeedForwardHead(nn.Module):
    """A Transformer layer without attention, applied to each token (TEAMS Figure 2, left)."""

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


POOLER_ACTIVATIONS = {"tanh": torch.tanh, "gelu": gelu}


class ClassificationHead(nn.Module):
    """Predict classes, or one regression value, from the state of a sequence's first token: dense, activation, output.

    With tanh this is the head of Hugging Face's MPNet (and BERT's pooler and classifier), with gelu that of its ELECTRA.
    """

    def __init__(self, width: int, num_classes: int, activation: str, dropout: float):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.output = nn.Linear(width, num_classes)
        self.activation = POOLER_ACTIVATIONS[activation]
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        """[B,T,D] -> logits [B, classes]."""
        pooled = self.activation(self.dense(self.dropout(states[:, 0])))
        return self.output(self.dropout(pooled))
