"""Token prediction by the main network on text with replaced tokens (thesis section 5.4.3: All-Tokens and Replace MLM)."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.functional.cross_entropy import copy_cross_entropy, linear_cross_entropy
from amos_fairseq.functional.output_layer import chunked_cross_entropy, runs_in_triton
from amos_fairseq.modules.heads import MlmHead


class TokenPredictions(NamedTuple):
    """N is M, the masked positions of a sequence, or T, all of its tokens."""

    nll: Tensor  # [B,N] float32, -log p(original), nats
    correct: Tensor  # [B,N] bool, the most likely token is the original
    weights: Tensor  # [B,N] float32, 1, or 0 where the prediction does not count
    copy_probs: Tensor | None  # [B,N] float32, D; None without the copy mechanism


class TokenPrediction(nn.Module):
    """An MLM head of the main network, and optionally a sigmoid layer for the probability of copying the input.

    Args:
        width: D of the main network.
        embedding_width: E of the token embeddings, to which the output layer is tied.
        vocabulary_size: V, padded.
        layer_norm_eps: of the head.
        copies: add a copy mechanism, which needs all logits in memory.
        kernels: ``model.kernels``, the implementation of the output layer without a copy mechanism.
    """

    def __init__(
        self, width: int, embedding_width: int, vocabulary_size: int, layer_norm_eps: float, copies: bool, kernels: str
    ):
        super().__init__()
        self.kernels = kernels
        self.mlm_head = MlmHead(width, embedding_width, vocabulary_size, layer_norm_eps)
        self.copy_layer = nn.Linear(width, 1) if copies else None

    def forward(
        self, states: Tensor, embedding: Tensor, inputs: Tensor, originals: Tensor, weights: Tensor
    ) -> TokenPredictions:
        """Predict the original tokens from the last states of the main network.

        Args:
            states: [B,N,D].
            embedding: [V,E], the token embeddings.
            inputs: [B,N] int64, the input tokens of the main network at these positions.
            originals: [B,N] int64.
            weights: [B,N], 1, or 0 where the prediction does not count.
        """
        hidden, bias = self.mlm_head(states), self.mlm_head.bias
        if self.copy_layer is None:
            return TokenPredictions(*self.cross_entropy(hidden, embedding, bias, originals), weights.float(), None)
        copy_logits = self.copy_layer(states).squeeze(-1).float()  # [B,N]
        logits = linear(hidden, embedding, bias).float()  # [B,N,V]
        losses = copy_cross_entropy(logits, copy_logits, inputs, originals)
        return TokenPredictions(*losses, weights.float(), copy_logits.detach().sigmoid())

    def cross_entropy(
        self, hidden: Tensor, embedding: Tensor, bias: Tensor, originals: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.kernels == "reference":
            return linear_cross_entropy(hidden, embedding, bias, originals)
        with_triton = runs_in_triton(self.kernels, hidden.device)
        return chunked_cross_entropy(hidden, embedding, bias, originals, with_triton)
