"""Results that the report shows: those of the fine-tuning commands and of ``amos probe``."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from amos_fairseq.downstream.classification.command import RANDOM
from amos_fairseq.downstream.results import Spread, Summary, format_spread, read_summary
from amos_fairseq.downstream.tagging.command import SCORE_NAMES
from amos_fairseq.downstream.tagging.sentences import TASK_PREFIX
from amos_fairseq.errors import UserError
from amos_fairseq.files import distinct_names
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
    contents = []
    for folder in distinct_folders(folders):
        contents.append(read_probe_results(folder))
        if not contents[-1].results:
            raise UserError(f"{folder} holds no scores yet: wait for the first one of amos probe")
    return contents


def main_spreads(summary: Summary) -> dict[str, Spread]:
    """Return the main scores of a summary by column, such as "MNLI m", "CoLA (mcc)" or "chunk (span F1)"; without the random
    weights of ``amos classify --baseline``, because a row of the table is one checkpoint."""
    columns = {}
    for task, spreads in summary.spreads.items():
        if task == RANDOM:
            continue
        score = summary.main_scores[task]
        if task == "MNLI":
            columns |= {"MNLI m": spreads.get(score), "MNLI mm": spreads.get(f"{score}_mm")}
            continue
        name, label = task, score
        if task.startswith(TASK_PREFIX):
            name, label = task.removeprefix(TASK_PREFIX), SCORE_NAMES.get(score, score)
        columns[name if label == "accuracy" else f"{name} ({label})"] = spreads.get(score)
    return {column: spread for column, spread in columns.items() if spread is not None}


def benchmark_table(results: Sequence[Summary]) -> Table:
    """Return a row for each summary, named by its run, and its folder where that is not enough, and a column for each task."""
    spreads = [main_spreads(result) for result in results]
    columns = list(dict.fromkeys(column for scores in spreads for column in scores))
    folders = list(dict.fromkeys(result.checkpoint.parent for result in results))
    names = dict(zip(folders, distinct_names(folders), strict=True))
    labels = [f"{names[result.checkpoint.parent]}, {result.weights}" for result in results]
    rows = []
    for result, label, scores in zip(results, labels, spreads, strict=True):
        if labels.count(label) > 1:
            label = f"{label} ({result.folder_name})"
        rows.append([label, *(format_spread(scores.get(column)) for column in columns)])
    return Table("", ["", *columns], rows, list(dict.fromkeys(note for result in results for note in result.notes)))


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
) -> tuple[dict[str, list[CostSeries]], str]:
    """Return, by task, the scores of each run with results of two or more checkpoints, and the unit of the cost.

    ``over``: a key of :data:`COSTS`; None for FLOPs where several runs are drawn and those of all are known, updates otherwise.
    """
    by_run: dict[Path, dict[int, dict[str, Spread]]] = {}  # folder -> updates -> task
    for result in results:
        if not result.from_scratch:
            of_run = by_run.setdefault(result.checkpoint.parent.resolve(), {})
            of_run.setdefault(result.num_updates, {}).update(main_spreads(result))
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
    for folder, of_run in by_run.items():
        label = known[folder].name if folder in known else folder.name
        for column in dict.fromkeys(column for spreads in of_run.values() for column in spreads):
            known_updates = [(updates, one[column]) for updates, one in sorted(of_run.items()) if column in one]
            cost = costs[unit][folder]
            points = [(updates * cost, spread.median, spread.deviation or 0.0) for updates, spread in known_updates]
            if len(points) > 1:
                panels.setdefault(column, []).append(CostSeries(label, points))
    return panels, COSTS[unit]
