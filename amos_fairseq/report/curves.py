"""The figures: training curves, read from ``metrics.jsonl``, with the panel of each value; losses by generator depth.

Colors are the Okabe-Ito palette for runs and viridis for depths, which are ordered. Color-blind readers can distinguish
both, and runs also differ in line style and marker. Figures are made without pyplot, which needs a display or changes the
backend of the process. Functions that make and save figures are decorated with :func:`matplotlib.rc_context` of
:data:`RC_PARAMS`.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps, colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from amos_fairseq.errors import one_line
from amos_fairseq.files import distinct_names, whole_file
from amos_fairseq.run.metrics_file import read_records

RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
RUN_DASHES = ("-", "--", ":", "-.", (0, (3, 1, 1, 1, 1, 1)))
RUN_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#555555"
RC_PARAMS = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "svg.hashsalt": "amos"}
WIDTH, HEIGHT = 13.2, 3.3  # inches: of a row, which the page can show in this size, and of a panel
MOST_IN_LEGEND = 8  # depths, from the first to the last at equal distances; a legend of hundreds takes seconds
FEW_POINTS = 30  # of a curve: each is shown
NUM_BINS = 40  # of a histogram


class Curve(NamedTuple):
    """One logged value over the updates of one split; nan where the run logged null."""

    updates: list[int]
    values: list[float]


@dataclass
class RunCurves:
    """The curves of one run: ``curves[split][key]``, split ``train`` or ``valid``."""

    name: str
    curves: dict[str, dict[str, Curve]]

    def get(self, split: str, key: str) -> Curve:
        """Return a curve; one without points if the run has not logged it."""
        return self.curves.get(split, {}).get(key, Curve([], []))


@dataclass(frozen=True)
class Panel:
    """One pair of axes. ``key`` ends in ``_`` where a depth follows in the log's key."""

    file_name: str
    title: str
    y_label: str
    key: str
    y_limits: tuple[float | None, float | None] = (None, None)
    reference: tuple[float, str] | None = None
    reference_key: tuple[str, str] | None = None  # (key, label): the reference is a value that validation logs
    training_only: bool = False  # fairseq logs a "wps" of validation too, which is another quantity

    @property
    def per_depth(self) -> bool:
        return self.key.endswith("_")


FROM_0, SHARE = (0, None), (0, 1)
NATS = "loss (nats per masked token)"
UNIGRAM = ("unigram_entropy", "unigram entropy of the validation text")
GAIN, PRIOR = "loss - entropy of the prior (nats)", (0.0, "knows the fraction alone")
# In the order of the page; a panel is drawn where a run has logged its value.
PANELS = (
    Panel("mlm_loss", "MLM loss by depth", NATS, "mlm_loss_", reference_key=UNIGRAM),
    Panel("mixture", "Mixture weights", "mean weight over masked tokens", "mixture_", (-0.02, 1.02)),
    Panel("recall", "Recall of replaced tokens", "share of the replaced tokens", "rtd_recall", FROM_0),
    Panel("auc", "Detection AUC", "area under the ROC curve", "rtd_auc", reference=(0.5, "chance")),
    # Whether a discriminator distinguishes tokens (docs/collapse.md).
    Panel("detection_gain", "Detection loss against the prior", GAIN, "rtd_loss_above_prior", reference=PRIOR),
    Panel("logit_std", "Detection logits", "standard deviation within a batch", "rtd_logit_std", FROM_0),
    Panel("state_variance", "States below the detection head", "variance / mean square", "rtd_state_variance", SHARE),
    Panel("first_component", "Their first principal component", "share of the variance", "rtd_first_component", SHARE),
    Panel("participation_ratio", "Directions that they use", "participation ratio", "rtd_participation_ratio", FROM_0),
    Panel("selection_loss", "Multi-word selection: loss", NATS, "mws_loss", FROM_0),
    Panel("selection_accuracy", "Multi-word selection: accuracy", "original selected", "mws_acc", SHARE),
    Panel("main_loss", "Main network: MLM loss", "cross-entropy (nats per predicted token)", "main_loss", FROM_0),
    Panel("main_accuracy", "Main network: MLM accuracy", "accuracy on predicted tokens", "main_acc", SHARE),
    Panel("copy_probability", "Copy mechanism", "mean probability of copying", "copy_prob", SHARE),
    Panel("policy_loss", "Generator by reward: loss", "policy loss (per masked token)", "policy_loss"),
    Panel("baseline_loss", "Generator by reward: baseline", NATS, "baseline_loss"),
    Panel("reward", "Generator by reward: reward", "detection loss (nats per masked token)", "reward", FROM_0),
    # Of fine-tuning; scores, fairseq's sentence_prediction included, are in percent but for that of squad.
    Panel("loss", "Loss of fine-tuning", "loss, in the unit of its criterion", "loss", FROM_0),
    Panel("accuracy", "Accuracy", "correct predictions (%)", "accuracy"),
    Panel("matthews", "Matthews correlation", "correlation (%)", "matthews"),
    Panel("matthews_of_fairseq", "Matthews correlation", "correlation (%)", "mcc"),
    Panel("macro_f1", "Macro-F1", "mean F1 of the classes (%)", "macro_f1"),
    Panel("micro_f1", "Micro-F1", "F1 of all labels (%)", "micro_f1"),
    Panel("spearman", "Spearman correlation", "correlation (%)", "spearman"),
    Panel("pearson", "Pearson correlation", "correlation (%)", "pearson"),
    Panel("span_accuracy", "Answers", "windows with correct start and end", "span_acc", SHARE),
    Panel("f1", "Spans of words", "F1 (%)", "f1"),
    Panel("average", "Mean of the main scores", "score (%)", "average"),
    Panel("labeled_attachment", "Trees: LAS", "words with head and relation (%)", "las"),
    Panel("consistency", "Cross-view training", "divergence of views (nats per unlabeled word)", "cvt_loss", FROM_0),
    Panel("learning_rate", "Learning rate", "learning rate", "lr", FROM_0, training_only=True),
    Panel("throughput", "Training throughput, pauses included", "tokens per second", "wps", FROM_0, training_only=True),
)


def read_curves(save_dirs: Sequence[str | Path]) -> list[RunCurves]:
    """Read the ``metrics.jsonl`` of each SAVE_DIR; a run is named by the last part of its path that differs."""
    paths = list(map(Path, save_dirs))
    return [RunCurves(name, read_log(path)) for path, name in zip(paths, distinct_names(paths), strict=True)]


def read_log(save_dir: Path) -> dict[str, dict[str, Curve]]:
    """Return all logged values by split and key. Of several validation subsets the first is ``valid``."""
    curves: dict[str, dict[str, Curve]] = {}
    drawn_subset, left_out = "", set()
    for record in read_records(save_dir):
        update, subset = record.pop("update"), record.pop("split")
        if subset != "train":
            drawn_subset = drawn_subset or subset
            if subset != drawn_subset:  # another text
                left_out.add(subset)
                continue
        split = curves.setdefault("train" if subset == "train" else "valid", {})
        for key, value in record.items():
            if key not in split:
                split[key] = Curve([], [])
            split[key].updates.append(update)
            split[key].values.append(math.nan if value is None else float(value))
    if left_out:
        print(f"{save_dir}: the validation subset {drawn_subset} is drawn; left out: {', '.join(sorted(left_out))}")
    return curves


def depth_names(panel: Panel, runs: Sequence[RunCurves]) -> list[str]:
    """Return the suffixes under which runs logged the panel's key, in order: [""] without depths, [] where no run did."""
    suffix = r"(\d.*)" if panel.per_depth else "()"  # a depth starts with a digit, so mixture_entropy does not match
    splits = ("train",) if panel.training_only else ("train", "valid")
    keys = {key for run in runs for split in splits for key in run.curves.get(split, {})}
    matches = (re.fullmatch(re.escape(panel.key) + suffix, key) for key in keys)
    return sorted({match[1] for match in matches if match}, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])


def logged_panels(runs: Sequence[RunCurves]) -> list[Panel]:
    """Return the panels of values that a run has logged; the loss only of fine-tuning, because that of pretraining is a sum
    with an adversary and does not rank models."""
    panels = [panel for panel in PANELS if depth_names(panel, runs)]
    is_pretraining = any(panel.key == "mlm_loss_" for panel in panels)
    return [panel for panel in panels if panel.key != "loss" or not is_pretraining]


def panels_figure(panels: Sequence[Panel], runs: Sequence[RunCurves]) -> Figure:
    """A figure with up to three panels per row and one legend below them."""
    figure, axes = figure_of_panels(len(panels), 3, legend_inches=0.4)
    for ax in axes[1:]:
        ax.sharex(axes[0])
    for panel, ax in zip(panels, axes, strict=True):
        draw_panel(ax, panel, runs)
        ax.set_title(panel.title)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    _add_legend(figure, runs)
    return figure


def draw_panel(ax: Axes, panel: Panel, runs: Sequence[RunCurves]) -> None:
    """Draw the training lines and validation markers of runs, and the panel's reference levels."""
    depths = depth_names(panel, runs)
    colours = depth_colours(len(depths))
    for index, run in enumerate(runs):
        run_colour, dashes, marker = run_style(index)
        for depth, depth_colour in zip(depths, colours, strict=True):
            colour, key = depth_colour if panel.per_depth else run_colour, panel.key + depth
            training, validation = run.get("train", key), run.get("valid", key)
            if training.updates:
                draw_training(ax, training, colour, dashes)
            if validation.updates and not panel.training_only:
                draw_validation(ax, validation, colour, marker)
    for level, label in reference_levels(panel, runs):
        ax.axhline(level, color=GREY, linewidth=0.8, linestyle=":")
        ax.annotate(label, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=GREY, size=8)
    format_axes(ax, panel)
    if panel.per_depth:
        shown = np.linspace(0, len(depths) - 1, min(len(depths), MOST_IN_LEGEND)).round().astype(int)
        handles = [Line2D([], [], color=colours[i], linewidth=2, label=f"depth {depths[i]}") for i in shown]
        ax.legend(handles=handles, fontsize=8)


def draw_training(ax: Axes, curve: Curve, colour: str, dashes: object) -> None:
    points = {"marker": ".", "markersize": 5} if len(curve.updates) <= FEW_POINTS else {}
    if len(curve.updates) == 1:  # a line through one point is invisible
        points = {"marker": "_", "markersize": 12}
    ax.plot(*curve, color=colour, linestyle=dashes, linewidth=1, alpha=0.85, **points)


def draw_validation(ax: Axes, curve: Curve, colour: str, marker: str) -> None:
    size = 5 if len(curve.updates) <= FEW_POINTS else 3.5  # many validations would hide the line
    edge = {"markeredgecolor": "white", "markeredgewidth": 0.1 * size}
    ax.plot(*curve, color=colour, linestyle="none", marker=marker, markersize=size, zorder=3, **edge)


def format_axes(ax: Axes, panel: Panel) -> None:
    ax.set_ylim(*panel.y_limits)
    ax.set(xlabel="update", ylabel=panel.y_label)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.key == "wps":
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif panel.key == "lr":
        ax.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)


def reference_levels(panel: Panel, runs: Sequence[RunCurves]) -> list[tuple[float, str]]:
    """Return the horizontal lines of a panel with their labels; those that depend on the text once for each text."""
    levels = [panel.reference] if panel.reference else []
    if panel.reference_key:
        key, label = panel.reference_key
        values = {round(run.get("valid", key).values[-1], 3) for run in runs if run.get("valid", key).values}
        levels += [(value, f"{label} {value:.2f}") for value in sorted(values)]
    return levels


def _add_legend(figure: Figure, runs: Sequence[RunCurves]) -> None:
    handles = [
        Line2D([], [], color=GREY, linewidth=1, label="line: training"),
        Line2D([], [], color=GREY, linestyle="none", marker=RUN_MARKERS[0], markersize=5, label="marker: validation"),
    ]
    title = None
    if len(runs) > 1:
        title = "runs differ in line style and marker,\nand in color where no depths are shown"
        lines = []
        for index, run in enumerate(runs):
            colour, dashes, marker = run_style(index)
            style = {"color": colour, "linestyle": dashes, "linewidth": 1.2, "marker": marker, "markersize": 5}
            lines.append(Line2D([], [], label=legend_label(run.name), **style))
        handles = lines + handles
    else:
        figure.suptitle(legend_label(runs[0].name))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, title=title)


def loss_distributions(panels: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Draw a panel per title with a histogram and the mean of each group of losses, [N], not negative.

    ``panels``: title -> label of the group -> losses.
    """
    figure, axes = figure_of_panels(len(panels), 2)
    largest = max((losses.max() for groups in panels.values() for losses in groups.values() if len(losses)), default=1)
    bins = np.linspace(0, largest, NUM_BINS + 1)
    for (title, groups), ax in zip(panels.items(), axes, strict=True):
        for index, (name, losses) in enumerate(groups.items()):
            if not len(losses):
                continue
            style = {"color": depth_colours(len(groups))[index], "linestyle": run_style(index)[1]}
            ax.hist(losses, bins, density=True, histtype="stepfilled", color=style["color"], alpha=0.22)
            ax.hist(losses, bins, density=True, histtype="step", linewidth=1.6, **style)
            label = f"{legend_label(name)}, mean {losses.mean():.2f}"
            ax.axvline(losses.mean(), linewidth=1, alpha=0.8, label=label, **style)
        ax.set_title(legend_label(title) if len(panels) > 1 else "")
        ax.set(xlabel="discriminator loss on a replaced token (nats)", ylabel="density", xlim=(0, largest))
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8)
    return figure


def run_style(index: int) -> tuple[str, object, str]:
    """Return a color, a dash pattern and a marker: 35 runs before all of them repeat."""
    return tuple(styles[index % len(styles)] for styles in (RUN_COLOURS, RUN_DASHES, RUN_MARKERS))


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
    width = WIDTH / max(columns, 2)
    figure = Figure(figsize=(width * columns, HEIGHT * rows + legend_inches), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for ax in axes[number:]:
        ax.set_axis_off()
    return figure, axes[:number]


def as_svg(figure: Figure) -> bytes:
    """Draw a figure; without a date the same data give the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def save(figure: Figure, directory: Path, name: str) -> bytes:
    """Write ``name.svg`` and ``name.png`` to ``directory``, and return the SVG."""
    svg = as_svg(figure)
    with whole_file(f"{directory / name}.svg") as unfinished:
        Path(unfinished).write_bytes(svg)
    with whole_file(f"{directory / name}.png") as unfinished:
        figure.savefig(unfinished, dpi=150)
    return svg
