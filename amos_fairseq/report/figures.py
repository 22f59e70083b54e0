"""Figures of the report: losses by depth, scores over the cost of pretraining."""

from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from scipy.stats import gaussian_kde

from amos_fairseq.output.pictures import depth_colours, draw_grid, figure_of_panels, legend_label, line_style, run_style

NUM_BINS, NUM_POINTS = 40, 400  # of a histogram; of a curve that looks smooth


class CostSeries(NamedTuple):
    """The scores of one run over its cost: ``points`` are (cost, median, deviation), ascending by cost."""

    label: str
    points: list[tuple[float, float, float]]


def loss_distributions(panels: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Draw a histogram, a density and the mean of groups of losses [N], which are not negative; by title and label."""
    figure, axes = figure_of_panels(len(panels), 2)
    largest = max((losses.max() for groups in panels.values() for losses in groups.values() if len(losses)), default=1)
    bins, points = np.linspace(0, largest, NUM_BINS + 1), np.linspace(0, largest, NUM_POINTS)
    for (title, groups), ax in zip(panels.items(), axes, strict=True):
        for index, (name, losses) in enumerate(groups.items()):
            if not len(losses):
                continue
            style = {"color": depth_colours(len(groups))[index], "linestyle": run_style(index)[0]}
            ax.hist(losses, bins, density=True, color=style["color"], alpha=0.22)
            if (curve := density(losses, points)) is not None:
                ax.plot(points, curve, linewidth=1.6, **style)
            label = f"{legend_label(name)}, mean {losses.mean():.2f}"
            ax.axvline(losses.mean(), linewidth=1, alpha=0.8, label=label, **style)
        ax.set_title(legend_label(title) if len(panels) > 1 else "")
        ax.set(xlabel="discriminator loss on a replaced token (nats)", ylabel="density", xlim=(0, largest))
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8)
    return figure


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


def scores_over_cost(panels: dict[str, list[CostSeries]], x_label: str) -> Figure:
    """Draw the scores of each run over its cost, in one panel for each task; bars are standard deviations over seeds."""
    figure, axes = figure_of_panels(len(panels), 2)
    for (title, series), ax in zip(panels.items(), axes, strict=True):
        for index, run in enumerate(series):
            costs, scores, deviations = zip(*run.points, strict=True)
            label = legend_label(run.label)
            ax.errorbar(costs, scores, yerr=deviations, label=label, capsize=2, **line_style(index))
        ax.set(title=legend_label(title), xlabel=x_label, ylabel="score on the development set (%)", xlim=(0, None))
        if x_label == "updates":
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        draw_grid(ax)
        ax.legend(frameon=False, fontsize=8)
    return figure
