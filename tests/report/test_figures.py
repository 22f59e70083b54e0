"""The density of Figure 1a against a sum of Gaussians, and its panels."""

import math

import numpy as np
import pytest

from amos_fairseq.report.figures import density, loss_distributions


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


def test_each_group_has_a_histogram_a_curve_and_its_mean():
    values = np.array([0.5, 1.0, 3.0])
    figure = loss_distributions({"a $run": {"depth 1": values, "depth 2": np.array([2.0, 2.0])}, "b": {}})
    first, second = figure.axes[:2]
    assert first.get_title() == r" a \$run"
    assert sum(patch.get_height() * patch.get_width() for patch in first.patches[:40]) == pytest.approx(1)
    curve, mean, mean_without_curve = first.get_lines()
    assert len(curve.get_xdata()) == 400
    assert (mean.get_xdata()[0], mean_without_curve.get_xdata()[0]) == (1.5, 2.0)
    labels = [text.get_text() for text in first.get_legend().get_texts()]
    assert labels == [" depth 1, mean 1.50", " depth 2, mean 2.00"]
    assert second.get_lines() == []
