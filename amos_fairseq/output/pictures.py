"""One style for all pictures: colors, markers, panels and file output.

Colors are the Okabe-Ito palette for runs and viridis for depths, which are ordered. Color-blind readers can distinguish
both, and runs also differ in line style and marker. Figures are made without pyplot, which needs a display or changes the
backend of the process. Functions that make and save figures are decorated with :func:`matplotlib.rc_context` of
:data:`RC_PARAMS`.
"""

import io
import os
from pathlib import Path

from matplotlib import colormaps, colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amos_fairseq.errors import one_line
from amos_fairseq.files import whole_file

RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
RUN_DASHES = ("-", "--", ":", "-.", (0, (3, 1, 1, 1, 1, 1)))
RUN_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#555555"
RC_PARAMS = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "svg.hashsalt": "amos"}
PANEL_INCHES = (5.2, 3.6)


def run_colour(index: int) -> str:
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def run_style(index: int) -> tuple[object, str]:
    """Return a dash pattern and a marker: 35 runs before a pair repeats."""
    return RUN_DASHES[index % len(RUN_DASHES)], RUN_MARKERS[index % len(RUN_MARKERS)]


def line_style(index: int) -> dict[str, object]:
    """Return how the line of a run with markers is drawn."""
    dashes, marker = run_style(index)
    return {"color": run_colour(index), "linestyle": dashes, "linewidth": 1.2, "marker": marker, "markersize": 5}


def depth_colours(num_depths: int) -> list[str]:
    """Return a color "#rrggbb" per generator depth, from dark for the first to light for the last.

    The last fifth of the scale is too pale for thin lines on white and is not used.
    """
    scale = colormaps["viridis"]
    return [colors.to_hex(scale(0.8 * i / max(num_depths - 1, 1))) for i in range(num_depths)]


def legend_label(name: str) -> str:
    """Return a label that matplotlib shows unchanged: it hides labels that start with "_" and parses "$" as mathematics."""
    return " " + one_line(name).replace("$", r"\$")


def figure_of_panels(number: int, most_columns: int, legend_inches: float = 0.0) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``number`` axes of equal size, and space for a legend below them."""
    columns = min(number, most_columns)
    rows = -(-number // columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows + legend_inches), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for ax in axes[number:]:
        ax.set_axis_off()
    return figure, axes[:number]


def draw_grid(ax: Axes) -> None:
    ax.grid(alpha=0.25, linewidth=0.6)


def as_svg(figure: Figure) -> bytes:
    """Draw a figure; without a date the same data give the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def save(figure: Figure, directory: str | Path, name: str) -> list[str]:
    """Write ``name.svg`` and ``name.png`` to ``directory`` and return both paths."""
    paths = [os.path.join(directory, f"{name}.{extension}") for extension in ("svg", "png")]
    with whole_file(paths[0]) as unfinished:
        Path(unfinished).write_bytes(as_svg(figure))
    with whole_file(paths[1]) as unfinished:
        figure.savefig(unfinished, dpi=150)
    return paths
