"""Sampling of replaced tokens by its definition, one random number for every token, with and without a gradient.

Training uses :mod:`~amos_fairseq.functional.sampling` instead, except with ``--kernels reference`` or ``--gumbel-entries 0``.

Shapes: ... any leading shape of masked positions, V padded vocabulary size, D width of the token embeddings.
"""

import torch
from torch import Tensor

from amos_fairseq.functional.gradient import reverse_gradient


def gumbel_noise(like: Tensor) -> Tensor:
    """Sample Gumbel(0, 1) noise, float32, shape and device of ``like``, from PyTorch's default generator of that device."""
    return -torch.empty_like(like, dtype=torch.float32).exponential_().log()


def gumbel_max(logits: Tensor, noise: Tensor) -> Tensor:
    """Return argmax(logits + noise) -> [...] int64, an exact sample of softmax(logits) when ``noise`` is Gumbel(0, 1)."""
    return (logits + noise).argmax(-1)


def forbid_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return a copy of ``logits`` [..., V] with -inf at ``tokens`` [...] int64, one per position."""
    return logits.scatter(-1, tokens.unsqueeze(-1), float("-inf"))


def gumbel_top_k(logits: Tensor, noise: Tensor, k: int) -> Tensor:
    """Sample k tokens without replacement from softmax(logits): [..., V] -> [..., k] int64, in the order of sampling.

    The largest of logits + Gumbel(0, 1) is a sample of the softmax, and given it the second largest is one of the softmax
    over the other tokens, and so on. At least k logits of a position must be above -inf.
    """
    return (logits + noise).topk(k, dim=-1).indices


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
