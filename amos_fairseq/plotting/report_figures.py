"""Figures of ``amos report``: losses on replaced tokens by depth, and scores over the cost of pretraining."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from scipy.stats import gaussian_kde

from amos_fairseq.plotting.curves import PANEL_INCHES
from amos_fairseq.plotting.style import depth_colours, legend_label, run_colour, run_style

NUM_BINS, NUM_POINTS = 40, 400  # of a histogram; of a curve that looks smooth


class Sample(NamedTuple):
    """The values of one group, such as the losses of one depth; ``values`` [N] are not negative."""

    label: str
    values: np.ndarray


class Series(NamedTuple):
    """The scores of one run over its cost: ``points`` are (cost, median, deviation), ascending by cost."""

    label: str
    points: list[tuple[float, float, float]]


def loss_distributions(panels: dict[str, list[Sample]]) -> Figure:
    """Draw a histogram, a density and the mean for each group, in one panel for each entry of ``panels``."""
    figure = Figure(figsize=_size(len(panels)), layout="constrained")
    largest = max((sample.values.max() for own in panels.values() for sample in own if len(sample.values)), default=1.0)
    for (title, samples), ax in zip(panels.items(), _panels(figure, len(panels)), strict=True):
        _draw_distributions(ax, samples, largest)
        ax.set_title(legend_label(title) if len(panels) > 1 else "")
        ax.set(xlabel="discriminator loss on a replaced token (nats)", ylabel="density")
        ax.set_xlim(0, largest)
    return figure


def _draw_distributions(ax: Axes, samples: list[Sample], largest: float) -> None:
    bins, points = np.linspace(0, largest, NUM_BINS + 1), np.linspace(0, largest, NUM_POINTS)
    for index, (sample, colour) in enumerate(zip(samples, depth_colours(len(samples)), strict=True)):
        if not len(sample.values):
            continue
        ax.hist(sample.values, bins, density=True, color=colour, alpha=0.22)
        mean = sample.values.mean()
        label = f"{legend_label(sample.label)}, mean {mean:.2f}"
        dashes = run_style(index)[0]
        curve = density(sample.values, points)
        if curve is not None:
            ax.plot(points, curve, color=colour, linewidth=1.6, linestyle=dashes, label=label)
        ax.axvline(
            mean, color=colour, linewidth=1, linestyle=dashes, alpha=0.8, label=None if curve is not None else label
        )
    if any(len(sample.values) for sample in samples):
        ax.legend(frameon=False, fontsize=8)


def density(values: np.ndarray, points: np.ndarray) -> np.ndarray | None:
    """Estimate the density of values that are not negative: a Gaussian kernel (Scott's rule), reflected at 0.

    A loss cannot be negative. Without the reflection, the mass of the kernels below 0 would be lost there.

    Returns:
        The density at ``points`` [P]; None for fewer than two different values.
    """
    if len(np.unique(values)) < 2:
        return None
    estimate = gaussian_kde(values)
    return estimate(points) + estimate(-points)


def scores_over_cost(panels: dict[str, list[Series]], x_label: str) -> Figure:
    """Draw the scores of each run over its cost, in one panel for each task; bars are standard deviations over seeds."""
    figure = Figure(figsize=_size(len(panels)), layout="constrained")
    for (title, series), ax in zip(panels.items(), _panels(figure, len(panels)), strict=True):
        for index, run in enumerate(series):
            costs, scores, deviations = zip(*run.points, strict=True)
            ax.errorbar(
                costs, scores, yerr=deviations, label=legend_label(run.label), capsize=2, linewidth=1.2, markersize=5,
                color=run_colour(index), linestyle=run_style(index)[0], marker=run_style(index)[1],
            )  # fmt: skip
        ax.set(title=legend_label(title), xlabel=x_label, ylabel="score on the development set (%)", xlim=(0, None))
        ax.xaxis.set_major_formatter(EngFormatter(sep="") if x_label == "updates" else ax.xaxis.get_major_formatter())
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.legend(frameon=False, fontsize=8)
    return figure


def _size(num_panels: int) -> tuple[float, float]:
    width, height = PANEL_INCHES
    return width * min(num_panels, 2), height * -(-num_panels // 2)


def _panels(figure: Figure, number: int) -> list[Axes]:
    columns = min(number, 2)
    axes = figure.subplots(-(-number // columns), columns, squeeze=False).flatten().tolist()
    for ax in axes[number:]:
        ax.set_axis_off()
    return axes[:number]
