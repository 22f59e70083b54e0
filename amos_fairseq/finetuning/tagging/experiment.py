"""``amos tag`` from the first run to the table."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.report import TaskSummary, summarize
from amos_fairseq.finetuning.runs import claim_output_directory, read_results
from amos_fairseq.finetuning.session import Outcome, Session, save_results, session_notes
from amos_fairseq.finetuning.tagging.benchmark import PREFIX, RECIPE_TASK, Tagging
from amos_fairseq.tables import MISSING, Table, format_score

# Scores in the order of the table; labels that do not mark spans have only accuracy.
SCORE_NAMES = {"f1": "span F1", "precision": "precision", "recall": "recall", "accuracy": "accuracy"}


def run_tagging(session: Session, data: Path) -> Outcome:
    """Execute the runs, then write the table.

    Raises:
        UserError: an argument cannot be used; raised before anything is started.
        Stopped: SIGINT or SIGTERM arrived.
    """
    if session.out == data.resolve():
        raise UserError(f"--out {data} is the directory of the data, which has a tagging.json too: give another --out")
    # There is no pair of texts to separate.
    trials = [dataclasses.replace(trial, num_separators=1) for trial in session.recipe.trials_of(RECIPE_TASK)]
    benchmark = Tagging(data, session.checkpoint, validates=any(trial.checkpoint == "best" for trial in trials))
    recipe = dataclasses.replace(session.recipe, trials={benchmark.task: tuple(dict.fromkeys(trials))})
    # OUT may hold the results of several columns: the setup has the recipe's section under one name.
    named = dataclasses.replace(recipe, trials={RECIPE_TASK: recipe.trials[benchmark.task]})
    setup = dataclasses.replace(session, recipe=named).setup
    session = dataclasses.replace(session, recipe=recipe)
    claim_output_directory(session.out, Tagging.name, setup)

    failures = session.runner(benchmark).execute(session.plan(list(benchmark.tasks.values())))
    results = [result for result in read_results(session.out) if result.task.startswith(PREFIX)]
    if not results:
        return Outcome(None, failures, [])

    summaries = summarize(results)
    by_column = {task.removeprefix(PREFIX): summary for task, summary in summaries.items()}
    notes = [*session_notes(session, results, by_column), *tagging_notes(summaries)]
    table = tagging_table(session.row_name, summaries, notes)
    return Outcome(table, failures, save_results(session, Tagging.name, setup, table, results, summaries))


def tagging_table(row_name: str, summaries: Mapping[str, TaskSummary], notes: Sequence[str]) -> Table:
    """Build the table with a row for each column of labels that has results."""
    shown = [name for name in SCORE_NAMES if any(name in summary.scores for summary in summaries.values())]
    rows = []
    for task in sorted(summaries):
        found = summaries[task].scores
        cells = [
            format_score(found[name].median, found[name].deviation) if name in found else MISSING for name in shown
        ]
        rows.append([f"{task.removeprefix(PREFIX)}: {row_name}", *cells])
    columns = ["", *(SCORE_NAMES[name] for name in shown)]
    return Table("Sequence tagging, dev: median ± standard deviation over seeds", columns, rows, notes)


def tagging_notes(summaries: Mapping[str, TaskSummary]) -> list[str]:
    has_spans = any("f1" in summary.scores for summary in summaries.values())
    return (
        ["a span is right if its type and both ends are (conlleval's rules, computed by seqeval)"] if has_spans else []
    )
