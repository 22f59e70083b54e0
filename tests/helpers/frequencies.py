"""Frequencies of samples against a distribution."""

import torch
from scipy import stats
from torch import Tensor

# A chi-square test raises a false alarm once in a million runs; the seeds are fixed, so it either always or never does.
FALSE_ALARM = 1e-6


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """p-value of the counts; rows with fewer than five expected samples are counted together."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    counts = counts.double()
    cells = [counts[~rare], counts[rare].sum()[None]], [expected[~rare], expected[rare].sum()[None]]
    got, wanted = (torch.cat(part) for part in cells)
    possible = wanted > 0
    assert not got[~possible].any()
    return stats.chisquare(got[possible].numpy(), wanted[possible].numpy()).pvalue


def assert_shares(shares: Tensor, probabilities: Tensor, num_samples: int, errors: float = 5.0) -> None:
    """Shares of ``num_samples`` samples within ``errors`` standard errors of their probabilities; impossible ones are 0."""
    error = (probabilities * (1 - probabilities) / num_samples).sqrt()
    assert (shares - probabilities).abs().le(errors * error + 1e-9).all()
