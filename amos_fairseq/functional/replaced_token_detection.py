"""Detectors of replaced tokens and classifiers of noise: the token probabilities that they imply, the reward that they give a
generator, and statistics of their logits and states.

With D the probability that a token is noise, p the share of noise among all tokens, q the noise distribution, E the energy
and exp(-E) the unnormalized probability of the token given its context (thesis sections 5.1.2, 5.1.3 and 5.1.5):

    D = p q / (p q + (1 - p) exp(-E))    <=>    logit(D) = E + log q + log(p / (1 - p))
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, softsign

# Bins are equally wide in softsign(logit / 4): 0.02 around 0, 0.05 around the logits of an untrained detector (about -2), 0.25
# at +-10; the outermost ones are unbounded. With 100 equal bins over [-10, 10] the area was wrong by 0.014 once logits left
# that range, and for logits that differ by less than a bin.
NUM_BINS = 400
LOGIT_SCALE = 4.0

# Logits of a batch with a smaller standard deviation are equal: their odds differ by about 1 %. It lies below what an untrained
# head has (estimated from the initial weights: 0.05 for ELECTRA-Small, 0.5 for AMOS-base).
EQUAL_LOGITS = 0.01


def logit_histograms(logits: Tensor, kinds: Tensor, num_kinds: int, weights: Tensor) -> Tensor:
    """Count the logits of each kind in each of 400 bins over all real numbers, narrow around 0.

    Histograms add up over batches, ranks and updates.

    Args:
        logits: [...] float. nan counts as 0: after an overflow the loss must stop or skip the update, not the statistics.
        kinds: [...] int64 from 0 to ``num_kinds`` - 1.
        weights: [...] 0 or 1 of any dtype; entries of weight 0 are not counted.

    Returns:
        [num_kinds,400] float64, exact whole numbers (a float can be summed with all other statistics).
    """
    position = (softsign(logits.detach().float().nan_to_num() / LOGIT_SCALE) + 1) * (NUM_BINS / 2)
    bins = position.clamp(0, NUM_BINS - 1).long() + kinds * NUM_BINS
    counts = torch.zeros(num_kinds * NUM_BINS, dtype=torch.float64, device=logits.device)
    return counts.index_add(0, bins.flatten(), weights.flatten().to(torch.float64)).view(num_kinds, NUM_BINS)


def auc_from_histograms(positive: Tensor, negative: Tensor) -> float:
    """Return the area under the ROC curve from two histograms [bins] over the same bins; ties within a bin count one half.

    Return nan if either class is empty: the area is not defined then.
    """
    positive, negative = positive.double(), negative.double()
    below = negative.cumsum(0) - negative
    wins = (positive * (below + negative / 2)).sum()
    pairs = positive.sum() * negative.sum()
    return float(wins / pairs) if pairs > 0 else float("nan")


class StateSpread(NamedTuple):
    """How far the states of different tokens differ; see ``state_spread``."""

    variance: float  # 0 to 1
    first_component: float  # 1 / D to 1
    participation_ratio: float  # 1 to D


def state_sums(states: Tensor, is_real: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the states of the real tokens and their outer products; both add up over batches and ranks.

    Args:
        states: [B,T,D] of any float dtype.
        is_real: [B,T] bool, False at tokens that are left out.

    Returns:
        [D] and [D,D] float64: the mean square of a state is about D, and the variance of collapsed states is the small
        difference of two large sums.
    """
    states = (states.detach() * is_real.unsqueeze(-1)).flatten(0, 1).double()
    return states.sum(0), states.T @ states


def state_spread(count: float, total: Tensor, products: Tensor) -> StateSpread:
    """Compute how far N states h of D dimensions differ, with the eigenvalues l_i of their covariance matrix:

        variance            = sum_i l_i / mean |h|^2, the share of the mean square that is not in the mean; 0: all are equal
        first_component     = max_i l_i / sum_i l_i, the share of the first principal component in the variance
        participation_ratio = (sum_i l_i)^2 / sum_i l_i^2, the number of directions that the states use

    Args:
        count: N.
        total: [D], the first of ``state_sums``.
        products: [D,D], the second.

    Returns:
        nan for what is not defined: everything without states, the last two where all states are equal.
    """
    if not count:
        return StateSpread(math.nan, math.nan, math.nan)
    total, products = total.double(), products.double()
    mean = total / count
    covariance = products / count - torch.outer(mean, mean)
    mean_square = float(products.trace() / count)
    # Rounding of a difference of numbers as large as mean_square; the trace sums D of them.
    variance = float(covariance.trace())
    if not variance > len(mean) * torch.finfo(torch.float64).eps * mean_square:
        return StateSpread(0.0 if math.isfinite(mean_square) else math.nan, math.nan, math.nan)
    eigenvalues = torch.linalg.eigvalsh(covariance).clamp(min=0)
    shares = eigenvalues / eigenvalues.sum()
    return StateSpread(variance / mean_square, float(shares.max()), float(1 / shares.square().sum()))


def log_prob_of_original(logits: Tensor, noise_log_probs: Tensor, noise_share: float) -> Tensor:
    """Compute log P(x_t | rest) from an optimal detector of replaced tokens and the noise distribution q of its training.

    A share p of the tokens is sampled from q; the label is "replaced" where such a token differs from the original. Of all
    tokens that equal x, p q(x) (1 - P(x)) then are replaced and P(x) (1 - p + p q(x)) original, so with the odds
    o = D / (1 - D) of "replaced"

        P(x) = p q(x) / (o (1 - p + p q(x)) + p q(x)),

    which never exceeds 1.

    Departures: the thesis (section 5.4.5) solves for Electric's labels instead, where every sampled token counts as noise:
    P(x) = p q(x) / (o (1 - p)), see ``energies_of``. Both agree where q(x) and P(x) are small; for a token that is nearly
    certain, the thesis's value grows without bound with our labels.

    Args:
        logits: [...] float32, log o, positive for "replaced".
        noise_log_probs: log q(x) [...] float32, nats.
        noise_share: p, above 0 and below 1.

    Returns:
        [...] float32, nats, at most 0.
    """
    log_sampled = math.log(noise_share) + noise_log_probs
    log_unchanged = torch.log1p(noise_share * noise_log_probs.expm1())  # log(1 - p + p q)
    return log_sampled - torch.logaddexp(logits + log_unchanged, log_sampled)


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
    """Return the energies E that a classifier of noise implies: the inverse of ``noise_logits``, with its shapes."""
    return logits - noise_log_probs - log_odds(noise_share)


def log_odds(share: float) -> float:
    """Return log(p / (1 - p))."""
    return math.log(share / (1 - share))


def policy_losses(log_probs: Tensor, rewards: Tensor, baseline_logits: Tensor) -> Tensor:
    """Compute -(R - b) log q(sample), elementwise: its mean over samples has the gradient of -E[R] in expectation.

    b = -log sigmoid(baseline_logits) changes the variance, never the expectation, as long as it does not depend on the
    sample. Neither the reward nor the baseline receives a gradient.

    Args:
        log_probs: [...] float32, log q of the sampled tokens, with the gradient of the sampler.
        rewards: [...] float32, R >= 0 in nats.
        baseline_logits: [...] float32.
    """
    advantages = rewards.detach() + logsigmoid(baseline_logits.detach())
    return -advantages * log_probs


def baseline_losses(baseline_logits: Tensor, rewards: Tensor) -> Tensor:
    """Compute the cross entropy of sigmoid(baseline_logits) with target exp(-R), elementwise; its minimum is at b = R.

    R is a negative log probability, so exp(-R) is a probability. Arguments as for ``policy_losses``.
    """
    return binary_cross_entropy_with_logits(baseline_logits, (-rewards.detach()).exp(), reduction="none")
