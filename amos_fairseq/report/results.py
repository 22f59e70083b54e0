"""Results that the report shows: those of the fine-tuning commands and of ``amos probe``."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.downstream.classification.command import RANDOM
from amos_fairseq.downstream.results import Spread, Summary, format_spread, parse_summary
from amos_fairseq.downstream.tagging.command import SCORE_NAMES
from amos_fairseq.downstream.tagging.dataset import TASK_PREFIX
from amos_fairseq.errors import UserError
from amos_fairseq.output.tables import Table
from amos_fairseq.probing.results import read_probe_results
from amos_fairseq.report.curves import distinct_names
from amos_fairseq.report.figures import CostSeries
from amos_fairseq.report.runs import PretrainingRun, distinct_folders
from amos_fairseq.strangers import read_json

# The benchmarks that each option accepts, as their summaries name them.
BENCHMARKS = {"--glue": ("glue", "squad", "classification"), "--tag": ("tagging", "parsing")}


def read_benchmarks(folders: Sequence[str], flag: str) -> list[Summary]:
    """Read the summaries in output folders of benchmarks; several benchmarks can have written to one folder.

    A folder that is given twice counts once.

    Args:
        flag: the option that names the folders, a key of :data:`BENCHMARKS`. Summaries of others are left out.

    Raises:
        UserError: a folder holds no summary for this option, or a damaged one.
    """
    found, hint = [], "repeat the command that wrote it"
    for folder in distinct_folders(folders):
        files = [file for file in sorted(folder.glob("*.json")) if not file.name.endswith(".setup.json")]
        contents = {file: read_json(file, hint, kind=object) for file in files}
        contents = {file: one for file, one in contents.items() if isinstance(one, dict) and "benchmark" in one}
        summaries = [
            parse_summary(file, content, f"is not a summary of results: {hint}") for file, content in contents.items()
        ]
        if not summaries:
            raise UserError(f"{folder} holds no results: give the --out of the command as {flag}")
        own = [summary for summary in summaries if summary.benchmark in BENCHMARKS[flag]]
        if not own:
            raise UserError(f"{folder} holds results of {summaries[0].benchmark} only, which {flag} does not show")
        found += own
    return found


def read_probing(folders: Sequence[str]) -> list[dict[str, Any]]:
    """Return the contents of ``results.json`` in outputs of ``amos probe``; a folder that is given twice counts once.

    Raises:
        UserError: a folder has no results, or damaged ones.
    """
    found = {folder: read_probe_results(folder) for folder in distinct_folders(folders)}
    for folder, own in found.items():
        if not own["results"]:
            raise UserError(f"{folder} holds no scores yet: wait for the first one of amos probe")
    return list(found.values())


def score_heading(task: str, score: str) -> str:
    """Return "MNLI m", "CoLA (mcc)" or "chunk (span F1)": the task, with the score if it is not accuracy."""
    if task == "MNLI":
        return "MNLI mm" if score.endswith("_mm") else "MNLI m"
    if task.startswith(TASK_PREFIX):
        task, score = task.removeprefix(TASK_PREFIX), SCORE_NAMES.get(score, score)
    return task if score == "accuracy" else f"{task} ({score})"


def main_spreads(summary: Summary) -> dict[str, Spread]:
    """Return the main scores of a summary by column: of MNLI for both sets. Random weights that ``amos classify --baseline``
    has trained beside the checkpoint are left out: a row of the table is one checkpoint."""
    return {
        score_heading(task, name): spreads[name]
        for task, spreads in summary.spreads.items()
        if task != RANDOM
        for name in (summary.main_scores[task], f"{summary.main_scores[task]}_mm")
        if name in spreads
    }


def benchmark_table(results: Sequence[Summary]) -> Table:
    """Return one row for each summary, and a column for each task of any of them.

    A row has the name of the run, with as many folders as distinguish it, and that of the results where labels are equal.
    """
    spreads = [main_spreads(result) for result in results]
    columns = list(dict.fromkeys(name for own in spreads for name in own))
    folders = list(dict.fromkeys(result.checkpoint.parent for result in results))
    names = dict(zip(folders, distinct_names(folders), strict=True))
    weights = ["random weights" if one.from_scratch else f"{one.num_updates:,} updates" for one in results]
    labels = [f"{names[result.checkpoint.parent]}, {own}" for result, own in zip(results, weights, strict=True)]
    rows = []
    for result, label, own in zip(results, labels, spreads, strict=True):
        if labels.count(label) > 1:
            label = f"{label} ({result.folder_name})"
        rows.append([label, *(format_spread(own.get(name)) for name in columns)])
    return Table("", ["", *columns], rows, list(dict.fromkeys(note for result in results for note in result.notes)))


def num_seeds(results: Sequence[Summary]) -> str:
    """Return the number of seeds behind each cell, in words."""
    return seeds_in_words(spread.count for result in results for spread in main_spreads(result).values())


def seeds_in_words(counts: Iterable[int]) -> str:
    """Return "1 seed", "5 seeds" or "3 to 5 seeds"."""
    counts = sorted(set(counts)) or [0]
    return f"{' to '.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} seed{'s' * (counts[-1] != 1)}"


def points_over_cost(
    results: Sequence[Summary], runs: Sequence[PretrainingRun]
) -> tuple[dict[str, list[CostSeries]], str]:
    """Return, by task, the scores of each run with results of two or more checkpoints, and the unit of the cost.

    The cost is in FLOPs where several runs are drawn and those of all are known, in updates otherwise.
    """
    by_run: dict[Path, dict[int, dict[str, Spread]]] = {}  # folder -> updates -> task
    for result in results:
        if not result.from_scratch:
            of_run = by_run.setdefault(result.checkpoint.parent.resolve(), {})
            of_run.setdefault(result.num_updates, {}).update(main_spreads(result))
    by_run = {folder: own for folder, own in by_run.items() if len(own) > 1}
    known = {run.folder.resolve(): run for run in runs}
    flops = {folder: known[folder].cost.flops_per_update for folder in by_run if folder in known}
    in_flops = len(by_run) > 1 and all(flops.get(folder) for folder in by_run)
    panels: dict[str, list[CostSeries]] = {}
    for folder, own in by_run.items():
        label = known[folder].name if folder in known else folder.name
        for name in dict.fromkeys(name for spreads in own.values() for name in spreads):
            points = [
                (updates * (flops[folder] if in_flops else 1), spreads[name].median, spreads[name].deviation or 0.0)
                for updates, spreads in sorted(own.items())
                if name in spreads
            ]
            if len(points) > 1:
                panels.setdefault(name, []).append(CostSeries(label, points))
    return panels, "FLOPs of pretraining" if in_flops else "updates"
