"""Noise-contrastive estimation: what a classifier of noise and an unnormalised probability say about each other.

With D the probability that a token is noise, p the share of noise among all tokens, q the noise distribution, E the energy
and exp(-E) the unnormalised probability of the token given its context (thesis sections 5.1.2, 5.1.3 and 5.1.5):

    D = p q / (p q + (1 - p) exp(-E))    <=>    logit(D) = E + log q + log(p / (1 - p))
"""

import math

from torch import Tensor


def noise_logits(energies: Tensor, noise_log_probs: Tensor, noise_share: float) -> Tensor:
    """logit(D): what the energies make of the classifier. No gradient passes to q.

    Args:
        energies: E [...] float32.
        noise_log_probs: log q [...] float32, nats.
        noise_share: p, above 0 and below 1.

    Returns:
        [...] float32, positive for "noise".
    """
    return energies + noise_log_probs.detach() + log_odds(noise_share)


def energies_of(logits: Tensor, noise_log_probs: Tensor, noise_share: float) -> Tensor:
    """E: what any classifier of noise says about the energies, the inverse of :func:`noise_logits`; shapes as there."""
    return logits - noise_log_probs - log_odds(noise_share)


def log_odds(share: float) -> float:
    """log(p / (1 - p))."""
    return math.log(share / (1 - share))
