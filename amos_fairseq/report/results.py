"""Results that the report shows: those of the fine-tuning commands and of ``amos probe``."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from amos_fairseq.downstream.texts.command import RANDOM
from amos_fairseq.downstream.words.command import SCORE_NAMES
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.records import NO_BASELINES, Spread, Summary, format_spread, read_summary
from amos_fairseq.files import distinct_names
from amos_fairseq.inputs.sentences import TASK_PREFIX
from amos_fairseq.output.tables import Table
from amos_fairseq.probing.results import ProbeResults, read_probe_results
from amos_fairseq.report.figures import CostSeries
from amos_fairseq.report.runs import PretrainingRun, distinct_folders
from amos_fairseq.strangers import read_json

COSTS = {"updates": "updates", "hours": "hours of pretraining", "flops": "FLOPs of pretraining"}
# The benchmarks that each option accepts, as their summaries name them.
BENCHMARKS = {"--glue": ("glue", "squad", "classification"), "--tag": ("tagging", "parsing")}


def read_benchmarks(folders: Sequence[str], flag: str) -> list[Summary]:
    """Read the summaries in output folders of the benchmarks of ``flag``, each folder once; several can have written to one."""
    results, hint = [], "repeat the command that wrote it"
    for folder in distinct_folders(folders):
        files = [file for file in sorted(folder.glob("*.json")) if not file.name.endswith(".setup.json")]
        contents = {file: read_json(file, hint, kind=object) for file in files}
        of_benchmarks = [file for file, one in contents.items() if isinstance(one, dict) and "benchmark" in one]
        summaries = [read_summary(file, hint) for file in of_benchmarks]
        if not summaries:
            raise UserError(f"{folder} holds no results: give the --out of the command as {flag}")
        shown = [summary for summary in summaries if summary.benchmark in BENCHMARKS[flag]]
        if not shown:
            raise UserError(f"{folder} holds results of {summaries[0].benchmark} only, which {flag} does not show")
        results += shown
    return results


def read_probing(folders: Sequence[str]) -> list[ProbeResults]:
    """Read outputs of ``amos probe``; a folder that is given twice counts once."""
    return [read_probe_results(folder) for folder in distinct_folders(folders)]


def main_columns(summary: Summary) -> dict[str, tuple[str, str]]:
    """Return the main scores of a summary as (task, score) by column, such as "MNLI m", "CoLA (mcc)" or "chunk (span F1)";
    without the random weights of ``amos classify --baseline``, because a row of the table is one checkpoint."""
    columns = {}
    for task, score in summary.main_scores.items():
        if task == RANDOM:
            continue
        if task == "MNLI":
            columns |= {"MNLI m": (task, score), "MNLI mm": (task, f"{score}_mm")}
            continue
        name, label = task, score
        if task.startswith(TASK_PREFIX):
            name, label = task.removeprefix(TASK_PREFIX), SCORE_NAMES.get(score, score)
        columns[name if label == "accuracy" else f"{name} ({label})"] = task, score
    return columns


def main_spreads(summary: Summary) -> dict[str, Spread]:
    """Return the main scores of a summary by column."""
    spreads, columns = summary.spreads, main_columns(summary)
    return {column: spreads[task][score] for column, (task, score) in columns.items() if score in spreads[task]}


def benchmark_table(results: Sequence[Summary]) -> Table:
    """Return a row for each summary, named by its run, and its folder where that is not enough, and a column for each task;
    then the rows of its baselines, such as the most frequent class, each once where all summaries have equal ones."""
    spreads = [main_spreads(result) for result in results]
    columns = list(dict.fromkeys(column for scores in spreads for column in scores))
    folders = list(dict.fromkeys(result.checkpoint.parent for result in results))
    names = dict(zip(folders, distinct_names(folders), strict=True))
    labels = [f"{names[result.checkpoint.parent]}, {result.weights}" for result in results]
    labels = [
        f"{label} ({result.folder_name})" if labels.count(label) > 1 else label
        for label, result in zip(labels, results, strict=True)
    ]
    rows, baselines, notes = [], {}, {}
    for result, label, scores in zip(results, labels, spreads, strict=True):
        rows.append([label, *(format_spread(scores.get(column)) for column in columns)])
        for name, cells in baseline_cells(result, columns).items():
            baselines.setdefault(name, {}).setdefault(tuple(cells), label)
        for note in result.notes:
            notes.setdefault(note, []).append(label)
    for name, by_cells in baselines.items():
        rows += [[name if len(by_cells) == 1 else f"{label}: {name}", *cells] for cells, label in by_cells.items()]
    of_all = [note if len(those) == len(results) else f"{', '.join(those)}: {note}" for note, those in notes.items()]
    return Table("", ["", *columns], rows, of_all)


def baseline_cells(result: Summary, columns: Sequence[str]) -> dict[str, list[str]]:
    """Return the cells of each baseline of a summary, by the name of its row."""
    places = main_columns(result)
    found = {place[0]: result.baselines.get(place[0], NO_BASELINES) for place in places.values()}
    names = dict.fromkeys(name for of_task in found.values() for name in of_task.scores)
    rows = {}
    for name in names:
        spreads = []
        for column in columns:
            task, score = places.get(column, ("", ""))
            value = found[task].scores.get(name, {}).get(score) if task else None
            spreads.append(None if value is None else Spread(value, None, 1))
        rows[name] = list(map(format_spread, spreads))
    return rows


def num_seeds(results: Sequence[Summary]) -> str:
    return seeds_in_words(spread.count for result in results for spread in main_spreads(result).values())


def seeds_in_words(counts: Iterable[int]) -> str:
    """Return "1 seed", "5 seeds" or "3 to 5 seeds"."""
    counts = sorted(set(counts)) or [0]
    numbers = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return f"{numbers} seed" if counts[-1] == 1 else f"{numbers} seeds"


def cost_of_update(run: PretrainingRun | None, unit: str) -> float | None:
    """Return the cost of an update of a run in ``unit``, a key of :data:`COSTS`; None where its files do not contain it."""
    if unit == "updates":
        return 1
    if run is None:
        return None
    if unit == "flops":
        return run.flops_per_update
    return run.seconds / 3600 / run.num_updates if run.seconds and run.num_updates else None


def points_over_cost(
    results: Sequence[Summary], runs: Sequence[PretrainingRun], over: str | None = None
) -> tuple[dict[str, list[CostSeries]], str, list[str]]:
    """Return, by task, the scores of each run with results of two or more checkpoints, the unit of the cost, and notes.

    ``over``: a key of :data:`COSTS`; None for FLOPs where several runs are drawn and those of all are known, updates otherwise.
    """
    by_run: dict[Path, dict[int, dict[str, Spread]]] = {}  # folder -> updates -> task
    twice = set()  # such as two tables of amos classify: which of the two a line would show is not said
    for result in results:
        if not result.from_scratch:
            folder = result.checkpoint.parent.resolve()
            of_checkpoint = by_run.setdefault(folder, {}).setdefault(result.num_updates, {})
            spreads = main_spreads(result)
            twice |= {(folder, column) for column in spreads.keys() & of_checkpoint.keys()}
            of_checkpoint.update(spreads)
    by_run = {folder: of_run for folder, of_run in by_run.items() if len(of_run) > 1}
    known = {run.folder.resolve(): run for run in runs}
    costs = {unit: {folder: cost_of_update(known.get(folder), unit) for folder in by_run} for unit in COSTS}
    unit = over or ("flops" if len(by_run) > 1 and all(costs["flops"].values()) else "updates")
    for folder, cost in costs[unit].items():
        if cost is None:
            raise UserError(
                f"--over {unit}: those of {folder} are unknown; give its SAVE_DIR as RUN, or another --over"
            )
    panels: dict[str, list[CostSeries]] = {}
    left_out: list[str] = []
    for folder, of_run in by_run.items():
        label = known[folder].name if folder in known else folder.name
        for column in dict.fromkeys(column for spreads in of_run.values() for column in spreads):
            known_updates = [(updates, one[column]) for updates, one in sorted(of_run.items()) if column in one]
            cost = costs[unit][folder]
            points = [(updates * cost, spread.median, spread.deviation or 0.0) for updates, spread in known_updates]
            if len(points) > 1 and (folder, column) in twice:
                left_out.append(f"{label}, {column} is left out: a checkpoint has two results; give one table")
            elif len(points) > 1:
                panels.setdefault(column, []).append(CostSeries(label, points))
    return panels, COSTS[unit], left_out
