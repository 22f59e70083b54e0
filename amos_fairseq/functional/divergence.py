"""The consistency of several predictions for one word (cross-view training)."""

import torch
from torch import Tensor


def summed_divergence(fixed: Tensor, scores: Tensor, is_word: Tensor) -> Tensor:
    """Return sum_w KL(p_w || q_w), nats, a float32 scalar, with p = softmax(fixed) and q = softmax(scores) of word w.

    Args:
        fixed: [B,W,...] scores of all classes of a word, in one or more dimensions; they get no gradient.
        scores: the same shape.
        is_word: [B,W] bool, False at padded slots, which do not count.

    A class that is excluded, with the score -inf, must be so on both sides; it adds nothing.
    """
    log_p = fixed.detach().float().flatten(2).log_softmax(-1)
    log_q = scores.float().flatten(2).log_softmax(-1)
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0)  # not -inf - -inf
    return terms.sum(-1).masked_fill(~is_word, 0.0).sum()
