"""The panels that ``amos plot`` draws: what each shows, and the styles that tell depths and runs apart.

Colours are the Okabe-Ito palette (runs) and viridis (depths, an ordered quantity): both stay apart for colour-blind
readers, and runs differ in line style and marker too.
"""

import contextlib
import dataclasses
import itertools
import os
import re
from typing import Iterator, Optional

import matplotlib

matplotlib.use("Agg")  # a server has no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, ScalarFormatter

from amos_fairseq.cli.colours import depth_colours
from amos_fairseq.cli.runs import Curve, Run
from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file

RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
RUN_DASHES = ("-", "--", ":", "-.", (0, (3, 1, 1, 1, 1, 1)))
RUN_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#555555"
PANEL_INCHES = (5.2, 3.6)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes. ``key`` ends in ``_`` where a depth follows in the log's key."""

    file_name: str
    title: str
    y_label: str
    key: str
    y_limits: tuple[Optional[float], Optional[float]] = (None, None)
    reference: Optional[tuple[float, str]] = None
    training_only: bool = False  # fairseq logs a "wps" of validation too, which is another quantity

    @property
    def per_depth(self) -> bool:
        return self.key.endswith("_")


SCHEDULE_PANELS = (
    Panel("learning_rate", "Learning rate", "learning rate", "lr", (0, None), training_only=True),
    Panel(
        "throughput", "Training throughput, pauses included", "tokens per second", "wps", (0, None), training_only=True
    ),
)
PANELS = (
    Panel("mlm_loss", "MLM loss per generator depth", "cross-entropy (nats per masked token)", "mlm_loss_"),
    Panel("mixture", "Mixture weights", "mean weight over masked tokens", "mixture_", (-0.02, 1.02)),
    Panel("replaced_accuracy", "Detection of replaced tokens", "accuracy on replaced tokens", "rtd_recall", (0, None)),
    Panel("auc", "Detection AUC", "area under the ROC curve", "rtd_auc", reference=(0.5, "chance")),
    *SCHEDULE_PANELS,
)
# Of single objectives: drawn where a run logged them, and not missed where none did.
OBJECTIVE_PANELS = (
    Panel(
        "selection_loss", "Multi-word selection: loss", "cross-entropy (nats per masked token)", "mws_loss", (0, None)
    ),
    Panel("selection_accuracy", "Multi-word selection: accuracy", "original selected", "mws_acc", (0, 1)),
    Panel(
        "main_loss",
        "Main network: loss of the originals",
        "cross-entropy (nats per guessed token)",
        "main_loss",
        (0, None),
    ),
    Panel("main_accuracy", "Main network: originals guessed", "accuracy on guessed tokens", "main_acc", (0, 1)),
    Panel("copy_probability", "Copy mechanism", "mean probability of copying", "copy_prob", (0, 1)),
    Panel("policy_loss", "Generator by reward: loss", "policy loss (per masked token)", "policy_loss"),
    Panel("baseline_loss", "Generator by reward: baseline", "cross-entropy (nats per masked token)", "baseline_loss"),
    Panel("reward", "Generator by reward: reward", "detection loss (nats per masked token)", "reward", (0, None)),
)
# Of fine-tuning: what fairseq's sentence_prediction (in per cent) and our squad log.
SCORE_PANELS = (
    Panel("accuracy", "Accuracy", "examples classified rightly (%)", "accuracy"),
    Panel("matthews", "Matthews correlation", "correlation (%)", "mcc"),
    Panel("spearman", "Spearman correlation", "correlation (%)", "spearman"),
    Panel("span_accuracy", "Answers", "windows with the right start and end", "span_acc", (0, 1)),
)
LOSS_PANEL = Panel("loss", "Loss of fine-tuning", "loss, in the unit of its criterion", "loss", (0, None))


def panels_for(runs: list[Run]) -> tuple[Panel, ...]:
    """The panels of pretraining, or of fine-tuning where a run logged one of its scores, or both."""
    fine_tuned = any(depth_names(panel, runs) for panel in SCORE_PANELS)
    of_objectives = tuple(panel for panel in OBJECTIVE_PANELS if depth_names(panel, runs))
    pretraining = (*PANELS[: -len(SCHEDULE_PANELS)], *of_objectives)
    pretrained = any(depth_names(panel, runs) for panel in pretraining)
    if not fine_tuned:
        return (*pretraining, *SCHEDULE_PANELS)
    scores = tuple(panel for panel in SCORE_PANELS if depth_names(panel, runs))
    own = (LOSS_PANEL, *scores, *SCHEDULE_PANELS)
    return (*pretraining, *own) if pretrained else own


def draw_all(runs: list[Run], directory: str) -> list[str]:
    """Write the overview and each panel as PNG and SVG. Returns what was written, and which panels had no values.

    The directory is made if absent.

    Raises:
        UserError: no panel has values; nothing is then made.
        OSError: the directory cannot be written.
    """
    wanted = panels_for(runs)
    panels = [panel for panel in wanted if depth_names(panel, runs)]
    if not panels:
        drawn = ", ".join(f"{panel.key}N" if panel.per_depth else panel.key for panel in wanted)
        raise UserError(
            f"{', '.join(run.name for run in runs)}: no value to draw, records hold none of {drawn}; name a SAVE_DIR of "
            "fairseq-train with --user-dir amos_fairseq, or its metrics.jsonl"
        )
    os.makedirs(directory, exist_ok=True)
    messages = [
        f"{panel.title}: left out, no run logged {panel.key.rstrip('_')}" for panel in wanted if panel not in panels
    ]
    styles = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "svg.hashsalt": "amos"}
    with plt.rc_context(styles):
        for name, chosen in [("overview", panels), *((panel.file_name, [panel]) for panel in panels)]:
            with panel_grid(chosen, runs) as figure:
                messages += [save(figure, os.path.join(directory, f"{name}.{kind}")) for kind in ("png", "svg")]
    return messages


def save(figure: Figure, path: str) -> str:
    # Without a date the same log gives the same bytes.
    metadata = {"Date": None} if path.endswith(".svg") else {}
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150, metadata=metadata)
    return path


@contextlib.contextmanager
def panel_grid(panels: list[Panel], runs: list[Run]) -> Iterator[Figure]:
    """A figure of up to three panels a row with one legend below that tells runs and splits."""
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    width, height = PANEL_INCHES
    figure, axes = plt.subplots(
        rows, columns, squeeze=False, layout="constrained", figsize=(width * columns, height * rows + 0.4)
    )
    for panel, ax in itertools.zip_longest(panels, axes.flat):
        if panel is None:
            ax.set_axis_off()
        else:
            draw_panel(ax, panel, runs)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    add_legend(figure, runs)
    try:
        yield figure
    finally:
        plt.close(figure)


def depth_names(panel: Panel, runs: list[Run]) -> list[str]:
    """The suffixes under which any run logged the panel's key, shallow first; [""] for a key without depths."""
    suffix = r"(\d.*)" if panel.per_depth else "()"  # a depth starts with a digit: mixture_entropy is no depth
    keys = {key for run in runs for curves in run.curves.values() for key in curves}
    matches = (re.fullmatch(re.escape(panel.key) + suffix, key) for key in keys)
    return sorted({match[1] for match in matches if match}, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])


def draw_panel(ax: Axes, panel: Panel, runs: list[Run]) -> None:
    depths = depth_names(panel, runs)
    colours = depth_colours(len(depths))
    for index, run in enumerate(runs):
        for depth, depth_colour in zip(depths, colours, strict=True):
            colour = depth_colour if panel.per_depth else run_colour(index)
            draw_line(ax, run.curves.get("train", {}).get(panel.key + depth), colour, run_style(index))
            if not panel.training_only:
                draw_markers(ax, run.curves.get("valid", {}).get(panel.key + depth), colour, run_style(index))
    if panel.reference:
        level, label = panel.reference
        ax.axhline(level, color=GREY, linewidth=0.8, linestyle=":")
        ax.annotate(label, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=GREY, size=8)
    ax.set_ylim(*panel.y_limits)
    ax.set(title=panel.title, xlabel="update", ylabel=panel.y_label)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.key == "wps":
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif panel.key == "lr":
        formatter = ScalarFormatter(useMathText=True)
        formatter.set_powerlimits((-2, 3))
        ax.yaxis.set_major_formatter(formatter)
    if panel.per_depth:
        handles = [Line2D([], [], color=colour, linewidth=2) for colour in colours]
        ax.legend(handles, [f"depth {depth}" for depth in depths], fontsize=8)


def draw_line(ax: Axes, curve: Optional[Curve], colour: str, style: tuple[object, str]) -> None:
    if curve is not None:
        # A line through one point is invisible.
        single = "." if len(curve.updates) == 1 else None
        ax.plot(curve.updates, curve.values, color=colour, linewidth=1, linestyle=style[0], marker=single, alpha=0.85)


def draw_markers(ax: Axes, curve: Optional[Curve], colour: str, style: tuple[object, str]) -> None:
    if curve is not None:
        size = 5 if len(curve.updates) <= 30 else 3.5  # many validations would hide the line
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.1 * size}
        ax.plot(curve.updates, curve.values, style[1], color=colour, markersize=size, zorder=3, **edge)


def run_colour(index: int) -> str:
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def run_style(index: int) -> tuple[object, str]:
    """Dash pattern and marker: 35 runs before a pair repeats."""
    return RUN_DASHES[index % len(RUN_DASHES)], RUN_MARKERS[index % len(RUN_MARKERS)]


def add_legend(figure: Figure, runs: list[Run]) -> None:
    """Below the panels: what line and marker mean, and for several runs the style of each."""
    handles = [
        Line2D([], [], color=GREY, linewidth=1, label="line: training"),
        Line2D([], [], color=GREY, linestyle="none", marker=RUN_MARKERS[0], markersize=5, label="marker: validation"),
    ]
    title = None
    # matplotlib hides labels that start with "_" and reads "$" as mathematics.
    names = [" " + run.name.replace("$", r"\$") for run in runs]
    if len(runs) == 1:
        figure.suptitle(names[0], color=GREY)
    else:
        title = "line style and marker tell runs apart; colour does where no depths are shown"
        handles = [run_handle(index, name) for index, name in enumerate(names)] + handles
    columns = min(len(handles), 5 if max(map(len, names)) < 30 else 2)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, title=title)


def run_handle(index: int, name: str) -> Line2D:
    dash, marker = run_style(index)
    style = {"color": run_colour(index), "linestyle": dash, "linewidth": 1.2, "marker": marker, "markersize": 5}
    return Line2D([], [], label=name, **style)
