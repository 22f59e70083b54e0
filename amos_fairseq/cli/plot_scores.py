"""``amos plot`` of results: the scores of every seed on every task, several results side by side."""

import json
import statistics
from pathlib import Path
from typing import NamedTuple

from amos_fairseq.cli import plot_panels
from amos_fairseq.cli.plot_panels import RUN_COLOURS, RUN_MARKERS, plt
from amos_fairseq.errors import UserError

Scores = dict[str, list[float]]  # task -> the main score of each seed, in per cent


class Results(NamedTuple):
    """What one ``amos glue`` or ``amos squad`` found."""

    name: str
    scores: Scores


def read_results(paths: list[str]) -> list[Results]:
    """``glue.json`` and ``squad.json`` files, named by the directory that they lie in.

    Raises:
        UserError: a file is missing or holds no results.
    """
    results = []
    for path in map(Path, paths):
        try:
            runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
            scores: Scores = {}
            for run in runs:
                task = f"{run['task']} {run['point']}".strip()  # a point of a grid of settings has its own column
                scores.setdefault(task, []).append(float(run["scores"][run["main_score"]]))
        except OSError as error:
            raise UserError(f"{path}: no results to plot ({error.strerror}); name a glue.json or squad.json") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} holds no results: name the glue.json or squad.json of amos glue or squad"
            ) from error
        if not scores:
            raise UserError(f"{path} holds no finished run yet: wait for the first one")
        results.append(Results(path.absolute().parent.name, scores))
    return results


def draw_scores(results: list[Results], directory: str) -> list[str]:
    """Write ``scores.png`` and ``scores.svg``: a marker a seed, a bar at the median. Returns what was written.

    Raises:
        OSError: the directory cannot be written.
    """
    tasks = list(dict.fromkeys(task for result in results for task in result.scores))
    Path(directory).mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "svg.hashsalt": "amos"}):
        figure, ax = plt.subplots(figsize=(1.2 * len(tasks) + 3, 4), layout="constrained")
        width = 0.8 / len(results)
        for index, result in enumerate(results):
            colour = RUN_COLOURS[index % len(RUN_COLOURS)]
            marker = RUN_MARKERS[index % len(RUN_MARKERS)]
            label: str | None = " " + result.name.replace("$", r"\$")  # as in the legends of curves
            for column, task in enumerate(tasks):
                seeds = result.scores.get(task, [])
                place = column + (index - (len(results) - 1) / 2) * width
                if seeds:
                    ax.plot([place] * len(seeds), seeds, marker, color=colour, alpha=0.6, markersize=5, label=label)
                    label = None  # one entry in the legend
                    ax.hlines(
                        statistics.median(seeds), place - 0.4 * width, place + 0.4 * width, color=colour, linewidth=2
                    )
        ax.set_xticks(range(len(tasks)), tasks)
        ax.set(title="Scores on the development sets", ylabel="main score of the task (%)")
        ax.grid(axis="y", alpha=0.25, linewidth=0.6)
        figure.legend(
            loc="outside lower center", ncols=3, frameon=False, title="a marker is a seed, a bar their median"
        )
        try:
            return [plot_panels.save(figure, str(Path(directory) / f"scores.{kind}")) for kind in ("png", "svg")]
        finally:
            plt.close(figure)
