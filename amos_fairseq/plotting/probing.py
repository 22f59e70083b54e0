"""Figure of edge probing: one row per task, a marker for each layer and baseline (the table under AMOS "Figure 4")."""

import statistics
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amos_fairseq.plotting.style import GREY, RC_PARAMS, depth_colours, legend_label, run_colour, save
from amos_fairseq.probing.results import Result, column_name, columns_of, row_name, scores_by_cell

GENERATOR_MARKERS = ("o", "s", "^", "v", "P")  # one for each separate generator


def plot_probing(results: Sequence[Result], directory: str) -> list[str]:
    """Write ``probing.png`` and ``probing.svg`` and return their paths.

    Raises:
        OSError: the directory cannot be written.
    """
    with matplotlib.rc_context(RC_PARAMS):
        return save(probing_figure(list(results)), directory, "probing")


def probing_figure(results: list[Result]) -> Figure:
    """Draw the mean score of each column as a marker, and the range over the seeds as a line behind it."""
    cells = scores_by_cell(results)
    columns = columns_of(results)
    figure = Figure(figsize=(8, 1.6 + 0.45 * len(cells) + 0.12 * len(columns)), layout="constrained")
    ax = figure.subplots()
    for column, style in zip(columns, column_styles(columns), strict=True):
        rows = [(row, cell[column]) for row, cell in enumerate(cells.values()) if column in cell]
        _draw_column(ax, rows, legend_label(column_name(column)), style)
    ax.set_yticks(range(len(cells)), [legend_label(row_name(*cell)) for cell in cells])
    ax.set_ylim(len(cells) - 0.5, -0.5)  # the first task at the top
    ax.set(title="Edge probing", xlabel="score (%)")
    ax.grid(axis="both", alpha=0.25, linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def column_styles(columns: Sequence[tuple]) -> list[dict[str, object]]:
    """Return a color and a marker per column: layers of a part from dark to light, a marker for each part, hollow with random
    weights, and a grey bar for pieces alone.
    """
    generators = [part for part in dict.fromkeys(part for part, _, _ in columns) if part.startswith("generator")]
    layers: dict[str, list] = {}
    for part, layer, baseline in columns:
        if baseline != "pieces" and layer not in layers.setdefault(part, []):
            layers[part].append(layer)
    styles: list[dict[str, object]] = []
    for part, layer, baseline in columns:
        if baseline == "pieces":
            styles.append({"color": GREY, "marker": "|", "markersize": 12, "markeredgewidth": 2})
            continue
        is_main, own = not part.startswith("generator"), layers[part]
        position = own.index(layer)
        colour = run_colour(1) if is_main and len(own) == 1 else depth_colours(len(own))[position]
        marker = "D" if is_main else GENERATOR_MARKERS[generators.index(part) % len(GENERATOR_MARKERS)]
        filled = "none" if baseline else "full"
        styles.append({"color": colour, "marker": marker, "fillstyle": filled, "markersize": 7})
    return styles


def _draw_column(ax: Axes, rows: list[tuple[int, list[float]]], label: str, style: dict[str, object]) -> None:
    means = [100 * statistics.mean(scores) for _, scores in rows]
    ax.plot(means, [row for row, _ in rows], linestyle="none", label=label, zorder=3, **style)
    for row, scores in rows:
        ax.hlines(row, 100 * min(scores), 100 * max(scores), color=style["color"], linewidth=1, zorder=2)
