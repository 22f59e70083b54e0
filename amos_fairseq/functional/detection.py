"""Counting how well replaced tokens are detected, in sums that add up over batches, ranks and updates."""

import torch
from torch import Tensor
from torch.nn.functional import softsign

# Bins are equally wide in softsign(logit / 4): 0.02 around 0, 0.05 where a beginning detector's logits lie (about -2), 0.25
# at +-10; the last ones reach to infinity. With 100 equal bins over [-10, 10] the area was wrong by 0.014 once logits left
# that range, and for logits that differ by less than a bin.
NUM_BINS = 400
LOGIT_SCALE = 4.0


def logit_histogram(logits: Tensor, weights: Tensor) -> Tensor:
    """How many logits fall into each of 400 bins over all real numbers, narrow around 0.

    Args:
        logits: [...] float. nan counts as 0: after an overflow the loss must stop or skip the update, not the statistics.
        weights: [...] 0 or 1 of any dtype; entries of weight 0 are not counted.

    Returns:
        [400] float64, exact whole numbers (a float can be summed with all other statistics).
    """
    position = (softsign(logits.detach().float().nan_to_num() / LOGIT_SCALE) + 1) * (NUM_BINS / 2)
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
