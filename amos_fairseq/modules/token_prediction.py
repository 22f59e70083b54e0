"""The main network as a masked language model over real text with replaced tokens (thesis section 5.4.3)."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.functional.copy_mechanism import copy_cross_entropy
from amos_fairseq.functional.linear_cross_entropy import linear_cross_entropy
from amos_fairseq.functional.output_layer import chunked_cross_entropy, runs_in_triton
from amos_fairseq.modules.heads import MlmHead


class TokenPredictions(NamedTuple):
    """N is M, the masked positions of a sequence, or T, all of its tokens."""

    nll: Tensor  # [B,N] float32, -log p(original), nats
    correct: Tensor  # [B,N] bool, the best guess is the original
    weights: Tensor  # [B,N] float32, 1, or 0 where the prediction does not count
    copy_probs: Tensor | None  # [B,N] float32, D; None without the copy mechanism


class TokenPrediction(nn.Module):
    """An MLM head of the main network, and a sigmoid layer that decides whether to copy the input instead.

    Args:
        width: D of the main network.
        embedding_width: E of the token embeddings, to which the output layer is tied.
        vocabulary_rows: V.
        layer_norm_eps: of the head.
        copies: whether there is a copy mechanism, which needs all logits at once.
        kernels: ``model.kernels``, how the output layer is computed without a copy mechanism.
    """

    def __init__(
        self,
        width: int,
        embedding_width: int,
        vocabulary_rows: int,
        layer_norm_eps: float,
        copies: bool,
        kernels: str,
    ):
        super().__init__()
        self.kernels = kernels
        self.mlm_head = MlmHead(width, embedding_width, vocabulary_rows, layer_norm_eps)
        self.copy_layer = nn.Linear(width, 1) if copies else None

    def forward(
        self, states: Tensor, embedding: Tensor, inputs: Tensor, originals: Tensor, weights: Tensor
    ) -> TokenPredictions:
        """What the main network makes of its last states.

        Args:
            states: [B,N,D].
            embedding: [V,E], the token embeddings.
            inputs: [B,N] int64, the tokens that the main network reads there.
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
