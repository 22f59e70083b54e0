"""The density of Figure 1a against a sum of Gaussians."""

import math

import numpy as np
import pytest

from amos_fairseq.report.figures import density


def test_density_is_a_sum_of_gaussians_reflected_at_zero():
    values, points = np.array([0.05, 0.4, 0.5, 2.0]), np.linspace(0, 8, 4001)
    width = values.std(ddof=1) * len(values) ** (-1 / 5)  # Scott's rule

    def kernel(x: float, at: float) -> float:
        return math.exp(-0.5 * ((x - at) / width) ** 2) / (width * math.sqrt(2 * math.pi))

    expected = [sum(kernel(x, at) + kernel(x, -at) for at in values) / len(values) for x in points]
    found = density(values, points)
    assert found == pytest.approx(expected)
    assert np.trapezoid(found, points) == pytest.approx(1, abs=1e-4)
    for equal in ([1.5, 1.5], []):
        assert density(np.array(equal), points) is None
