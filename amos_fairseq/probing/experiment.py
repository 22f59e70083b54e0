"""One call of ``amos probe``: the layers and tasks that it probes, and OUT with the results, their table and their picture."""

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError
from amos_fairseq.files import distinct_names, file_sha256, json_text, whole_folder, write_text
from amos_fairseq.output.pictures import (
    GREY,
    RC_PARAMS,
    depth_colours,
    draw_grid,
    legend_label,
    run_style,
    save,
)
from amos_fairseq.output.tables import Table, format_score
from amos_fairseq.output.terminal import say
from amos_fairseq.probing.features import (
    PIECES,
    RANDOM_SEED,
    EncodedSplit,
    Layer,
    ProbedPart,
    choose_parts,
    encode_split,
    parts_of,
    random_weights,
    stored_features,
)
from amos_fairseq.probing.probe import (
    THRESHOLD,
    ProbeData,
    ProbeSettings,
    SplitTargets,
    majority_score,
    split_targets,
    train_probe,
)
from amos_fairseq.probing.tasks import ProbingTask, sorted_tasks
from amos_fairseq.untrusted import read_json

RESULTS_FILE, FORMAT = "results.json", 2
COLUMNS = 8  # of a table
MAJORITY = "majority"  # the baseline that always answers the most frequent label, which is also its "part" and "layer"
BASELINE_NAMES = {"random": "random weights", "pieces": "pieces alone", MAJORITY: "most frequent label"}

SplitTexts = dict[str, list[tuple[list[str], list[bool] | None]]]


class ProbedLayers(NamedTuple):
    """Layers of one network; ``baseline`` says which baseline they are, None for trained layers."""

    part: ProbedPart
    layers: list[Layer]
    baseline: str | None


class TextGroup(NamedTuple):
    """Tasks with the same texts, these texts as pieces, and the targets by task and split."""

    tasks: list[ProbingTask]
    encoded: dict[str, EncodedSplit]
    targets: dict[str, dict[str, SplitTargets]]


@dataclass(frozen=True)
class ProbeResult:
    """The score of one probe."""

    task: str
    part: str
    layer: int | str  # its number, or "pieces" for token embeddings alone
    baseline: str | None  # one of BASELINE_NAMES
    seed: int  # of the probe; 0 for the most frequent label, which has none
    score: float  # micro-F1, from 0 to 1
    targets: int  # number of targets that the score counts

    @property
    def column(self) -> tuple[str, int | str, str | None]:
        return self.part, self.layer, self.baseline


@dataclass(frozen=True)
class ProbeResults:
    """The content of ``results.json``: what was probed how, and every score."""

    checkpoint: dict[str, Any]  # file, sha256, model, num_updates
    settings: dict[str, Any]  # of the probes; and data_sha256, of the files by task and split
    notes: list[str]  # what a reader of the scores must know besides the settings
    results: list[ProbeResult]
    format: int = FORMAT

    def write(self, folder: Path) -> Table:
        """Write all files of OUT, and return the table."""
        write_text(folder / RESULTS_FILE, json_text(asdict(self)))
        ordered = in_order(self.results)
        notes = [
            "tasks in the order of their semantic depth (AMOS Figure 4); 100 times the mean over the seeds, ± standard "
            "deviation (divided by n - 1)",
            f"{self.settings['classifier']} classifier on the frozen states of one layer, sigmoid for each label, "
            f"threshold {THRESHOLD}; weights chosen on the validation split",
            *self.notes,
        ]
        (run,) = distinct_names([Path(self.checkpoint["file"]).resolve().parent])
        updates = f"{self.checkpoint['num_updates']:,} updates"
        title = f"Edge probing of {run} ({self.checkpoint['model']}) after {updates}"
        table = results_table(ordered, title, notes)
        write_text(folder / "table.md", table.as_markdown())
        plot_probing(ordered, folder)
        return table


def run_probes(
    loaded: LoadedCheckpoint,
    tasks: Sequence[ProbingTask],
    out: Path,
    settings: ProbeSettings,
    *,
    parts: Sequence[str] | None = None,
    layers: str | None = None,
    with_baselines: bool = False,
    num_seeds: int = 1,
    device: str = "cpu",
) -> Table:
    """Train every probe, write all files to the new folder ``out``, and return the table."""
    chosen = choose_layers(loaded, parts, layers, with_baselines, device)
    groups = group_by_texts(loaded, tasks)
    results = [majority_result(task) for task in tasks]
    with whole_folder(out.absolute()) as unfinished:
        for group, probed in itertools.product(groups, chosen):
            results += train_probes(loaded, group, probed, settings, num_seeds, device, unfinished / "features")
        checkpoint = {"file": str(loaded.file), "sha256": file_sha256(loaded.file)}
        checkpoint |= {"model": type(loaded.model).__name__, "num_updates": loaded.num_updates}
        fixed = {"features": "whitened", "threshold": THRESHOLD, "random_weights_seed": RANDOM_SEED}
        fixed["data_sha256"] = {task.name: task.sha256 for task in tasks}
        notes = list(notes_on(groups, results, loaded.model.max_positions()))
        return ProbeResults(checkpoint, asdict(settings) | fixed, notes, results).write(unfinished)


def choose_layers(
    loaded: LoadedCheckpoint, names: Sequence[str] | None, layers: str | None, with_baselines: bool, device: str
) -> list[ProbedLayers]:
    parts = parts_of(loaded.model)
    names = choose_parts(loaded, parts, names)
    layers_of = {name: parse_layers(layers, parts[name]) for name in names}
    probed = [ProbedLayers(parts[name], layers_of[name], None) for name in names]
    if with_baselines:
        # Parts with the same token embeddings share this baseline, which has the name of the first of them.
        tables = {id(parts[name].embed_tokens): parts[name].embed_tokens for name in names}
        owners = [next(part for part in parts.values() if part.embed_tokens is table) for table in tables.values()]
        probed += [ProbedLayers(owner, [PIECES], "pieces") for owner in owners]
        random_parts = parts_of(random_weights(loaded.model, RANDOM_SEED).to(device))
        probed += [ProbedLayers(random_parts[name], layers_of[name], "random") for name in names]
    return probed


def parse_layers(text: str | None, part: ProbedPart) -> list[Layer]:
    """Parse "4,6"; None gives the default layers of the part."""
    if text is None:
        return list(part.default_layers)
    known: dict[str, Layer] = {str(number): number for number in sorted(part.layers)}
    entries = list(dict.fromkeys(entry.strip() for entry in text.split(",")))
    for entry in entries:
        if entry not in known:
            raise UserError(f"{part.name} has no layer {entry}: give --layers some of {', '.join(known)}, or --part")
    return [known[entry] for entry in entries]


def group_by_texts(loaded: LoadedCheckpoint, tasks: Sequence[ProbingTask]) -> list[TextGroup]:
    """Return the tasks that have the same texts together: part-of-speech tags and dependencies of one treebank."""
    by_texts: list[tuple[SplitTexts, list[ProbingTask]]] = []
    for task in tasks:
        texts = {split: [(one.words, one.spaces) for one in examples] for split, examples in task.splits.items()}
        same = next((group for others, group in by_texts if others == texts), None)
        if same is None:
            by_texts.append((texts, [task]))
        else:
            same.append(task)
    groups = []
    for _, group in by_texts:
        encoded = {split: encode_split(loaded, examples) for split, examples in group[0].splits.items()}
        groups.append(TextGroup(group, encoded, {task.name: targets_of(task, encoded) for task in group}))
    return groups


def targets_of(task: ProbingTask, encoded: dict[str, EncodedSplit]) -> dict[str, SplitTargets]:
    targets = {split: split_targets(examples, encoded[split], task.labels) for split, examples in task.splits.items()}
    for split, one in targets.items():
        if not len(one.starts):
            raise UserError(
                f"{task.name}: none of the {one.num_unread} targets in {split} is within the tokens that the model reads: "
                "give shorter texts"
            )
    return targets


def majority_result(task: ProbingTask) -> ProbeResult:
    """Return the score of the most frequent label of training as the answer for every target."""
    gold = task.labels_of(task.scored_split)
    score = majority_score(task.labels_of("train"), gold)
    return ProbeResult(task.name, MAJORITY, MAJORITY, MAJORITY, 0, score, len(gold))


def train_probes(
    loaded: LoadedCheckpoint,
    group: TextGroup,
    probed: ProbedLayers,
    settings: ProbeSettings,
    num_seeds: int,
    device: str,
    folder: Path,
) -> list[ProbeResult]:
    """Train the probes of all layers of one network, whose features are in ``folder`` meanwhile."""
    part, results = probed.part, []
    name = layer_name((part.name, ", ".join(map(str, probed.layers)), probed.baseline))
    pad = loaded.dictionary.pad()
    with stored_features(folder, part, probed.layers, group.encoded, pad, device, name) as stored:
        for task, layer, seed in itertools.product(group.tasks, probed.layers, range(1, num_seeds + 1)):
            began, targets = time.monotonic(), group.targets[task.name]
            features = {split: stored[split][layer] for split in targets}
            column = layer_name((part.name, layer, probed.baseline))
            probe_data = ProbeData(features, targets, task.labels, task.scored_split)
            scored = train_probe(probe_data, settings, seed, device, f"{column}, {task.name}")
            num_targets = targets[task.scored_split].num_targets
            results.append(ProbeResult(task.name, part.name, layer, probed.baseline, seed, scored.score, num_targets))
            shown, seconds = f"{task.name} {100 * scored.score:.1f}", time.monotonic() - began
            say(f"{column}, seed {seed}: {shown} (update {scored.update}, {seconds:.0f} s)", "probe")
    return results


def notes_on(groups: Sequence[TextGroup], results: Sequence[ProbeResult], limit: int) -> Iterable[str]:
    """Yield what a reader of the scores must know besides the settings of the probes."""
    tasks = [(task, group.targets[task.name]) for group in groups for task in group.tasks]
    for task, targets in tasks:
        unread = [
            f"{one.num_unread:,} of {one.num_targets:,} in {split}" for split, one in targets.items() if one.num_unread
        ]
        if unread:
            problem = f"targets beyond the {limit} tokens that the model reads are not trained on and count as wrong"
            yield f"{task.name}: {problem}: {', '.join(unread)}"
    if on_valid := [task.name for task, _ in tasks if task.scored_split == "valid"]:
        yield f"{', '.join(on_valid)}: no test split; scored on the validation split, like the choice of weights"
    baselines = {one.baseline for one in results}
    if "random" in baselines:
        yield f"random weights: the same architecture, newly initialized with seed {RANDOM_SEED}"
    if "pieces" in baselines:
        yield "pieces alone: the trained token embeddings, without positions and layers"
    yield "most frequent label: the one of the training split as the answer for every target"


def read_probe_results(folder: str | Path) -> ProbeResults:
    """Return the content of ``results.json`` in a folder that ``amos probe`` wrote."""
    file = Path(folder) / RESULTS_FILE
    content = read_json(file, "give the directory that amos probe wrote with --out")
    try:
        results = [ProbeResult(**result) for result in content.pop("results")]
        return ProbeResults(**content, results=results)
    except (TypeError, KeyError) as error:
        raise UserError(f"{file} is not readable as results of amos probe: write it again with amos probe") from error


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


def scores_by_cell(results: Sequence[ProbeResult]) -> dict[str, dict[tuple, list[float]]]:
    """Return the scores of all seeds by task, in the order of the results, and by column."""
    cells: dict[str, dict[tuple, list[float]]] = {}
    for result in results:
        cells.setdefault(result.task, {}).setdefault(result.column, []).append(result.score)
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
    rows = [[task, *(_cell(scores.get(column, [])) for column in columns)] for task, scores in cells.items()]
    table = [["task", *map(layer_name, columns)], *rows]
    if len(columns) > COLUMNS:
        table = [list(row) for row in zip(*table, strict=True)]
        table[0][0] = "layer"
    return Table(title, table[0], table[1:], notes)


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
    ax.set_yticks(range(len(cells)), [legend_label(task) for task in cells])
    ax.set_ylim(len(cells) - 0.5, -0.5)  # the first task at the top
    ax.set(title="Edge probing", xlabel="score (%)")
    draw_grid(ax)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def column_styles(columns: Sequence[tuple]) -> list[dict[str, object]]:
    """Return a color for each layer, from dark for the first one to light, and a marker for each part, hollow with random
    weights; pieces alone are grey."""
    numbers = sorted({layer for _, layer, _ in columns if isinstance(layer, int)})
    colours = dict(zip(numbers, depth_colours(len(numbers)), strict=True))
    parts = list(dict.fromkeys(part for part, _, _ in columns))
    styles = []
    for part, layer, baseline in columns:
        colour = GREY if baseline == "pieces" else colours[layer]
        filled = "none" if baseline else "full"
        marker = run_style(parts.index(part))[1]
        styles.append({"color": colour, "marker": marker, "fillstyle": filled, "markersize": 6})
    return styles
