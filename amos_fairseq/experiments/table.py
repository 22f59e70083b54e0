"""From a :class:`~amos_fairseq.experiments.runner.Benchmark` to its table: runs, summaries, notes, and the files in OUT."""

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from amos_fairseq.errors import INTERRUPTED, UserError, explain_os_errors
from amos_fairseq.experiments.benchmark import Benchmark, Session, Stopped, counted
from amos_fairseq.experiments.records import (
    ERROR,
    LINEAR,
    NO_CONSTANTS,
    RESULT_FILE,
    ConstantScores,
    RunResult,
    Summaries,
    Summary,
    write_record,
)
from amos_fairseq.experiments.runner import Failure, Runner
from amos_fairseq.files import take_lock, write_text
from amos_fairseq.output.terminal import Table

MOST_PRINTED = 20  # rows of a table about the best runs; the file has all
CORRELATIONS = ("matthews", "spearman", "pearson")


@dataclass(frozen=True)
class Outcome:
    """What a command has done: the table (None if no run has a result), the runs that failed, the files that were written, and
    messages about them."""

    table: Table | None
    failures: Sequence[Failure]
    details: Sequence[Table] = ()
    files: Sequence[Path] = ()
    notices: Sequence[str] = ()


def run_and_print(benchmark: Benchmark) -> None:
    """Run the benchmark, and print its table, notices and paths. A signal exits with a line that says how to continue;
    a run that failed is a :class:`UserError`."""
    out = benchmark.session.out
    print(settings_in_words(benchmark.session), *schedules_in_words(benchmark), sep="\n", flush=True)
    with explain_os_errors(f"{out} cannot be written", ": give another --out"):
        out.mkdir(parents=True, exist_ok=True)
        advice = "wait for it, stop it, or give another --out"
        lock = take_lock(out / ".lock", f"{out} is in use by another command", advice)
    try:
        outcome = run_benchmark(benchmark)
    except (Stopped, KeyboardInterrupt) as stopped:
        print(f"stopped; finished runs are in {out}, and the same command continues with the others", file=sys.stderr)
        sys.exit(stopped.args[0] if stopped.args else INTERRUPTED)
    finally:
        lock.release()
    if outcome.table is not None:
        outcome.table.print()
    for table in outcome.details:
        if len(table.rows) <= MOST_PRINTED:
            table.print()
    for line in (*outcome.notices, *outcome.files):
        print(line)
    for failure in outcome.failures:
        print(f"{failure.run.label}: {failure.reason} (log: {failure.log})", file=sys.stderr)
    if outcome.failures:
        failed = f"{counted(len(outcome.failures), 'run')} failed (log of the first: {outcome.failures[0].log})"
        raise UserError(f"{failed}; the same command repeats only what failed")


def run_benchmark(benchmark: Benchmark) -> Outcome:
    """Execute the runs that have no result yet, then write the table; raise :class:`Stopped` after a signal."""
    out, runner = benchmark.session.out, Runner(benchmark)
    runner.execute(benchmark.plan())
    whole = runner.results(runner.runs)
    if not whole:
        return Outcome(None, runner.failures)
    constants = benchmark.constants()
    results, summaries = benchmark.summarize(whole)
    notes = [*common_notes(benchmark, results, summaries, constants), *benchmark.notes(results, summaries)]
    if others := len([*out.glob(f"runs/*/*/seed*/{RESULT_FILE}")]) - len(whole):
        notes.append(f"{out} also holds {counted(others, 'result')} of other settings or tasks")
    table = benchmark.table(summaries, constants, notes)
    if any("±" in cell for row in table.rows for cell in row):  # one seed has no deviation
        table = replace(table, title=f"{table.title}: median ± standard deviation over seeds")
    details = benchmark.details(summaries, runner.stop)
    files = save_results(benchmark, table, results, summaries, details)
    more, notices = benchmark.write_more(summaries, runner.stop)
    return Outcome(table, runner.failures, details, [*files, *more], notices)


def save_results(
    benchmark: Benchmark,
    table: Table,
    results: Sequence[RunResult],
    summaries: Summaries,
    details: Sequence[Table] = (),
) -> list[Path]:
    """Write NAME.md and NAME.json into OUT; return their paths."""
    start, out = benchmark.session.checkpoint, benchmark.session.out
    markdown, record = (out / f"{benchmark.name}.{suffix}" for suffix in ("md", "json"))
    checkpoint = {"file": str(start.file), "sha256": start.sha256, "arch": start.arch}
    checkpoint |= {"num_updates": start.num_updates, "from_scratch": start.from_scratch}
    average = benchmark.average(summaries)
    summary = Summary(
        benchmark.name, checkpoint, dict(summaries), list(table.notes), list(results), average, [*map(asdict, details)]
    )
    write_record(record, asdict(summary))
    write_text(markdown, "\n".join([table.as_markdown(), *(each.as_markdown("##") for each in details)]))
    return [markdown, record]


def settings_in_words(session: Session) -> str:
    """Return the recipe, and what flags have changed in it."""
    recipe = session.recipe
    values = [
        f"{name} {str(value).lower() if isinstance(value, bool | str) else f'{value:g}'}"
        for name, value in session.overrides.items()
    ]
    if session.overrides.get("pooling") == (start := session.checkpoint).pooling != "first":
        whose = "folder" if start.num_updates == 0 and start.source else "checkpoint"
        values = [f"{each} (the {whose}'s)" if each.startswith("pooling ") else each for each in values]
    values_of_size = f"; values for {recipe.size} models" if recipe.size else ""
    changed = f"; instead of its own: {', '.join(values)}" if values else ""
    return f"recipe {Path(recipe.name).name} ({recipe.description}{values_of_size}){changed}"


def schedules_in_words(benchmark: Benchmark) -> Iterator[str]:
    """Yield a line for each task of this call: rate and number of updates, and why there are so many."""
    for task in benchmark.tasks.values():
        trials = [trial for trial in task.trials if not trial.linear]
        if len(trials) > 1:
            yield f"{task.name}: {len(trials)} combinations of settings"
            continue
        settings, schedule = trials[0], trials[0].schedule(task.num_examples, task.continues_across_epochs)
        epochs = counted(schedule.num_epochs, "epoch")
        if schedule.repetitions > 1:
            epochs += f" ({settings.epochs}, repeated for {settings.min_updates:,} updates or more)"
        yield (
            f"{task.name}: learning rate {settings.lr:.3g}, {task.num_examples:,} examples in batches of "
            f"{settings.batch_size}, {epochs}, {schedule.total_updates:,} updates"
        )


def common_notes(
    benchmark: Benchmark, results: Sequence[RunResult], summaries: Summaries, constants: Mapping[str, ConstantScores]
) -> Iterator[str]:
    """Yield the footnotes of every table: recipe, seeds, what chance does, selection by dev score, data."""
    session, labels = benchmark.session, {task: benchmark.label(task) for task in summaries}
    yield f"fine-tuning settings: {settings_in_words(session)}"
    counts = [summary.main.count for summary in summaries.values()]
    listed = ", ".join(f"{label} {count}" for label, count in zip(labels.values(), counts, strict=True))
    divisor = "; standard deviations divide by n - 1" if max(counts) > 1 else ""
    alone = "; one seed cannot rank models: --seeds 5 shows how much seeds differ" if min(counts) == 1 else ""
    yield f"seeds: {f'{counts[0]} per task' if len(set(counts)) == 1 else listed}{divisor}{alone}"
    for task, summary in summaries.items():
        if num_scored := constants.get(task, NO_CONSTANTS).num_scored:
            medians = {name: spread.median for name, spread in summary.scores.items()}
            error = error_in_words(summary.main_score, medians, num_scored, benchmark.unit)
            advice = ": a difference of two models below twice that is weak evidence" if error else ""
            yield f"{labels[task]}: dev has {num_scored:,} {benchmark.unit}{error}{advice}"
        for row, scores in constants.get(task, NO_CONSTANTS).scores.items():
            names = [name for name in scores if name in summary.scores and not name.endswith(("mse", ERROR))]
            if scores.get(summary.main_score) != 100 and all(scores[n] >= summary.scores[n].median for n in names):
                yield f'WARNING: {labels[task]}: no score on dev is above that of "{row}"'
    if session.checkpoint.from_scratch:
        yield "random weights: only the architecture of the checkpoint, none of its weights"
    for task, summary in summaries.items():
        if summary.trial == LINEAR:
            yield f"{labels[task]}: the linear model is better by two standard errors: it is kept, predicts and is exported"
        elif LINEAR in summary.beside and summary.beside[LINEAR][summary.main_score].median > summary.main.median:
            yield f"{labels[task]}: the trained model is kept: the linear one is not better by two standard errors"
        elif summary.num_trials > 1:
            yield (
                f"{labels[task]}: {summary.trial}, selected from {summary.num_trials} combinations by the highest median "
                "on the same dev set"
            )
    if any(result.checkpoint == "checkpoint_best.pt" for result in results):
        yield "each run is scored at its best epoch on the same dev set"
    yield from dict.fromkeys(note for result in results for note in result.notes)


def ratio_error(parts: Sequence[float], wholes: Sequence[float]) -> float:
    """Return the standard error in percent of the sum of ``parts`` over that of ``wholes``, each of an example drawn at random,
    such as F1, 2 right / (found + gold): sqrt(n / (n - 1) sum (part - R whole)^2) / sum(whole) for the ratio R of n examples
    (Cochran 1977, section 2.11)."""
    count, whole = len(parts), sum(wholes)
    if count < 2 or not whole:
        return 0.0
    ratio = sum(parts) / whole
    squares = sum((a - ratio * b) ** 2 for a, b in zip(parts, wholes, strict=True))
    return 100 * math.sqrt(count / (count - 1) * float(squares)) / float(whole)


def standard_error(score: str, value: float, num_scored: int) -> float:
    """Return that of a share of right examples, sqrt(p (1 - p) / n) with two right and two wrong ones more, so that it is not 0
    for a perfect one (Agresti and Coull 1998), or of a correlation, (1 - r^2) / sqrt(n), in percent; 0 for other scores."""
    share = min(max(value / 100, -1.0), 1.0)
    if score in CORRELATIONS:
        return 100 * (1 - share**2) / math.sqrt(num_scored)
    share = (share * num_scored + 2) / (num_scored + 4)
    return 100 * math.sqrt(share * (1 - share) / (num_scored + 4)) if score == "accuracy" else 0.0


def error_in_words(score: str, scores: Mapping[str, float], num_scored: int, unit: str) -> str:
    """Return "; standard error of accuracy about 1.3", by how much chance moves a score in percent on ``num_scored`` examples.

    It is among the ``scores`` (:data:`ERROR`), or :func:`standard_error`. The text is empty where there is none.
    """
    error = scores.get(score + ERROR, standard_error(score, scores[score], num_scored))
    if error == 0:
        return ""
    # The words of a sentence are not independent.
    about = "at least" if unit == "words" and score + ERROR not in scores else "about"
    return f"; standard error of {score} {about} {error:.1f}"


def table_of_test(
    label: str,
    columns: Mapping[str, str],
    best: Mapping[str, float],
    constant: ConstantScores,
    note: str,
    name: str = "best run on dev",
) -> Table:
    """Return the table of a test set: the scores of the best run, which is called ``name``, and of a constant. ``note`` follows
    the number of examples."""
    rows = ConstantScores(constant.num_scored, {name: dict(best)} | constant.scores)
    shown = {score: heading for score, heading in columns.items() if score in best}
    cells = [[f"{label}: {row}", *rows.cells(row, list(shown))] for row in rows.scores]
    return Table(f"{label}, test", ["", *shown.values()], cells, [f"test has {constant.num_scored:,} {note}"])


def export_notice(out: Path, best: RunResult, flags: str = "") -> str:
    """Return the line that says how the best run of a table is exported; ``flags`` begin with a space."""
    checkpoint = shlex.quote(str(best.checkpoint_in(out)))
    return f"to export the selected run: amos export {checkpoint} HF_DIR{flags}"
