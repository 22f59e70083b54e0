"""The table of GLUE: a row with the tasks of a checkpoint, their average, and SQuAD."""

import statistics
from collections.abc import Mapping, Sequence

from amos_fairseq.downstream.classification.command import HEADINGS
from amos_fairseq.downstream.classification.glue.tasks import AVERAGED, SCORED
from amos_fairseq.downstream.results import NO_BASELINES, Baselines, Summary, TaskSummary, format_spread
from amos_fairseq.output.tables import MISSING, Table, format_score

CONSTANT = "most frequent class, or mean"


def average(medians: Mapping[str, float]) -> tuple[str, float | None]:
    """Return name and value of the mean of the tasks' medians, with MNLI's matched set as in AMOS Table 1.

    If some of the eight tasks are missing, the name states the number of tasks. WNLI never counts.
    """
    counted = [medians[task] for task in AVERAGED if task in medians]
    if not counted:
        return "AVG", None
    name = "AVG" if len(counted) == len(AVERAGED) else f"AVG of {len(counted)}"
    return name, statistics.fmean(counted)


def glue_table(
    row_name: str,
    summaries: Mapping[str, TaskSummary],
    baselines: Mapping[str, Baselines],
    squad: Summary | None,
    notes: Sequence[str],
    names: Sequence[str] = SCORED,
) -> Table:
    """Build the table with the rows of the checkpoint and of constant predictions; ``squad``: ``squad.json`` for the same
    checkpoint."""
    columns, row, constant_row, constants = [""], [row_name], [CONSTANT], {}
    for task in names:
        if task in summaries:
            score, scores = summaries[task].best.main_score, summaries[task].scores
            columns.append(task_heading(task, score))
            shown = [each for each in (score, f"{score}_mm") if each in scores]
            row.append(" / ".join(format_spread(scores[each]) for each in shown) or MISSING)
            of_constant = next(iter(baselines.get(task, NO_BASELINES).scores.values()), {})
            constant_row.append(" / ".join(format_score(of_constant.get(each)) for each in shown) or MISSING)
            if score in of_constant:
                constants[task] = of_constant[score]
    average_name, value = average({task: summary.main.median for task, summary in summaries.items()})
    columns, row = [*columns, average_name], [*row, format_score(value)]
    constant_row.append(format_score(average(constants)[1]))
    if squad and squad.spreads:
        # Version 2.0 if it was run (AMOS Table 1), otherwise the first version that was.
        task = min(squad.spreads, key=lambda name: "2" not in name)
        columns += [f"{task} {score}" for score in ("EM", "F1")]
        row += [format_spread(squad.spreads[task].get(name)) for name in ("em", "f1")]
        constant_row += [MISSING, MISSING]
    return Table("GLUE dev", columns, [row, constant_row], notes)


def task_heading(task: str, score: str) -> str:
    if task == "MNLI":
        return "MNLI m/mm"
    return task if score == "accuracy" else f"{task} ({HEADINGS[score]})"
