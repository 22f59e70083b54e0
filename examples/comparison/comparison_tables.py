"""``comparison.md``: the scores at the end of the budget, those on the way, and the papers' findings beside ours."""

from typing import Any

from budgets import share_name
from comparison_results import ordering

from amos_fairseq.finetuning.glue.experiment import column_name
from amos_fairseq.finetuning.report import MISSING, Table, format_score

END = share_name(1.0)


def scientific(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2e}".replace("e+", "e")


def hours(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def all_tables(content: dict[str, Any]) -> list[Table]:
    """The tables of ``comparison.json``; those that would be empty are left out."""
    tables = [scores_table(content)]
    if content["setup"]["fine_tune_at"] != [float(END)]:
        tables.append(curve_table(content))
    return tables + ([findings_table(content)] if content["findings"] else [])


def scores_table(content: dict[str, Any]) -> Table:
    """One row an entry, best first, those without scores last."""
    entries, tasks = content["entries"], content["setup"]["tasks"]
    best_first = ordering(entries)
    rows = [score_row(entries[name], tasks) for name in [*best_first, *(n for n in entries if n not in best_first)]]
    columns = ["", "updates", "tokens", "FLOPs", "matmul FLOPs", "hours", "tokens/s"]
    columns += [column_name(task) for task in tasks] + [f"AVG of {len(tasks)}"]
    return Table(f"Equal budget: {content['setup']['budget']} of pretraining each", columns, rows, content["notes"])


def score_row(entry: dict[str, Any], tasks: list[str]) -> list[str]:
    point = entry["points"].get(END)
    scores = point["scores"] if point else None
    label = entry["label"] if point else f"{entry['label']} ({entry['updates_so_far']:,} updates so far)"
    speed = entry["tokens_per_second"]
    cost = [scientific(entry["max_update"] * entry[f"flops_per_update_{kind}"]) for kind in ("thesis", "matmuls")]
    cells = [label, f"{entry['max_update']:,}", scientific(entry["tokens"]), *cost, hours(point and point["hours"])]
    cells.append(f"{speed:,.0f}" if speed else MISSING)
    return cells + [task_cell(scores, task) for task in tasks] + [average_cell(point)]


def task_cell(scores: dict[str, Any] | None, task: str) -> str:
    found = scores["tasks"].get(task) if scores else None
    return format_score(found["median"], found["deviation"]) if found else MISSING


def average_cell(point: dict[str, Any] | None) -> str:
    """A dash until every task has all its seeds: averages of different tasks do not compare."""
    if not (point and point["complete"]):
        return MISSING
    return format_score(point["scores"]["average"]["value"], point["scores"]["average"]["deviation"])


def curve_table(content: dict[str, Any]) -> Table:
    """The average at every share of the budget."""
    shares = [share_name(share) for share in content["setup"]["fine_tune_at"]]
    rows = [[entry["label"], *(curve_cell(entry, share) for share in shares)] for entry in content["entries"].values()]
    columns = ["", *(f"{float(share):.4g} of the budget" for share in shares)]
    note = "before the end the learning rate is still high, as for the shares of thesis Table 5.3"
    return Table("Average on the way", columns, rows, [note])


def curve_cell(entry: dict[str, Any], share: str) -> str:
    return average_cell(entry["points"].get(share))


def findings_table(content: dict[str, Any]) -> Table:
    labels = {name: entry["label"] for name, entry in content["entries"].items()}
    rows = [
        [
            f"{labels[found['better']]} above {labels[found['worse']]}",
            f"{found['points']:+g} ({found['measure']}; {found['source']})",
            f"{found['our_points']:+.1f}"
            + (f" ± {found['our_spread']:.1f}" if found["our_spread"] is not None else ""),
            found["ours"],
        ]
        for found in content["findings"]
    ]
    notes = [
        "ours: the difference of the averages above; ± the root of the sum of both squared deviations, over seeds of "
        "fine-tuning alone; a difference within it says nothing",
    ]
    return Table(
        "What the papers found, and what is seen here", ["", "paper, points", "ours, points", "ours"], rows, notes
    )
