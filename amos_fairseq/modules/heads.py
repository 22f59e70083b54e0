"""Prediction heads on top of an encoder."""

import torch
from fairseq.modules import LayerNorm
from torch import Tensor, nn
from torch.nn.functional import gelu


class EmbeddingHead(nn.Module):
    """From a state to the space of the token embeddings, in which words are compared with it: dense, gelu, LayerNorm."""

    def __init__(self, width: int, embedding_width: int, layer_norm_eps: float):
        super().__init__()
        self.dense = nn.Linear(width, embedding_width)
        self.norm = LayerNorm(embedding_width, layer_norm_eps)

    def forward(self, features: Tensor) -> Tensor:
        """[..., D] -> [..., E], as wide as the token embeddings."""
        return self.norm(gelu(self.dense(features)))


class MlmHead(EmbeddingHead):
    """The projection before the tied output layer of a masked language model, and that layer's bias.

    AMOS: f^(d) goes in, h^(d) comes out (section 3.3); the logits are h^(d) E^T + bias with the token embeddings E.
    """

    def __init__(self, width: int, embedding_width: int, vocabulary_rows: int, layer_norm_eps: float):
        super().__init__(width, embedding_width, layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocabulary_rows))


class DetectionHead(nn.Module):
    """One linear layer to the logit of "replaced" (AMOS Eq. 1 has one weight vector w, and the sign for "original")."""

    def __init__(self, width: int):
        super().__init__()
        self.output = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [...] float32."""
        return self.output(states).squeeze(-1).float()


class DenseDetectionHead(DetectionHead):
    """ELECTRA's: dense, gelu, then one linear layer to the logit of "replaced" (as its released code has it)."""

    def __init__(self, width: int):
        super().__init__(width)
        self.dense = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [...] float32."""
        return super().forward(gelu(self.dense(states)))


POOLER_ACTIVATIONS = {"tanh": torch.tanh, "gelu": gelu}


class ClassificationHead(nn.Module):
    """Classes, or one regression value, of a sequence from the state of its first token: dense, activation, output.

    With tanh this is the head of Hugging Face's MPNet (and BERT's pooler and classifier), with gelu the one of its ELECTRA.
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
