"""Counting how well replaced tokens are detected, in sums that add up over batches, ranks and updates."""

import torch
from torch import Tensor

NUM_BINS = 100
LOGIT_RANGE = 10.0


def logit_histogram(logits: Tensor, weights: Tensor) -> Tensor:
    """How many logits fall into each of 100 equal bins over [-10, 10] (the ends hold what lies beyond).

    Args:
        logits: [...] float.
        weights: [...] 0 or 1 of any dtype; entries of weight 0 are not counted.

    Returns:
        [100] float64, exact whole numbers (a float can be summed with all other statistics).
    """
    position = (logits.detach().float() + LOGIT_RANGE) * (NUM_BINS / (2 * LOGIT_RANGE))
    bins = position.clamp(0, NUM_BINS - 1).long().flatten()
    counts = torch.zeros(NUM_BINS, dtype=torch.float64, device=logits.device)
    return counts.index_add(0, bins, weights.flatten().to(torch.float64))


def auc_from_histograms(positive: Tensor, negative: Tensor) -> float:
    """Area under the ROC curve from two histograms [bins] over the same bins; ties within a bin count one half.

    nan when either class is empty: the area is not defined there.
    """
    positive, negative = positive.double(), negative.double()
    below = negative.cumsum(0) - negative
    wins = (positive * (below + negative / 2)).sum()
    pairs = positive.sum() * negative.sum()
    return float(wins / pairs) if pairs > 0 else float("nan")
