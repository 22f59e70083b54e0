"""The reversed gradient of Gumbel-Softmax through its largest entries.

With s_v = logit_v + g_v and a temperature tau below 1, y = softmax(s / tau) falls fast with the rank of s_v: the k-th largest
of many perturbed logits lies about log k below the largest, so its y is about k^(-1 / tau) of the largest y. At tau = 0.3 all
entries beyond the 128th arrival together hold some 2e-5 of y, and the gradient without them was off by 5e-5 (equal logits) to
2e-4 (logits of standard deviation 3) of its norm, V = 32,768, float64.

Shapes: K depths, N positions, J entries kept at each, E width of the embeddings, V rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from amos_fairseq.functional.gradient import reverse_gradient
from amos_fairseq.functional.output_layer import chunks


class Entries(NamedTuple):
    """The largest perturbed logits of the mixture at each position, as constants."""

    rows: Tensor  # [N,J] int64, the first one is the sample
    scores: (
        Tensor  # [N,J] float32, mixed logit + Gumbel noise up to a constant of the position; -inf counts for nothing
    )
    logits: Tensor  # [N,J,K] float32, of each depth, up to a constant of position and depth


def entries_residual(
    entries: Entries,
    hidden: Tensor,
    weights: Tensor,
    embedding: Tensor,
    temperature: float,
    hidden_gradient: float = 0.0,
) -> Tensor:
    """:func:`adversarial_residual` of the mixture :func:`mix_logits`, with y the softmax over the entries that were kept.

    The value is 0; the gradient goes to the mixture weights and, times ``hidden_gradient``, to ``hidden``.

    Args:
        entries: as drawn from the mixture of ``hidden`` by ``weights``.
        hidden: h^(d) [K,N,E], after the MLM head.
        weights: gamma [N,K] float32.
        embedding: [V,E]; receives no gradient.
        temperature: tau > 0.
        hidden_gradient: what the gradient that reaches h^(d) is multiplied with.

    Returns:
        [N,E] of ``embedding``'s dtype.
    """
    logits, embedding = entries.logits, embedding.detach()
    if hidden_gradient:
        logits = _LogitsOfEntries.apply(hidden, logits, entries.rows, embedding, hidden_gradient)
    mixed = (logits * weights.unsqueeze(1)).sum(-1)  # [N,J]
    y = ((entries.scores + (mixed - mixed.detach())) / temperature).softmax(-1)
    return _RestOfSample.apply(reverse_gradient(y), entries.rows, embedding)


def lost_mass(scores: Tensor, others: Tensor, temperature: float) -> Tensor:
    """The part of y that the entries kept do not have: [N,J], [N,V] scores of these and of all other rows -> [N]."""
    kept, lost = ((part / temperature).logsumexp(-1) for part in (scores, others))
    return torch.sigmoid(lost - kept)


class _RestOfSample(Function):
    """(y - sg(y)) E over the rows kept: zeros [N,E], whose gradient to y is that of y E."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor, embedding: Tensor) -> Tensor:
        ctx.save_for_backward(rows, embedding)
        ctx.y_dtype = y.dtype
        return embedding.new_zeros(len(rows), embedding.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_sample: Tensor) -> tuple[Tensor, None, None]:
        rows, embedding = ctx.saved_tensors
        by_y = torch.empty(rows.shape, dtype=ctx.y_dtype, device=rows.device)
        for places in row_chunks(rows, embedding):
            by_y[places] = (embedding[rows[places]] @ by_sample[places].unsqueeze(-1)).squeeze(-1)
        return by_y, None, None


class _LogitsOfEntries(Function):
    """logits [N,J,K] as they are, with the gradient of ``hidden`` [K,N,E] times ``factor``."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, logits: Tensor, rows: Tensor, embedding: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(rows, embedding)
        ctx.factor, ctx.hidden_dtype = factor, hidden.dtype
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logits: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, embedding = ctx.saved_tensors
        by_hidden = torch.empty(
            by_logits.size(-1), len(rows), embedding.size(1), dtype=ctx.hidden_dtype, device=rows.device
        )
        for places in row_chunks(rows, embedding):
            of_depth = (by_logits[places] * ctx.factor).mT.to(embedding.dtype)  # [n,K,J]
            by_hidden[:, places] = (of_depth @ embedding[rows[places]]).transpose(0, 1).to(ctx.hidden_dtype)
        return by_hidden, None, None, None, None


def row_chunks(rows: Tensor, embedding: Tensor) -> Any:
    """Chunks of positions by the size of the embeddings of their entries."""
    return chunks(len(rows), rows.size(1) * embedding.size(1) * embedding.element_size(), rows.device)
