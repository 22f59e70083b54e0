"""Noise-contrastive estimation: conversion between a classifier of noise and an unnormalized probability.

With D the probability that a token is noise, p the share of noise among all tokens, q the noise distribution, E the energy
and exp(-E) the unnormalized probability of the token given its context (thesis sections 5.1.2, 5.1.3 and 5.1.5):

    D = p q / (p q + (1 - p) exp(-E))    <=>    logit(D) = E + log q + log(p / (1 - p))
"""

import math

from torch import Tensor


def noise_logits(energies: Tensor, noise_log_probs: Tensor, noise_share: float) -> Tensor:
    """Return logit(D), the logits of the classifier. No gradient passes to q.

    Args:
        energies: E [...] float32.
        noise_log_probs: log q [...] float32, nats.
        noise_share: p, above 0 and below 1.

    Returns:
        [...] float32, positive for "noise".
    """
    return energies + noise_log_probs.detach() + log_odds(noise_share)


def energies_of(logits: Tensor, noise_log_probs: Tensor, noise_share: float) -> Tensor:
    """Return the energies E that a classifier of noise implies: the inverse of :func:`noise_logits`, with its shapes."""
    return logits - noise_log_probs - log_odds(noise_share)


def log_odds(share: float) -> float:
    """Return log(p / (1 - p))."""
    return math.log(share / (1 - share))
