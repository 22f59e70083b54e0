"""Fine-tuning on a benchmark, from the first run to the table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amos_fairseq.downstream.benchmark import Benchmark
from amos_fairseq.downstream.runner import Runner
from amos_fairseq.downstream.runs import Failure, RunResult, claim_output_directory, read_results, write_json
from amos_fairseq.downstream.summary import TaskSummary
from amos_fairseq.output.tables import Table


@dataclass(frozen=True)
class Outcome:
    """The outcome of the command.

    Attributes:
        table: None if no run has a result.
        failures: the runs that failed in this call.
        files: what was written, for the user.
        notices: messages for the user about ``files``.
    """

    table: Table | None
    failures: list[Failure]
    files: Sequence[Path] = ()
    notices: Sequence[str] = ()


def run_benchmark(benchmark: Benchmark) -> Outcome:
    """Execute the runs that have no result yet, then write the table of all results in OUT.

    Raises:
        UserError: OUT holds other results; raised before anything is started.
        Stopped: SIGINT or SIGTERM arrived.
    """
    out, setup = benchmark.session.out, benchmark.setup()
    claim_output_directory(out, benchmark.name, setup)
    runner = Runner(benchmark)
    failures = benchmark.execute(runner.execute)
    results = [result for result in read_results(out) if benchmark.owns(result.task)]
    if not results:
        return Outcome(None, failures)
    results, summaries = benchmark.summarize(results)
    table = benchmark.table(summaries, [*notes(benchmark, results, summaries), *benchmark.notes(results, summaries)])
    if any("±" in cell for row in table.rows for cell in row):  # one seed has no deviation
        table = replace(table, title=f"{table.title}: median ± standard deviation over seeds")
    files = save_results(benchmark, setup, table, results, summaries)
    more, notices = benchmark.write_more(summaries, runner.stop)
    return Outcome(table, failures, [*files, *more], notices)


def notes(benchmark: Benchmark, results: Sequence[RunResult], summaries: Mapping[str, TaskSummary]) -> Iterator[str]:
    """Yield the footnotes of every table: recipe, seeds, selection by dev score, data."""
    session = benchmark.session
    recipe, labels = session.recipe, {task: benchmark.label(task) for task in summaries}
    given = {
        name: str(value).lower() if isinstance(value, bool | str) else f"{value:g}"
        for name, value in session.overrides.items()
    }
    changed = f"; instead of its own: {', '.join(f'{name} {value}' for name, value in given.items())}" if given else ""
    name = Path(recipe.name).name
    yield f"fine-tuning settings: recipe {name} ({recipe.description}; values for {recipe.size} models){changed}"
    counts = [summary.main.count for summary in summaries.values()]
    listed = ", ".join(f"{label} {count}" for label, count in zip(labels.values(), counts, strict=True))
    divisor = "; standard deviations divide by n - 1" if max(counts) > 1 else ""
    yield f"seeds: {f'{counts[0]} per task' if len(set(counts)) == 1 else listed}{divisor}"
    if session.checkpoint.from_scratch:
        yield "random weights: only the architecture of the checkpoint, none of its weights"
    for task, summary in summaries.items():
        if summary.num_trials > 1:
            yield (
                f"{labels[task]}: {summary.trial}, selected from {summary.num_trials} combinations by the highest median "
                "on the same dev set"
            )
    if any(result.checkpoint == "checkpoint_best.pt" for result in results):
        yield "each run is scored at its best epoch on the same dev set"
    yield from dict.fromkeys(note for result in results for note in result.notes)


def save_results(
    benchmark: Benchmark,
    setup: dict[str, Any],
    table: Table,
    results: Sequence[RunResult],
    summaries: Mapping[str, TaskSummary],
) -> list[Path]:
    """Write ``NAME.md``, ``NAME.csv`` and the summary ``NAME.json`` for other programs into OUT; return their paths."""
    checkpoint, stem = benchmark.session.checkpoint, benchmark.session.out / benchmark.name
    summary = {
        "benchmark": benchmark.name,
        "setup": setup,
        "tasks": {task: summary.as_dict() for task, summary in summaries.items()},
        "checkpoint": {"file": str(checkpoint.file), "num_updates": checkpoint.num_updates},
        **benchmark.summary_parts(summaries),
        "notes": list(table.notes),
        "runs": [result.as_dict() for result in results],
    }
    write_json(stem.with_suffix(".json"), summary)
    return [*table.save(stem), stem.with_suffix(".json")]
