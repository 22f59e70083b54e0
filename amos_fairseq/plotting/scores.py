"""Figure of fine-tuning scores: every seed on every task, several results side by side."""

import statistics
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from amos_fairseq.errors import UserError
from amos_fairseq.plotting.style import RC_PARAMS, RUN_MARKERS, legend_label, run_colour, save
from amos_fairseq.strangers import finite_number, plain_name, read_json

SCORE_RANGE = (-100, 100)  # percent; a correlation can be negative


class Results(NamedTuple):
    """The results of one ``amos glue`` or ``amos squad``.

    Attributes:
        scores: task -> the main score of each seed, in percent.
    """

    name: str
    scores: dict[str, list[float]]


def read_results(paths: list[str]) -> list[Results]:
    """Read ``glue.json`` and ``squad.json`` files; each is named by its directory.

    Raises:
        UserError: a file is missing or holds no results.
    """
    results = []
    for path in map(Path, paths):
        scores: dict[str, list[float]] = {}
        content = read_json(path, "name the glue.json or squad.json of amos glue or squad")
        try:
            for run in content["runs"]:
                # Each point of a grid of settings has its own column.
                task = plain_name(f"{run['task']} {run['point']}".strip())
                score = finite_number(run["scores"][run["main_score"]], *SCORE_RANGE)
                scores.setdefault(task, []).append(score)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} holds no results: name the glue.json or squad.json of amos glue or squad"
            ) from error
        if not scores:
            raise UserError(f"{path} holds no finished run yet: wait for the first one")
        results.append(Results(path.absolute().parent.name, scores))
    return results


def plot_scores(results: list[Results], directory: str) -> list[str]:
    """Write ``scores.png`` and ``scores.svg`` and return their paths.

    Raises:
        OSError: the directory cannot be written.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(RC_PARAMS):
        return save(scores_figure(results), directory, "scores")


def scores_figure(results: list[Results]) -> Figure:
    """One column per task, with a marker per seed and a bar at their median."""
    tasks = list(dict.fromkeys(task for result in results for task in result.scores))
    figure = Figure(figsize=(1.2 * len(tasks) + 3, 4), layout="constrained")
    ax = figure.subplots()
    width = 0.8 / len(results)
    for index, result in enumerate(results):
        offset = (index - (len(results) - 1) / 2) * width
        columns = [(column + offset, result.scores[task]) for column, task in enumerate(tasks) if task in result.scores]
        _draw_result(ax, index, legend_label(result.name), columns, 0.8 * width)
    ax.set_xticks(range(len(tasks)), map(legend_label, tasks))
    ax.set(title="Scores on the development sets", ylabel="main score of the task (%)")
    ax.grid(axis="y", alpha=0.25, linewidth=0.6)
    figure.legend(
        loc="outside lower center", ncols=3, frameon=False, title="one marker per seed, a bar at their median"
    )
    return figure


def _draw_result(ax: Axes, index: int, label: str, columns: list[tuple[float, list[float]]], bar_width: float) -> None:
    colour, marker = run_colour(index), RUN_MARKERS[index % len(RUN_MARKERS)]
    for number, (x, seeds) in enumerate(columns):
        label_once = None if number else label  # one entry in the legend
        ax.plot([x] * len(seeds), seeds, marker, color=colour, alpha=0.6, markersize=5, label=label_once)
        median = statistics.median(seeds)
        ax.hlines(median, x - bar_width / 2, x + bar_width / 2, color=colour, linewidth=2)
