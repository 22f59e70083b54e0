"""The reversed gradient of a Gumbel-Softmax that is truncated to its largest entries.

With s_v = logit_v + g_v and a temperature tau below 1, y = softmax(s / tau) decreases fast with the rank of s_v: the k-th
largest of many perturbed logits is about log k below the largest, so its y is about k^(-1 / tau) of the largest y. At
tau = 0.3 all entries beyond the 128th together hold about 2e-5 of y, and the gradient without them was off by 5e-5 (equal
logits) to 2e-4 (logits of standard deviation 3) of its norm, V = 32,768, float64.

Shapes: K depths, N positions, J entries of each position, E width of the embeddings, V padded vocabulary size.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from amos_fairseq.functional.gradient import reverse_gradient
from amos_fairseq.functional.logit_chunks import chunks


class TopEntries(NamedTuple):
    """The largest perturbed logits of the mixture at each position, without a gradient."""

    tokens: Tensor  # [N,J] int64, the first one is the sample
    scores: Tensor  # [N,J] float32, mixed logit + Gumbel noise up to a constant of the position; -inf is ignored
    logits: Tensor  # [N,J,K] float32, of each depth, up to a constant of position and depth


def truncated_adversarial_term(
    entries: TopEntries,
    hidden: Tensor,
    weights: Tensor,
    embedding: Tensor,
    sampled_embedding: Tensor,
    temperature: float,
    hidden_gradient: float = 0.0,
) -> Tensor:
    """Compute the :func:`~amos_fairseq.functional.reference_sampling.adversarial_term` of the mixture, with y the softmax over
    ``entries``.

    The value is 0. The gradient goes to the mixture weights and, times ``hidden_gradient``, to ``hidden``. The mixture is
    that of :func:`~amos_fairseq.functional.mixture.mix_logits`.

    Args:
        entries: sampled from the mixture of ``hidden`` by ``weights``.
        hidden: h^(d) [K,N,E], after the MLM head.
        weights: gamma [N,K] float32.
        embedding: [V,E], of the output layer; receives no gradient.
        sampled_embedding: [V,E], with which the discriminator reads a sampled token; receives no gradient.
        temperature: tau > 0.
        hidden_gradient: factor of the gradient that reaches h^(d).

    Returns:
        [N,E] of ``sampled_embedding``'s dtype.
    """
    logits = entries.logits
    if hidden_gradient:
        logits = _LogitsOfEntries.apply(hidden, logits, entries.tokens, embedding.detach(), hidden_gradient)
    mixed = (logits * weights.unsqueeze(1)).sum(-1)  # [N,J]
    y = ((entries.scores + (mixed - mixed.detach())) / temperature).softmax(-1)
    return _ZeroTimesEmbedding.apply(reverse_gradient(y), entries.tokens, sampled_embedding.detach())


def truncated_mass(scores: Tensor, other_scores: Tensor, temperature: float) -> Tensor:
    """Return the part of y outside the entries: scores [N,J] of the entries and [N,V] of all other tokens -> [N]."""
    inside, outside = ((part / temperature).logsumexp(-1) for part in (scores, other_scores))
    return torch.sigmoid(outside - inside)


class _ZeroTimesEmbedding(Function):
    """(y - sg(y)) E over the entries: zeros [N,E], with the gradient of y E with respect to y."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, tokens: Tensor, embedding: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, embedding)
        ctx.y_dtype = y.dtype
        return embedding.new_zeros(len(tokens), embedding.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tokens, embedding = ctx.saved_tensors
        grad_y = torch.empty(tokens.shape, dtype=ctx.y_dtype, device=tokens.device)
        for chunk in entry_chunks(tokens, embedding):
            grad_y[chunk] = (embedding[tokens[chunk]] @ grad[chunk].unsqueeze(-1)).squeeze(-1)
        return grad_y, None, None


class _LogitsOfEntries(Function):
    """logits [N,J,K] unchanged, with the gradient of ``hidden`` [K,N,E] times ``factor``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, logits: Tensor, tokens: Tensor, embedding: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(tokens, embedding)
        ctx.factor, ctx.hidden_dtype = factor, hidden.dtype
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        tokens, embedding = ctx.saved_tensors
        shape = grad.size(-1), len(tokens), embedding.size(1)  # [K,N,E]
        grad_hidden = torch.empty(shape, dtype=ctx.hidden_dtype, device=tokens.device)
        for chunk in entry_chunks(tokens, embedding):
            grad_logits = (grad[chunk] * ctx.factor).mT.to(embedding.dtype)  # [n,K,J]
            grad_hidden[:, chunk] = (grad_logits @ embedding[tokens[chunk]]).transpose(0, 1).to(ctx.hidden_dtype)
        return grad_hidden, None, None, None, None


def entry_chunks(tokens: Tensor, embedding: Tensor) -> Iterator[slice]:
    """Split the positions into chunks by the size of the embeddings of their entries."""
    return chunks(len(tokens), tokens.size(1) * embedding.size(1) * embedding.element_size(), tokens.device)
