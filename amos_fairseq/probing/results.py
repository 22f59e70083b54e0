"""Results of ``amos probe``: ``OUT/results.json``, and the table and the picture made of it."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from amos_fairseq import strangers
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import read_record, write_record
from amos_fairseq.output.pictures import (
    GREY,
    RC_PARAMS,
    depth_colours,
    draw_grid,
    legend_label,
    run_colour,
    run_style,
    save,
)
from amos_fairseq.output.tables import Table, format_score
from amos_fairseq.probing.probe import MICRO_F1, SEMEVAL_MACRO_F1
from amos_fairseq.probing.tasks import sorted_tasks
from amos_fairseq.strangers import finite_number, plain_name

RESULTS_FILE = "results.json"
METRIC_NAMES = {MICRO_F1: "micro-F1", SEMEVAL_MACRO_F1: "macro-F1 of SemEval"}
COLUMNS = 8  # of a table
MAJORITY = "majority"  # the baseline that always answers the most frequent label, which is also its "part" and "layer"
BASELINE_NAMES = {"random": "random weights", "pieces": "pieces alone", MAJORITY: "most frequent label"}


@dataclass(frozen=True)
class ProbeResult:
    """One score of one probe."""

    task: str
    part: str
    layer: int | str  # its number, "mix" for a mixture of all, "pieces" for token embeddings alone
    baseline: str | None  # one of BASELINE_NAMES
    seed: int  # of the probe; 0 for the most frequent label, which has none
    metric: str
    score: int | float  # from 0 to 1
    targets: int  # number of targets that the score counts

    def __post_init__(self) -> None:
        for each in fields(self):
            if not isinstance(value := getattr(self, each.name), each.type):
                raise TypeError(f"{each.name} {value!r:.60}")
        if self.metric not in METRIC_NAMES or self.baseline not in (None, *BASELINE_NAMES):
            raise ValueError(f"metric {self.metric!r:.60}, baseline {self.baseline!r:.60}")
        finite_number(self.score, 0, 1)
        for name in (self.task, self.part, str(self.layer)):
            plain_name(name, 200)

    @property
    def column(self) -> tuple[str, int | str, str | None]:
        return self.part, self.layer, self.baseline


@dataclass
class ProbeResults:
    """The content of ``results.json``: what was probed how, and every score."""

    checkpoint: dict[str, Any]  # file, sha256, model, num_updates
    # Of the probes; and by task data_sha256 of its files, scored_on, and not_read, a note on targets beyond the model's length.
    settings: dict[str, Any]
    results: list[ProbeResult] = field(default_factory=list)

    def write(self, out: Path) -> None:
        write_record(out / RESULTS_FILE, asdict(self))


def read_probe_results(folder: str | Path) -> ProbeResults:
    """Return the content of ``results.json`` in a folder that ``amos probe`` wrote."""
    file, advice = Path(folder) / RESULTS_FILE, "repeat amos probe with another --out"
    content = read_record(file, advice, optional=True)
    if content is None:
        raise UserError(f"{file} is missing: give the directory that amos probe wrote with --out")
    try:
        content["results"] = [ProbeResult(**result) for result in strangers.field(content, "results", list)]
        strangers.field(content["checkpoint"], "num_updates", int)
        for name in ("data_sha256", "scored_on", "not_read"):
            content["settings"].setdefault(name, {})
            strangers.field(content["settings"], name, dict)
        return ProbeResults(**content)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{file} is damaged ({error}): {advice}") from error


def in_order(results: Sequence[ProbeResult]) -> list[ProbeResult]:
    """Return the results in the order of :data:`amos_fairseq.probing.tasks.ORDER`; those of a task stay together."""
    rank = {name: number for number, name in enumerate(sorted_tasks({one.task for one in results}))}
    return sorted(results, key=lambda one: rank[one.task])


def layer_name(column: tuple[str, int | str, str | None]) -> str:
    """Return the name of what was probed, such as "generator 4" or "discriminator 12, random weights"."""
    part, layer, baseline = column
    if baseline == MAJORITY:
        return BASELINE_NAMES[baseline]
    if baseline == "pieces":
        name = BASELINE_NAMES[baseline]
        return name if part in ("generator", "encoder", "discriminator") else f"{name} ({part})"
    return f"{part} {layer}" + (f", {BASELINE_NAMES[baseline]}" if baseline else "")


def row_name(task: str, metric: str) -> str:
    return task if metric == MICRO_F1 else f"{task} ({METRIC_NAMES[metric]})"


def scores_by_cell(results: Sequence[ProbeResult]) -> dict[tuple[str, str], dict[tuple, list[float]]]:
    """Return the scores of all seeds by (task, metric), in the order of the results, and by column."""
    cells: dict[tuple[str, str], dict[tuple, list[float]]] = {}
    for result in results:
        cells.setdefault((result.task, result.metric), {}).setdefault(result.column, []).append(result.score)
    return cells


def columns_of(results: Sequence[ProbeResult]) -> list[tuple]:
    """Return what was probed: pretrained layers, pieces alone, random weights; each in the order of parts and layers.

    The most frequent label comes last.
    """
    order = {None: 0, "pieces": 1, "random": 2, MAJORITY: 3}
    columns = dict.fromkeys(result.column for result in results)
    parts = list(dict.fromkeys(part for part, _, _ in columns))

    def key(column: tuple[str, int | str, str | None]) -> tuple[int, int, float]:
        part, layer, baseline = column
        return order[baseline], parts.index(part), layer if isinstance(layer, int) else float("inf")

    return sorted(columns, key=key)


def results_table(results: Sequence[ProbeResult], title: str, notes: list[str]) -> Table:
    """Return 100 times the mean scores, ± the standard deviation over the seeds: tasks by layers as in AMOS "Figure 4".

    More than :data:`COLUMNS` layers are rows, so that the table fits on a page.
    """
    columns, cells = columns_of(results), scores_by_cell(results)
    rows = [[row_name(*task), *(_cell(scores.get(column, [])) for column in columns)] for task, scores in cells.items()]
    table = [["task", *map(layer_name, columns)], *rows]
    if len(columns) > COLUMNS:
        table = [list(row) for row in zip(*table, strict=True)]
        table[0][0] = "layer"
    return Table(title, table[0], table[1:], notes)


def table_notes(content: ProbeResults) -> list[str]:
    """Return what a reader of the scores must know besides the settings of the probes."""
    results, settings = content.results, content.settings
    notes = [str(note) for note in settings["not_read"].values()]
    if on_valid := [task for task, split in settings["scored_on"].items() if split == "valid"]:
        notes.append(
            f"{', '.join(on_valid)}: no test split; scored on the validation split, like the choice of weights"
        )
    if any(one.baseline == "random" for one in results):
        notes.append(
            f"random weights: the same architecture, newly initialized with seed {settings.get('random_weights_seed')}"
        )
    if any(one.baseline == "pieces" for one in results):
        notes.append("pieces alone: the trained token embeddings, without positions and layers")
    if any(one.baseline == MAJORITY for one in results):
        notes.append("most frequent label: the one of the training split as the answer for every target")
    return notes


def _cell(scores: list[float]) -> str:
    mean = 100 * statistics.mean(scores) if scores else None
    return format_score(mean, 100 * statistics.stdev(scores) if len(scores) > 1 else None)


@matplotlib.rc_context(RC_PARAMS)
def plot_probing(results: Sequence[ProbeResult], directory: Path) -> None:
    save(probing_figure(results), directory, "probing")


def probing_figure(results: Sequence[ProbeResult]) -> Figure:
    """Draw the mean score of each column as a marker, and the range over the seeds as a line behind it.

    Each column has a height of its own within the rows, so that no marker hides another one. The most frequent label is a bar
    over the whole row: a score left of it can be had without the text.
    """
    cells = scores_by_cell(results)
    columns = [column for column in columns_of(results) if column[2] != MAJORITY]
    row_inches = max(0.45, 0.15 + 0.09 * len(columns))
    figure = Figure(figsize=(8, 1.6 + row_inches * len(cells) + 0.12 * len(columns)), layout="constrained")
    ax = figure.subplots()
    for index, (column, style) in enumerate(zip(columns, column_styles(columns), strict=True)):
        height = (index - (len(columns) - 1) / 2) * 0.09 / row_inches
        rows = [(row + height, cell[column]) for row, cell in enumerate(cells.values()) if column in cell]
        means = [100 * statistics.mean(scores) for _, scores in rows]
        label = legend_label(layer_name(column))
        ax.plot(means, [row for row, _ in rows], linestyle="none", label=label, zorder=3, **style)
        for row, scores in rows:  # of all seeds
            ax.hlines(row, 100 * min(scores), 100 * max(scores), color=style["color"], linewidth=1, zorder=2)
    label = legend_label(BASELINE_NAMES[MAJORITY])
    for row, cell in enumerate(cells.values()):
        for scores in [cell[column] for column in cell if column[2] == MAJORITY]:
            ax.vlines(100 * scores[0], row - 0.45, row + 0.45, color=GREY, linewidth=1.5, linestyle=":", label=label)
            label = None  # one entry in the legend
    ax.set_yticks(range(len(cells)), [legend_label(row_name(*cell)) for cell in cells])
    ax.set_ylim(len(cells) - 0.5, -0.5)  # the first task at the top
    ax.set(title="Edge probing", xlabel="score (%)")
    draw_grid(ax)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def column_styles(columns: Sequence[tuple]) -> list[dict[str, object]]:
    """Return a color for each layer, from dark for the first one to light, and a marker for each part, hollow with random
    weights; the mixture of layers is pink, pieces alone are grey."""
    numbers = sorted({layer for _, layer, _ in columns if isinstance(layer, int)})
    colours = dict(zip(numbers, depth_colours(len(numbers)), strict=True))
    parts = list(dict.fromkeys(part for part, _, _ in columns))
    styles = []
    for part, layer, baseline in columns:
        colour = GREY if baseline == "pieces" else colours.get(layer, run_colour(3))
        filled = "none" if baseline else "full"
        marker = run_style(parts.index(part))[1]
        styles.append({"color": colour, "marker": marker, "fillstyle": filled, "markersize": 6})
    return styles
