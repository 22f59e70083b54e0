"""``amos squad`` from the first run to the table."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from amos_fairseq.finetuning.glue_table import paper_results, paper_squad_cells
from amos_fairseq.finetuning.plan import claim_out
from amos_fairseq.finetuning.results import read_results
from amos_fairseq.finetuning.runner import Failure
from amos_fairseq.finetuning.session import Session, session_notes
from amos_fairseq.finetuning.squad_benchmark import OFFICIAL_QUESTIONS, RECIPE_TASK, Squad, SquadSettings
from amos_fairseq.finetuning.statistics import TaskSummary, summarize
from amos_fairseq.finetuning.summary import write_summary
from amos_fairseq.finetuning.tables import MISSING, Table, number

# Scores of prediction_files in the order of the table; those of 2.0 are absent from 1.1's.
COLUMNS = {"em": "EM", "f1": "F1", "has_ans_f1": "HasAns F1", "no_ans_em": "NoAns EM", "best_em": "best EM"}


@dataclasses.dataclass(frozen=True)
class SquadOutcome:
    """Attributes:
    table: None where no run has a result.
    files: what was written.
    """

    table: Table | None
    failures: list[Failure]
    files: list[Path]


def run_squad(session: Session, data: Path, settings: SquadSettings, with_paper: bool) -> SquadOutcome:
    """Make the runs, then the table.

    Raises:
        UserError: a mistake of the user, before anything is started.
        Stopped: SIGINT or SIGTERM came.
    """
    points = session.recipe.of(RECIPE_TASK)
    validates = any(point.checkpoint == "best" for point in points)
    benchmark = Squad(data, session.start, settings, validates)
    recipe = dataclasses.replace(session.recipe, points={benchmark.task: points})
    session = dataclasses.replace(session, recipe=recipe)
    setup = session.setup | settings.as_dict()
    claim_out(session.out, benchmark.name, setup)
    failures = session.runner(benchmark).execute(session.plan(list(benchmark.tasks.values())))
    results = [result for result in read_results(session.out) if result.task in OFFICIAL_QUESTIONS]
    if not results:
        return SquadOutcome(None, failures, [])
    summaries = summarize(results)
    notes = [*session_notes(session, results, summaries), *squad_notes(settings, summaries)]
    table = squad_table(session.row_name, summaries, with_paper, notes)
    checkpoint = {"file": str(session.start.file), "num_updates": session.start.num_updates}
    summary = write_summary(session.out, Squad.name, setup, results, summaries, notes, checkpoint=checkpoint)
    return SquadOutcome(table, failures, [*table.save(session.out / Squad.name), summary])


def squad_table(row_name: str, summaries: Mapping[str, TaskSummary], with_paper: bool, notes: Sequence[str]) -> Table:
    """A row for each version that has results; with ``with_paper`` the paper's rows, which are of 2.0."""
    shown = [name for name in COLUMNS if any(name in summary.scores for summary in summaries.values())]
    rows = []
    for task in sorted(summaries):
        scores = summaries[task].scores
        cells = [number(scores[name].median, scores[name].deviation) if name in scores else MISSING for name in shown]
        rows.append([f"{task}: {row_name}", *cells])
    if with_paper:
        for paper in paper_results():
            rows.append([f"SQuAD2.0: {paper['name']}", *paper_squad_cells(paper, shown)])
    columns = ["", *(COLUMNS[name] for name in shown)]
    return Table("SQuAD dev: median ± standard deviation over seeds", columns, rows, notes)


def squad_notes(settings: SquadSettings, summaries: Mapping[str, TaskSummary]) -> list[str]:
    windows = settings.windows
    notes = [
        f"{settings.span_head} head; windows of {windows.tokens} tokens, stride {windows.doc_stride}, questions of up to "
        f"{windows.question}; answers of up to {settings.decoding.max_answer_length} tokens"
    ]
    if "SQuAD2.0" in summaries:
        notes.append(
            "SQuAD2.0: the threshold for no answer is the one with the best F1 on the same dev set; best EM has its own"
        )
    return notes
