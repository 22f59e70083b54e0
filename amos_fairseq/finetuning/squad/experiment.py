"""``amos squad`` from the first run to the table."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.finetuning.report import TaskSummary, paper_results, paper_squad_cells, summarize
from amos_fairseq.finetuning.runs import claim_output_directory, read_results
from amos_fairseq.finetuning.session import Outcome, Session, save_results, session_notes
from amos_fairseq.finetuning.squad.benchmark import OFFICIAL_QUESTIONS, RECIPE_TASK, Squad, SquadSettings
from amos_fairseq.tables import MISSING, Table, format_score

# Scores of write_predictions in the order of the table; version 1.1 has only the first two.
COLUMNS = {"em": "EM", "f1": "F1", "has_ans_f1": "HasAns F1", "no_ans_em": "NoAns EM", "best_em": "best EM"}


def run_squad(session: Session, data: Path, settings: SquadSettings, with_paper: bool) -> Outcome:
    """Execute the runs, then write the table.

    Raises:
        UserError: an argument cannot be used; raised before anything is started.
        Stopped: SIGINT or SIGTERM arrived.
    """
    trials = session.recipe.trials_of(RECIPE_TASK)
    num_separators = {trial.num_separators for trial in trials}
    if len(num_separators) > 1:
        raise UserError(f"the recipe {session.recipe.name} has several num_separators for SQuAD: run them one by one")
    windows = settings.windows._replace(num_separators=num_separators.pop())
    settings = dataclasses.replace(settings, windows=windows)
    validates = any(trial.checkpoint == "best" for trial in trials)
    benchmark = Squad(data, session.checkpoint, settings, validates)
    recipe = dataclasses.replace(session.recipe, trials={benchmark.task: trials})
    session = dataclasses.replace(session, recipe=recipe)
    setup = session.setup | settings.as_dict()
    claim_output_directory(session.out, Squad.name, setup)

    failures = session.runner(benchmark).execute(session.plan(list(benchmark.tasks.values())))
    results = [result for result in read_results(session.out) if result.task in OFFICIAL_QUESTIONS]
    if not results:
        return Outcome(None, failures, [])

    summaries = summarize(results)
    notes = [*session_notes(session, results, summaries), *squad_notes(settings, summaries)]
    table = squad_table(session.row_name, summaries, with_paper, notes)
    return Outcome(table, failures, save_results(session, Squad.name, setup, table, results, summaries))


def squad_table(row_name: str, summaries: Mapping[str, TaskSummary], with_paper: bool, notes: Sequence[str]) -> Table:
    """Build the table with a row for each version that has results; the papers' rows (``with_paper``) are of 2.0."""
    shown = [name for name in COLUMNS if any(name in summary.scores for summary in summaries.values())]
    rows = []
    for task in sorted(summaries):
        scores = summaries[task].scores
        cells = [
            format_score(scores[name].median, scores[name].deviation) if name in scores else MISSING for name in shown
        ]
        rows.append([f"{task}: {row_name}", *cells])
    if with_paper:
        rows += [[f"SQuAD2.0: {paper['name']}", *paper_squad_cells(paper, shown)] for paper in paper_results()]
    columns = ["", *(COLUMNS[name] for name in shown)]
    return Table("SQuAD dev: median ± standard deviation over seeds", columns, rows, notes)


def squad_notes(settings: SquadSettings, summaries: Mapping[str, TaskSummary]) -> list[str]:
    windows = settings.windows
    notes = [
        f"{settings.span_head} head; windows of {windows.tokens} tokens, stride {windows.doc_stride}, questions of up to "
        f"{windows.question} tokens, {windows.num_separators} </s> after them; answers of up to "
        f"{settings.decoding.max_answer_length} tokens"
    ]
    if "SQuAD2.0" in summaries:
        notes.append(
            "SQuAD2.0: the threshold for no answer is the one with the best F1 on the same dev set; best EM has its own"
        )
    return notes
