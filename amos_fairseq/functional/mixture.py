"""AMOS's mixture of MLM heads, and the reversed gradient of a token that is sampled from it.

The gradient is that of Gumbel-Softmax, over all tokens or truncated to its largest entries. With s_v = logit_v + g_v and a
temperature tau below 1, y = softmax(s / tau) decreases fast with the rank of s_v: the k-th largest of many perturbed logits is
about log k below the largest, so its y is about k^(-1 / tau) of the largest y. At tau = 0.3 all entries beyond the 128th
together hold about 2e-5 of y, and the gradient without them was off by 5e-5 (equal logits) to 2e-4 (logits of standard
deviation 3) of its norm, V = 32,768, float64.

Shapes: B sequences, M masked positions, K depths, N positions, J entries of each position, D or E width of the token
embeddings, V padded vocabulary size.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from amos_fairseq.functional.logit_chunks import chunks


class _ScaleGradient(Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x`` (any shape), with its gradient times ``factor``. A factor of 0 detaches, so that no zeros are computed."""
    return x.detach() if factor == 0 else _ScaleGradient.apply(x, factor)


def reverse_gradient(x: Tensor) -> Tensor:
    """Apply the gradient reversal layer R of Ganin et al. (2016): identity forward, times -1 backward (AMOS, section 3.3)."""
    return scale_gradient(x, -1.0)


def mix_logits(
    hidden: Sequence[Tensor], biases: Sequence[Tensor], weights: Tensor, embedding: Tensor, hidden_gradient: float = 0.0
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


def adversarial_term(logits: Tensor, noise: Tensor, temperature: float, embedding: Tensor) -> Tensor:
    """Compute the term of Gumbel-Softmax beside the embedding of the hard sample: value 0, reversed gradient.

    The straight-through sample is s = onehot(argmax(logits + g)) + R(y) - sg(y) with
    y = softmax((logits + g) / temperature) (AMOS section 3.3; straight through as in Jang et al., 2017), R the gradient
    reversal and sg the stop-gradient. The discriminator's input is s E. Its first part is the ordinary embedding of the
    sampled token; this function returns the second part, (R(y) - sg(y)) E. Its value is exactly 0, its gradient with respect
    to ``logits`` is that of Gumbel-Softmax times -1, and ``embedding`` receives no gradient.

    Args:
        logits: [..., V] float32, -inf at tokens that must not be sampled.
        noise: [..., V] float32 Gumbel noise, the same as for the hard sample.
        temperature: tau > 0; 0.3 in AMOS, Appendix B.
        embedding: [V, D].

    Returns:
        [..., D] of ``embedding``'s dtype.
    """
    y = ((logits + noise) / temperature).softmax(-1)
    # The embedding is multiplied by zero, so its gradient would be zero: it is not computed.
    return (reverse_gradient(y) - y.detach()).to(embedding.dtype) @ embedding.detach()


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
    """Compute the ``adversarial_term`` of the mixture, with y the softmax over ``entries``.

    The value is 0. The gradient goes to the mixture weights and, times ``hidden_gradient``, to ``hidden``. The mixture is
    that of ``mix_logits``.

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
