"""What a detector of replaced tokens says about the probability of a token in its context."""

import math

import torch
from torch import Tensor


def log_prob_of_original(logits: Tensor, noise_log_probs: Tensor, noise_share: float) -> Tensor:
    """log P(x_t | rest) from an optimal detector of replaced tokens and the q that it was trained with.

    A share p of the tokens is drawn from q; the label is "replaced" where such a token differs from the original. Of all
    tokens that equal x, p q(x) (1 - P(x)) then are replaced and P(x) (1 - p + p q(x)) original, so with the odds
    o = D / (1 - D) of "replaced"

        P(x) = p q(x) / (o (1 - p + p q(x)) + p q(x)),

    which never exceeds 1. The thesis (section 5.4.5) solves for Electric's labels instead, where every drawn token counts as
    noise: P(x) = p q(x) / (o (1 - p)), see :func:`amos_fairseq.functional.nce.energies_of`. Both agree where q(x) and P(x)
    are small; of a token that is nearly certain, the thesis's value grows without bound with our labels.

    Args:
        logits: [...] float32, log o, positive for "replaced".
        noise_log_probs: log q(x) [...] float32, nats.
        noise_share: p, above 0 and below 1.

    Returns:
        [...] float32, nats, at most 0.
    """
    log_drawn = math.log(noise_share) + noise_log_probs
    log_kept = torch.log1p(noise_share * noise_log_probs.expm1())  # log(1 - p + p q)
    return log_drawn - torch.logaddexp(logits + log_kept, log_drawn)
