"""Two figures: the score against FLOPs (thesis Figure 5.1) and against hours (AMOS Figure 6), the papers' findings beside."""

import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # servers have no display
import matplotlib.pyplot as plt

from amos_fairseq.plotting.style import RC_PARAMS, RUN_COLOURS, RUN_MARKERS, save


def draw_all(content: dict[str, Any], paper: dict[str, Any], directory: Path) -> list[Path]:
    """Write ``score_by_flops`` and ``score_by_hours`` as PNG and SVG; nothing where no point has a score."""
    curves = {
        name: {key: curve(entry, key) for key in ("flops_thesis", "hours")}
        for name, entry in content["entries"].items()
    }
    if not any(of_entry["flops_thesis"] for of_entry in curves.values()):
        return []
    written = []
    with plt.rc_context(RC_PARAMS):
        for name, figure in (
            ("score_by_flops", flops_figure(content, curves, paper["flops_curve"])),
            ("score_by_hours", hours_figure(content, curves, paper["hours_statement"])),
        ):
            written += map(Path, save(figure, directory, name))
            plt.close(figure)
    return written


def curve(entry: dict[str, Any], key: str) -> list[tuple[float, float, float]]:
    """(Cost, average, deviation) of the shares that have complete scores, in their order; one seed has deviation 0."""
    points = [point for point in entry["points"].values() if point["complete"] and point[key] is not None]
    averages = [point["scores"]["average"] for point in points]
    return [
        (point[key], average["value"], average["deviation"] or 0.0)
        for point, average in zip(points, averages, strict=True)
    ]


def draw_curves(ax: Any, content: dict[str, Any], curves: dict[str, dict[str, list]], key: str) -> None:
    """One line an entry; bars are one standard deviation over the seeds of fine-tuning."""
    for index, (name, of_entry) in enumerate(curves.items()):
        if of_entry[key]:
            costs, scores, deviations = zip(*of_entry[key], strict=True)
            ax.errorbar(
                costs, scores, yerr=deviations, label=content["entries"][name]["label"], capsize=2, linewidth=1.2,
                color=RUN_COLOURS[index % len(RUN_COLOURS)], marker=RUN_MARKERS[index % len(RUN_MARKERS)], markersize=5,
            )  # fmt: skip
    ax.grid(alpha=0.25, linewidth=0.6)
    tasks = content["setup"]["tasks"]
    ax.set_ylabel(f"{'average of ' if len(tasks) > 1 else ''}{', '.join(tasks)} (%)")


def flops_figure(content: dict[str, Any], curves: dict[str, dict[str, list]], paper: dict[str, Any]) -> Any:
    figure, (ours, theirs) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    draw_curves(ours, content, curves, "flops_thesis")
    ours.set(title=f"Here: {content['setup']['size']} models, {content['setup']['budget']} each", xscale="log")
    for index, (name, points) in enumerate(paper["series"].items()):
        costs, scores = zip(*points, strict=True)
        theirs.plot(costs, scores, label=name, color=RUN_COLOURS[index % len(RUN_COLOURS)],
            marker=RUN_MARKERS[index % len(RUN_MARKERS)], markersize=5, linewidth=1.2)  # fmt: skip
    theirs.set(title=f"The paper: {paper['source']}, as in Figure 5.1", xscale="log", ylabel="GLUE score, dev (%)")
    theirs.grid(alpha=0.25, linewidth=0.6)
    for ax in (ours, theirs):
        ax.set_xlabel("pretraining FLOPs (thesis 5.2.2)")
        ax.legend(frameon=False, fontsize=8)
    return figure


def hours_figure(content: dict[str, Any], curves: dict[str, dict[str, list]], statement: str) -> Any:
    figure, ax = plt.subplots(figsize=(7, 5), layout="constrained")
    draw_curves(ax, content, curves, "hours")
    ax.set(xlabel=f"hours of pretraining ({content['setup']['device']})", xlim=(0, None))
    ax.set_title(f"Here: {content['setup']['size']} models, {content['setup']['budget']} each")
    ax.legend(frameon=False, fontsize=8)
    figure.supxlabel("\n".join(textwrap.wrap(f"The paper: {statement}", 100)), fontsize=8)
    return figure
