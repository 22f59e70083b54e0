"""The mixture of several MLM heads.

Shapes: B sequences, M masked positions, K depths, D width of the token embeddings, V padded vocabulary size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from amos_fairseq.functional.gradient import scale_gradient


def mix_logits(
    hidden: Sequence[Tensor],
    biases: Sequence[Tensor],
    weights: Tensor,
    embedding: Tensor,
    hidden_gradient: float = 0.0,
) -> Tensor:
    """Compute sum_d gamma^(d) (sg(E) h^(d) + sg(b^(d))), the logits of AMOS Eq. 3, as E hbar with hbar = sum_d gamma^(d) h^(d).

    Both are equal because the output layer is linear and the weights of a position sum to 1. The only gradient goes to
    the mixture weights, and to h^(d) if ``hidden_gradient`` is not 0 (ablation "+ adv. MLM").

    Args:
        hidden: K tensors h^(d) [B,M,D], after the MLM head.
        biases: one bias b [V] that all depths share, or K of them (separate generators).
        weights: gamma [B,M,K] float32.
        embedding: E [V,D].
        hidden_gradient: factor of the gradient that reaches h^(d).

    Returns:
        [B,M,V] float32.
    """
    states = torch.stack([scale_gradient(h, hidden_gradient) for h in hidden], dim=-2)
    mixed_hidden = (weights.unsqueeze(-1) * states).sum(-2)
    if len(biases) == 1:
        mixed_bias = biases[0].detach()
    else:
        mixed_bias = weights @ torch.stack([bias.detach() for bias in biases]).to(weights.dtype)
    return F.linear(mixed_hidden.to(embedding.dtype), embedding.detach()).float() + mixed_bias.float()


def mixture_entropy(weights: Tensor) -> Tensor:
    """Return the entropy of gamma in nats: [..., K] -> [...]. It is 0 for one depth, log K for equal weights."""
    return torch.special.entr(weights).sum(-1)
