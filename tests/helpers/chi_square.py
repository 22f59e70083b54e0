"""Counts of draws against a distribution."""

import torch
from scipy import stats

# A chi-square test raises a false alarm once in a million runs; the seeds are fixed, so it either always or never does.
FALSE_ALARM = 1e-6


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """p-value of the counts; rows expected fewer than five times are counted together."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    counts = counts.double()
    cells = [counts[~rare], counts[rare].sum()[None]], [expected[~rare], expected[rare].sum()[None]]
    got, wanted = (torch.cat(part) for part in cells)
    keep = wanted > 0
    assert not got[~keep].any()
    return stats.chisquare(got[keep].numpy(), wanted[keep].numpy()).pvalue
