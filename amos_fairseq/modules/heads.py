"""Prediction heads on top of an encoder."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from amos_fairseq.functional.output_layer import copy_cross_entropy, cross_entropy
from amos_fairseq.functional.positions import mean_state
from amos_fairseq.modules.bert_encoder import BertEncoderConfig
from amos_fairseq.modules.encoder import make_dropout


class EmbeddingHead(nn.Module):
    """Project states, by default to the space of the token embeddings for comparison with them: dense, gelu, LayerNorm.

    With ``has_biases`` this is BERT's; without, all heads of ModernBERT begin with it.
    """

    def __init__(self, width: int, embedding_width: int, layer_norm_eps: float, has_biases: bool = True):
        super().__init__()
        self.dense = nn.Linear(width, embedding_width, bias=has_biases)
        self.norm = nn.LayerNorm(embedding_width, layer_norm_eps, bias=has_biases)

    def forward(self, features: Tensor) -> Tensor:
        """[..., D] -> [..., E], the width of the token embeddings."""
        return self.norm(gelu(self.dense(features)))


class MlmHead(EmbeddingHead):
    """The projection before the tied output layer of a masked language model, and that layer's bias.

    In AMOS the input is f^(d) and the output h^(d) (section 3.3); the logits are h^(d) E^T + bias with the token embeddings E.
    """

    def __init__(
        self, width: int, embedding_width: int, vocabulary_size: int, layer_norm_eps: float, has_biases: bool = True
    ):
        super().__init__(width, embedding_width, layer_norm_eps, has_biases)
        self.bias = nn.Parameter(torch.zeros(vocabulary_size))


class TokenPredictions(NamedTuple):
    """N is M, the masked positions of a sequence, or T, all of its tokens."""

    nll: Tensor  # [B,N] float32, -log p(original), nats
    correct: Tensor  # [B,N] bool, no token is more likely than the original
    weights: Tensor  # [B,N] float32, 1, or 0 where the prediction does not count
    copy_probs: Tensor | None  # [B,N] float32, D; None without the copy mechanism


class TokenPrediction(nn.Module):
    """Predict tokens from text with replaced tokens (thesis section 5.4.3: All-Tokens and Replace MLM).

    An MLM head of the main network, and optionally a sigmoid layer for the probability of copying the input.

    Args:
        mlm_head: for states of the main network; its output layer is tied to the token embeddings.
        copy_layer: a layer to the logit of copying, for a copy mechanism, which needs all logits in memory; or None.
        kernels: ``model.kernels``, the implementation of the output layer without a copy mechanism.
    """

    def __init__(self, mlm_head: MlmHead, copy_layer: nn.Linear | None, kernels: str):
        super().__init__()
        self.kernels = kernels
        self.mlm_head = mlm_head
        self.copy_layer = copy_layer

    def forward(
        self, states: Tensor, embedding: Tensor, inputs: Tensor, originals: Tensor, weights: Tensor
    ) -> TokenPredictions:
        """Predict the original tokens from the last states of the main network.

        ``states`` [B,N,D]; ``embedding`` [V,E], of the tokens; ``inputs`` [B,N] int64, the input tokens of the main network at
        these positions; ``weights`` [B,N], 1, or 0 where the prediction does not count.
        """
        hidden, bias = self.mlm_head(states), self.mlm_head.bias
        if self.copy_layer is None:
            return TokenPredictions(
                *cross_entropy(hidden, embedding, bias, originals, self.kernels), weights.float(), None
            )
        copy_logits = self.copy_layer(states).squeeze(-1).float()  # [B,N]
        logits = linear(hidden, embedding, bias).float()  # [B,N,V]
        losses = copy_cross_entropy(logits, copy_logits, inputs, originals)
        return TokenPredictions(*losses, weights.float(), copy_logits.detach().sigmoid())


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
        return super().forward(gelu(self.dense(states)))


class NormedDetectionHead(DetectionHead):
    """The detection head on ModernBERT: dense, gelu, LayerNorm, one linear layer, as in its classes with other heads."""

    def __init__(self, width: int, layer_norm_eps: float):
        super().__init__(width)
        self.transform = EmbeddingHead(width, width, layer_norm_eps, has_biases=False)

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(self.transform(states))


class FirstTokenDetectionHead(DenseDetectionHead):
    """The head of DeBERTaV3's released code: LayerNorm(h_t + h_1), then ELECTRA's, with the state h_1 of ``<s>``."""

    def __init__(self, width: int, layer_norm_eps: float):
        super().__init__(width)
        self.norm = nn.LayerNorm(width, layer_norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        """[B,T,D] -> [B,T] float32."""
        return super().forward(self.norm(states + states[:, :1]))


class FeedForwardHead(nn.Module):
    """A layer of BERT without attention, applied to each token (TEAMS Figure 2, left)."""

    def __init__(self, shape: BertEncoderConfig):
        super().__init__()
        self.ffn_in = nn.Linear(shape.width, shape.ffn_width)
        self.ffn_out = nn.Linear(shape.ffn_width, shape.width)
        self.ffn_norm = nn.LayerNorm(shape.width, shape.layer_norm_eps)
        self.activation_dropout = make_dropout(shape.activation_dropout, shape.kernels)
        self.dropout = make_dropout(shape.dropout, shape.kernels)

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        expanded = self.activation_dropout(gelu(self.ffn_in(states)))
        return self.ffn_norm(states + self.dropout(self.ffn_out(expanded)))


def transformed(states: Tensor, transform: nn.Module | None) -> Tensor:
    """Return ``states`` [...,D], or the output of ``transform`` for them, [...,D]."""
    return states if transform is None else transform(states)


POOLER_ACTIVATIONS = {"tanh": torch.tanh, "gelu": gelu}
# A classification head without a dense layer.
LINEAR_HEAD = "linear"
CLASSIFICATION_HEADS = (*POOLER_ACTIVATIONS, LINEAR_HEAD)
# What a classification head reads: the state of <s>, or the mean over the tokens of the text.
POOLINGS = ("first", "mean")


def pool(states: Tensor, padding_mask: Tensor | None, pooling: str) -> Tensor:
    """Return one vector for each sequence, ``POOLINGS``: [B,T,D], and [B,T] bool, True at padding -> [B,D]."""
    if pooling == "first":
        return states[:, 0]
    return states.mean(1) if padding_mask is None else mean_state(states, ~padding_mask)


class ClassificationHead(nn.Module):
    """Predict classes, or one regression value, from one vector for each sequence: dense, activation, output.

    With tanh this is the head of Hugging Face's MPNet (and BERT's pooler and classifier), with gelu that of its ELECTRA.
    With ``linear`` it is the output layer alone, the "simple linear classifier" of ELECTRA (thesis 5.2.4 and released code).

    Args:
        pooling: the vector is the state of the ``first`` token (as in the papers), or the ``mean`` of the states of all tokens,
            ``<s>`` and ``</s>`` included.
        scale: (mean, standard deviation) of the values of a regression in the training set: the output is mean + deviation *
            layer, so that the layer learns values of mean 0 and deviation 1; or (minimum, range), for values from 0 to 1. None
            leaves the output as it is.
        transform: a module [...,D] -> [...,D] in place of the dense layer and its activation, as on ModernBERT.
    """

    def __init__(
        self,
        width: int,
        num_classes: int,
        activation: str,
        dropout: float,
        pooling: str = "first",
        scale: tuple[float, float] | None = None,
        transform: nn.Module | None = None,
    ):
        super().__init__()
        self.pooling, self.num_outputs = pooling, num_classes
        self.transform = transform
        self.dense = None if activation == LINEAR_HEAD or transform is not None else nn.Linear(width, width)
        self.output = nn.Linear(width, num_classes)
        self.activation = POOLER_ACTIVATIONS.get(activation)
        self.dropout = nn.Dropout(dropout)
        # The bits of two float64, as integers, so that a model in half precision keeps their values.
        bits = None if scale is None else torch.tensor(scale, dtype=torch.float64).view(torch.int64)
        self.register_buffer("scale_bits", bits)

    def forward(self, states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """[B,T,D], and [B,T] bool, True at padding (None: there is none) -> logits [B, classes]."""
        return self.classify(pool(states, padding_mask, self.pooling))

    def classify(self, pooled: Tensor) -> Tensor:
        """One vector for each sequence, [B,D] -> logits [B, classes]."""
        pooled = self.dropout(transformed(pooled, self.transform))
        if self.dense is not None:
            pooled = self.dropout(self.activation(self.dense(pooled)))
        output = self.output(pooled)
        if self.scale_bits is None:
            return output
        mean, deviation = self.scale_bits.view(torch.float64).float()
        return mean + deviation * output.float()
