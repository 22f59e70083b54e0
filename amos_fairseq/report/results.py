"""The results of ``amos glue``, ``amos squad`` and ``amos tag``: one table for all, and scores over the cost of pretraining."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.report import Spread
from amos_fairseq.finetuning.tagging import PREFIX, SCORE_NAMES
from amos_fairseq.metrics_file import FILE_NAME
from amos_fairseq.plotting.curves import run_names
from amos_fairseq.plotting.report_figures import Series
from amos_fairseq.plotting.scores import SCORE_RANGE
from amos_fairseq.report.runs import ReportRun, distinct_folders
from amos_fairseq.strangers import finite_number, plain_name, read_json, whole_number
from amos_fairseq.tables import Table, format_score

# The benchmarks that each option accepts, as their summaries name them.
BENCHMARKS = {"--glue": ("glue", "squad"), "--tag": ("tagging",)}


@dataclass(frozen=True)
class BenchmarkResults:
    """One summary that a benchmark has written.

    Attributes:
        benchmark: glue, squad or tagging.
        scores: by column of the table: the task, and the score's name where it is not accuracy.
        checkpoint: the fine-tuned checkpoint, as its path was when the benchmark ran.
        from_scratch: whether its weights were replaced by random ones.
    """

    file: Path
    benchmark: str
    scores: dict[str, Spread]
    checkpoint: Path
    num_updates: int
    from_scratch: bool
    notes: list[str]

    @property
    def weights(self) -> str:
        """The updates of the checkpoint, or random weights."""
        return "random weights" if self.from_scratch else f"{self.num_updates:,} updates"


def read_benchmarks(folders: Sequence[str], flag: str) -> list[BenchmarkResults]:
    """Read the summaries in output folders of benchmarks; several benchmarks can have written to one folder.

    A folder that is given twice counts once.

    Args:
        flag: the option that names the folders, a key of :data:`BENCHMARKS`. Summaries of others are left out.

    Raises:
        UserError: a folder holds no summary for this option, or a damaged one.
    """
    found = []
    for folder in distinct_folders(folders):
        files = [file for file in sorted(folder.glob("*.json")) if not file.name.endswith(".setup.json")]
        summaries = [summary for file in files if (summary := _read_summary(file)) is not None]
        if not summaries:
            raise UserError(f"{folder} holds no results: give the --out of the command as {flag}")
        own = [summary for summary in summaries if summary.benchmark in BENCHMARKS[flag]]
        if not own:
            raise UserError(f"{folder} holds results of {summaries[0].benchmark} only, which {flag} does not show")
        found += own
    return found


def _read_summary(file: Path) -> BenchmarkResults | None:
    """Return the content of a summary; None for another kind of JSON file."""
    content = read_json(file, "repeat the command that wrote it", kind=object)
    if not (isinstance(content, dict) and "benchmark" in content):
        return None
    try:
        checkpoint = content["checkpoint"]
        return BenchmarkResults(
            file, plain_name(content["benchmark"]), _scores(content["tasks"]),
            Path(plain_name(checkpoint["file"], longest=4096)), whole_number(checkpoint["num_updates"]),
            bool(content["setup"]["from_scratch"]), [plain_name(note, longest=10_000) for note in content["notes"]],
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not a summary of results: repeat the command that wrote it") from error


def _scores(tasks: dict[str, Any]) -> dict[str, Spread]:
    scores = {}
    for task, summary in tasks.items():
        main = plain_name(summary["main_score"])
        for name in (main, f"{main}_mm"):
            if name in summary["scores"]:
                spread = summary["scores"][name]
                deviation = None if spread["deviation"] is None else finite_number(spread["deviation"], 0, 200)
                median = finite_number(spread["median"], *SCORE_RANGE)
                scores[column_name(plain_name(task), name)] = Spread(median, deviation, whole_number(spread["count"]))
    return scores


def column_name(task: str, score: str) -> str:
    """Return "MNLI m", "CoLA (mcc)" or "chunk (span F1)": the task, with the score if it is not accuracy."""
    if task == "MNLI":
        return "MNLI mm" if score.endswith("_mm") else "MNLI m"
    if task.startswith(PREFIX):
        task, score = task.removeprefix(PREFIX), SCORE_NAMES.get(score, score)
    return task if score == "accuracy" else f"{task} ({score})"


def benchmark_table(title: str, results: Sequence[BenchmarkResults]) -> Table:
    """Return one row for each summary, and a column for each task of any of them.

    A row has the name of the run, with as many folders as distinguish it, and that of the results where labels are equal.
    """
    columns = list(dict.fromkeys(name for result in results for name in result.scores))
    folders = list(dict.fromkeys(result.checkpoint.parent for result in results))
    names = dict(zip(folders, run_names([str(folder / FILE_NAME) for folder in folders]), strict=True))
    labels = [f"{names[result.checkpoint.parent]}, {result.weights}" for result in results]
    rows = []
    for result, label in zip(results, labels, strict=True):
        cells = [result.scores.get(name) for name in columns]
        if labels.count(label) > 1:
            label = f"{label} ({result.file.parent.name})"
        rows.append([label, *("-" if cell is None else format_score(cell.median, cell.deviation) for cell in cells)])
    return Table(title, ["", *columns], rows, list(dict.fromkeys(note for result in results for note in result.notes)))


def num_seeds(results: Sequence[BenchmarkResults]) -> str:
    """Return the number of seeds behind each cell, in words."""
    return seeds_in_words(score.count for result in results for score in result.scores.values())


def seeds_in_words(counts: Iterable[int]) -> str:
    """Return "1 seed", "5 seeds" or "3 to 5 seeds"."""
    counts = sorted(set(counts)) or [0]
    return f"{' to '.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} seed{'s' * (counts[-1] != 1)}"


def points_over_cost(results: Sequence[BenchmarkResults], runs: Sequence[ReportRun]) -> tuple[dict, str]:
    """Return, by task, the scores of each run with results of two or more checkpoints, and the unit of the cost.

    The cost is in FLOPs where several runs are drawn and those of all are known, in updates otherwise.
    """
    by_run: dict[Path, list[BenchmarkResults]] = {}
    for result in results:
        if not result.from_scratch:
            by_run.setdefault(result.checkpoint.parent.resolve(), []).append(result)
    by_run = {folder: own for folder, own in by_run.items() if len({result.num_updates for result in own}) > 1}
    known = {run.folder.resolve(): run for run in runs}
    flops = {folder: known[folder].cost.flops_per_update for folder in by_run if folder in known}
    in_flops = len(by_run) > 1 and all(flops.get(folder) for folder in by_run)
    panels: dict[str, list[Series]] = {}
    for folder, own in by_run.items():
        per_update = flops[folder] if in_flops else 1
        for name in dict.fromkeys(name for result in own for name in result.scores):
            scored = {result.num_updates: result.scores[name] for result in own if name in result.scores}
            points = [
                (updates * per_update, score.median, score.deviation or 0.0)
                for updates, score in sorted(scored.items(), key=lambda item: item[0])
            ]
            if len(points) > 1:
                label = known[folder].name if folder in known else folder.name
                panels.setdefault(name, []).append(Series(label, points))
    return panels, "FLOPs of pretraining" if in_flops else "updates"
