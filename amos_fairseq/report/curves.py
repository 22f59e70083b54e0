"""Training curves: read from ``metrics.jsonl``, and drawn: which value in which panel, how depths and runs differ."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from amos_fairseq.errors import UserError
from amos_fairseq.files import distinct_names
from amos_fairseq.output.pictures import (
    GREY,
    RC_PARAMS,
    depth_colours,
    draw_grid,
    figure_of_panels,
    legend_label,
    line_style,
    run_colour,
    run_style,
    save,
)
from amos_fairseq.run.metrics_file import FILE_NAME, parse_lines
from amos_fairseq.strangers import read_bytes

# Sizes in a legend: the line of an entry with the spaces around it, an average character of its label, a row of entries.
INCHES_OF_A_LINE, INCHES_OF_A_CHARACTER, INCHES_OF_A_ROW = 0.6, 0.074, 0.22


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
    reference_key: tuple[str, str] | None = None  # the same, with a value that validation logs instead of a number
    training_only: bool = False  # fairseq logs a "wps" of validation too, which is another quantity

    @property
    def per_depth(self) -> bool:
        return self.key.endswith("_")


FROM_0, SHARE = (0, None), (0, 1)
NATS = "cross-entropy (nats per masked token)"
SCHEDULE_PANELS = (
    Panel("learning_rate", "Learning rate", "learning rate", "lr", FROM_0, training_only=True),
    Panel("throughput", "Training throughput, pauses included", "tokens per second", "wps", FROM_0, training_only=True),
)
UNIGRAM = ("unigram_entropy", "unigram entropy of the validation text")
PANELS = (
    Panel("mlm_loss", "MLM loss per generator depth", NATS, "mlm_loss_", reference_key=UNIGRAM),
    Panel("mixture", "Mixture weights", "mean weight over masked tokens", "mixture_", (-0.02, 1.02)),
    Panel("recall", "Recall of replaced tokens", "fraction of replaced tokens that are found", "rtd_recall", FROM_0),
    Panel("auc", "Detection AUC", "area under the ROC curve", "rtd_auc", reference=(0.5, "chance")),
)
# Whether a discriminator distinguishes tokens (docs/collapse.md).
GAIN, PRIOR = "loss - entropy of the replaced fraction (nats)", (0.0, "knows the fraction alone")
DETECTOR_PANELS = (
    Panel("detection_gain", "Detection loss against the prior", GAIN, "rtd_loss_above_prior", reference=PRIOR),
    Panel("logit_std", "Detection logits", "standard deviation within a batch", "rtd_logit_std", FROM_0),
    Panel("state_variance", "States below the detection head", "variance / mean square", "rtd_state_variance", SHARE),
    Panel("first_component", "Their first principal component", "share of the variance", "rtd_first_component", SHARE),
    Panel("participation_ratio", "Directions that they use", "participation ratio", "rtd_participation_ratio", FROM_0),
)
# Values that only some objectives log: shown where a run has them, and not reported as missing.
OBJECTIVE_PANELS = (
    *DETECTOR_PANELS,
    Panel("selection_loss", "Multi-word selection: loss", NATS, "mws_loss", FROM_0),
    Panel("selection_accuracy", "Multi-word selection: accuracy", "original selected", "mws_acc", SHARE),
    Panel("main_loss", "Main network: MLM loss", "cross-entropy (nats per predicted token)", "main_loss", FROM_0),
    Panel("main_accuracy", "Main network: MLM accuracy", "accuracy on predicted tokens", "main_acc", SHARE),
    Panel("copy_probability", "Copy mechanism", "mean probability of copying", "copy_prob", SHARE),
    Panel("policy_loss", "Generator by reward: loss", "policy loss (per masked token)", "policy_loss"),
    Panel("baseline_loss", "Generator by reward: baseline", NATS, "baseline_loss"),
    Panel("reward", "Generator by reward: reward", "detection loss (nats per masked token)", "reward", FROM_0),
)
# Scores of fine-tuning, of fairseq's sentence_prediction and of the tasks of this package; all but that of squad in percent.
SCORE_PANELS = (
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
)
LOSS_PANEL = Panel("loss", "Loss of fine-tuning", "loss, in the unit of its criterion", "loss", FROM_0)


def read_curves(paths: Sequence[str | Path]) -> list[RunCurves]:
    """Read one run per path, a metrics file or its SAVE_DIR, named by the last part of the path that differs."""
    files = [path / FILE_NAME if path.is_dir() else path for path in map(Path, paths)]
    names = distinct_names([file.parent if file.name == FILE_NAME else file for file in files])
    return [RunCurves(name, read_log(file)) for name, file in zip(names, files, strict=True)]


def read_log(file: Path) -> dict[str, dict[str, Curve]]:
    """Return all values of one metrics file by split and key. A broken last line is skipped with a message.

    The file has no fingerprint: a value that somebody changed is shown, but what no run writes is refused.
    """
    content = read_bytes(file, f"name a SAVE_DIR of fairseq-train with --user-dir amos_fairseq, or its {FILE_NAME}")
    curves: dict[str, dict[str, Curve]] = {}
    lines, last_update, subset, others = parse_lines(content), 0, "", set()
    for number, text, record in lines:
        if record is None and (number < len(lines) or content.endswith(b"\n")):
            shown = text.decode(errors="replace")[:40]
            advice = f"give a SAVE_DIR or its {FILE_NAME}, or remove the line"
            raise UserError(f"{file}, line {number}: not a record of metrics ({shown!r}): {advice}")
        if record is None:
            print(f"{file}: the last line (line {number}) is cut short and left out; the run may still be writing it")
            continue
        if record["update"] < last_update:
            problem = f"update {record['update']:,} comes after update {last_update:,}"
            raise UserError(f"{file}, line {number}: {problem}; remove the records of one of the two runs")
        last_update = record["update"]
        if record["split"] != "train":
            subset = subset or record["split"]
            if record["split"] != subset:  # another text
                others.add(record["split"])
                continue
        split = curves.setdefault("train" if record["split"] == "train" else "valid", {})
        for key, value in record.items():
            if key not in ("split", "update"):
                curve = split.setdefault(key, Curve([], []))
                curve.updates.append(record["update"])
                curve.values.append(math.nan if value is None else float(value))
    if others:
        print(f"{file}: of the validation subsets {subset} is drawn; left out: {', '.join(sorted(others))}")
    if not curves:
        raise UserError(f"{file}: no records yet; a run writes its first one after --log-interval updates")
    return curves


def depth_names(panel: Panel, runs: Sequence[RunCurves]) -> list[str]:
    """Return the suffixes under which runs logged the panel's key, in order: [""] without depths, [] where no run did."""
    suffix = r"(\d.*)" if panel.per_depth else "()"  # a depth starts with a digit, so mixture_entropy does not match
    splits = ("train",) if panel.training_only else ("train", "valid")
    keys = {key for run in runs for split in splits for key in run.curves.get(split, {})}
    matches = (re.fullmatch(re.escape(panel.key) + suffix, key) for key in keys)
    return sorted({match[1] for match in matches if match}, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])


def panels_for(runs: list[RunCurves]) -> tuple[Panel, ...]:
    """Return the panels of pretraining, or of fine-tuning where a run logged one of its scores, or both."""
    scores = tuple(panel for panel in SCORE_PANELS if depth_names(panel, runs))
    of_objectives = tuple(panel for panel in OBJECTIVE_PANELS if depth_names(panel, runs))
    pretraining = (*PANELS, *of_objectives)
    if not scores:
        return (*pretraining, *SCHEDULE_PANELS)
    fine_tuning = (LOSS_PANEL, *scores, *SCHEDULE_PANELS)
    return (*pretraining, *fine_tuning) if any(depth_names(panel, runs) for panel in pretraining) else fine_tuning


@matplotlib.rc_context(RC_PARAMS)
def plot_curves(runs: list[RunCurves], directory: str) -> list[str]:
    """Write an overview and each panel as PNG and SVG; return lines about what is missing and what was written."""
    wanted = panels_for(runs)
    panels = [panel for panel in wanted if depth_names(panel, runs)]
    if not panels:
        keys = ", ".join(f"{panel.key}N" if panel.per_depth else panel.key for panel in wanted)
        raise UserError(f"{', '.join(run.name for run in runs)}: no value to draw, records hold none of {keys}")
    os.makedirs(directory, exist_ok=True)
    absent = [panel for panel in wanted if panel not in panels]
    messages = [f"{panel.title}: left out, no run logged {panel.key.rstrip('_')}" for panel in absent]
    for name, shown in [("overview", panels), *((panel.file_name, [panel]) for panel in panels)]:
        save(panels_figure(shown, runs), directory, name)
    names = ", ".join(panel.file_name for panel in panels)
    overview = os.path.join(directory, "overview.png")
    return [*messages, f"{overview}: all panels; in the same folder, a file for each panel: {names} (.png and .svg)"]


def panels_figure(panels: Sequence[Panel], runs: list[RunCurves], titled: bool = True) -> Figure:
    """A figure with up to three panels per row and one legend below them; ``titled`` names the panels and a single run."""
    figure, axes = figure_of_panels(len(panels), 3, legend_inches=0.4)
    for panel, ax in zip(panels, axes, strict=True):
        draw_panel(ax, panel, runs)
        ax.set_title(panel.title if titled else "")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    _add_legend(figure, runs, titled)
    return figure


def draw_panel(ax: Axes, panel: Panel, runs: Sequence[RunCurves]) -> None:
    """Draw the training lines and validation markers of runs."""
    depths = depth_names(panel, runs)
    colours = depth_colours(len(depths))
    for index, run in enumerate(runs):
        for depth, depth_colour in zip(depths, colours, strict=True):
            colour = depth_colour if panel.per_depth else run_colour(index)
            dashes, marker = run_style(index)
            training, validation = (run.get(split, panel.key + depth) for split in ("train", "valid"))
            if training.updates:
                # A line through one point is invisible.
                point = {"marker": "_", "markersize": 12} if len(training.updates) == 1 else {}
                ax.plot(*training, color=colour, linestyle=dashes, linewidth=1, alpha=0.85, **point)
            if validation.updates and not panel.training_only:
                size = 5 if len(validation.updates) <= 30 else 3.5  # many validations would hide the line
                edge = {"markeredgecolor": "white", "markeredgewidth": 0.1 * size}
                ax.plot(*validation, color=colour, linestyle="none", marker=marker, markersize=size, zorder=3, **edge)
    for level, label in reference_levels(panel, runs):
        ax.axhline(level, color=GREY, linewidth=0.8, linestyle=":")
        ax.annotate(label, (1, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=GREY, size=8)
    ax.set_ylim(*panel.y_limits)
    ax.set(xlabel="update", ylabel=panel.y_label)
    draw_grid(ax)
    ax.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.key == "wps":
        ax.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif panel.key == "lr":
        ax.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    if panel.per_depth:
        handles = [Line2D([], [], color=colour, linewidth=2) for colour in colours]
        ax.legend(handles, [f"depth {depth}" for depth in depths], fontsize=8)


def reference_levels(panel: Panel, runs: Sequence[RunCurves]) -> list[tuple[float, str]]:
    """Return the horizontal lines of a panel with their labels; those that depend on the text once for each text."""
    levels = [panel.reference] if panel.reference else []
    if panel.reference_key:
        key, label = panel.reference_key
        values = {round(run.get("valid", key).values[-1], 3) for run in runs if run.get("valid", key).values}
        levels += [(value, f"{label} {value:.2f}") for value in sorted(values)]
    return levels


def _add_legend(figure: Figure, runs: list[RunCurves], titled: bool) -> None:
    handles = [
        Line2D([], [], color=GREY, linewidth=1, label="line: training"),
        Line2D([], [], color=GREY, linestyle="none", marker=run_style(0)[1], markersize=5, label="marker: validation"),
    ]
    title = None
    labels = [legend_label(run.name) for run in runs]
    if len(runs) > 1:
        title = "runs differ in line style and marker, and in color where no depths are shown"
        title = fill(title, int(figure.get_figwidth() / INCHES_OF_A_CHARACTER))
        handles = [Line2D([], [], label=label, **line_style(index)) for index, label in enumerate(labels)] + handles
    elif titled:
        figure.suptitle(labels[0])
    longest = max(len(handle.get_label()) for handle in handles)
    fitting = int(figure.get_figwidth() / (INCHES_OF_A_LINE + longest * INCHES_OF_A_CHARACTER))
    columns = max(1, min(len(handles), fitting, 5))
    more_rows = -(-len(handles) // columns) - 1  # the figure has room for one row
    figure.set_figheight(figure.get_figheight() + INCHES_OF_A_ROW * more_rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, title=title)
