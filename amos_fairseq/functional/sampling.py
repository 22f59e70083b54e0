"""Sampling replaced tokens, with and without a gradient.

Shapes: N masked positions (any leading shape), V vocabulary, D width.
"""

import torch
from torch import Tensor

from amos_fairseq.functional.gradient import reverse_gradient


def gumbel_noise(like: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of the shape and device of ``like``, float32, from PyTorch's default generator of that device."""
    return -torch.empty_like(like, dtype=torch.float32).exponential_().log()


def gumbel_max(logits: Tensor, noise: Tensor) -> Tensor:
    """argmax(logits + noise) -> [...] int64, an exact sample of softmax(logits) when ``noise`` is Gumbel(0, 1)."""
    return (logits + noise).argmax(-1)


def forbid_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """A copy of ``logits`` [..., V] with -inf at ``tokens`` [...] int64, one of each row."""
    return logits.scatter(-1, tokens.unsqueeze(-1), float("-inf"))


def gumbel_top_k(logits: Tensor, noise: Tensor, k: int) -> Tensor:
    """k different rows drawn one after another from softmax(logits), each from what is left: [..., V] -> [..., k] int64.

    The largest of logits + Gumbel(0, 1) is a sample of the softmax, and given it the second largest is one of the softmax
    over the other rows, and so on. At least k logits of a row must be above -inf.
    """
    return (logits + noise).topk(k, dim=-1).indices


def adversarial_residual(logits: Tensor, noise: Tensor, temperature: float, embedding: Tensor) -> Tensor:
    """What Gumbel-Softmax adds to the embedding of the hard sample: the value 0, and the reversed gradient.

    The straight-through sample is s = onehot(argmax(logits + g)) + R(y) - sg(y) with
    y = softmax((logits + g) / temperature) (AMOS section 3.3; straight through as in Jang et al., 2017), R the gradient
    reversal and sg the stop-gradient. The discriminator reads s E. Its first part is the ordinary embedding of the sampled
    token; this function returns the rest, (R(y) - sg(y)) E. Its value is exactly 0, its gradient to ``logits`` is the one
    of Gumbel-Softmax times -1, and ``embedding`` receives none.

    Args:
        logits: [..., V] float32, -inf on rows that must not be sampled.
        noise: [..., V] float32 Gumbel noise, the same that gave the hard sample.
        temperature: tau > 0; 0.3 in AMOS, Appendix B.
        embedding: [V, D].

    Returns:
        [..., D] of ``embedding``'s dtype.
    """
    y = ((logits + noise) / temperature).softmax(-1)
    # Through this zero the embedding's gradient is zero: it is not computed.
    return (reverse_gradient(y) - y.detach()).to(embedding.dtype) @ embedding.detach()
