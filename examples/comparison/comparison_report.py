"""``comparison.json``, ``comparison.md`` and two figures, made from the finished runs."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # servers have no display
import matplotlib.pyplot as plt
from budgets import share_name
from comparison import NAME, Comparison
from comparison_results import compare_findings, entry_results, ordering
from runs import num_threads

from amos_fairseq.downstream.texts.glue.command import task_heading
from amos_fairseq.downstream.texts.glue.tasks import TASKS
from amos_fairseq.experiments.recipes import load_recipe
from amos_fairseq.experiments.records import write_record
from amos_fairseq.files import whole_file
from amos_fairseq.output.terminal import MISSING, Table, format_score
from amos_fairseq.report.curves import RC_PARAMS, RUN_COLOURS, RUN_MARKERS, save

END = share_name(1.0)


def write_report(comparison: Comparison) -> list[Path]:
    """Write all files, print the tables, and return the paths."""
    content = content_of(comparison)
    summary = comparison.out / f"{NAME}.json"
    write_record(summary, content)
    tables = all_tables(content)
    page = comparison.out / f"{NAME}.md"
    with whole_file(str(page)) as unfinished:
        Path(unfinished).write_text("\n".join(table.as_markdown() for table in tables), encoding="utf-8")
    for table in tables:
        table.print()
    return [summary, page, *draw_all(content, comparison.paper, comparison.out)]


def content_of(comparison: Comparison) -> dict[str, Any]:
    """Return the content of ``comparison.json``: setup, entries with their points, ordering, the papers' findings."""
    options = comparison.options
    entries = {}
    for pretraining in comparison.pretrainings:
        fine_tunings = {share: comparison.fine_tuning(pretraining, share) for share in options.fine_tune_at}
        name = pretraining.entry.name
        entries[name] = entry_results(pretraining, comparison.costs[name], fine_tunings)
    device = device_name(comparison.device)
    return {
        "setup": {
            "size": options.size,
            "budget": str(comparison.budget),
            "tasks": list(options.tasks),
            "seeds": options.seeds,
            "fine_tune_at": options.fine_tune_at,
            "fine_tuning": comparison.fine_tuning_settings,
            "device": device,
            "shared": comparison.shared,
        },
        "entries": entries,
        "ordering": ordering(entries),
        "findings": compare_findings(comparison.paper["findings"], entries),
        "notes": [*setting_notes(comparison, device), *dict.fromkeys(data_notes(comparison))],
    }


def device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU, number of threads: {num_threads()}"
    import torch

    return torch.cuda.get_device_name(0)


def setting_notes(comparison: Comparison, device: str) -> Iterator[str]:
    """Yield notes about the settings behind the numbers."""
    shared, options = comparison.shared, comparison.options
    width = shared["model.embedding_dim"] or shared["model.encoder_embed_dim"]
    yield (
        f"all entries: the same text, vocabulary, order of blocks and optimizer; blocks of {shared['task.tokens_per_sample']} "
        f"tokens, {shared['dataset.batch_size']} a batch; encoder {shared['model.encoder']} of "
        f"{shared['model.encoder_layers']} layers and width "
        f"{shared['model.encoder_embed_dim']}, token embeddings of width {width}; relative positions: "
        f"{shared['model.relative_position_scheme']}; seed {shared['common.seed']}"
    )
    yield "FLOPs: matrix products of forward and backward pass (amos flops --reference)"
    yield f"hours: on {device}, validation and saving included; tokens/s: median over the logged intervals"
    flags = ", ".join(f"{name} {value}" for name, value in comparison.fine_tuning_settings.items())
    heads = {p.entry.label: str(p.cfg.model.pooler_activation_fn) for p in comparison.pretrainings}
    yield (
        f"fine-tuning: amos glue with {flags}; medians ± standard deviation, number of seeds: {options.seeds}; AVG: the mean "
        "of the medians ± the deviation of the seeds' own averages"
    )
    recipe = load_recipe(str(comparison.fine_tuning_settings.get("recipe", "amos")), "small")
    is_dense = any(trial.head == "dense" for trials in recipe.trials.values() for trial in trials)
    if is_dense and len(set(heads.values())) > 1:
        listed = ", ".join(f"{label} {activation}" for label, activation in heads.items())
        yield f"the classification head's activation is that of each paper: {listed}"
    yield (
        "one pretraining run per entry: another seed of pretraining alone can change a small task by 2 to 5 points "
        "(AMOS Appendix E)"
    )


def data_notes(comparison: Comparison) -> Iterator[str]:
    """Yield the notes of ``amos glue`` about training sets that are not the official ones."""
    for pretraining in comparison.pretrainings:
        for share in comparison.options.fine_tune_at:
            for result in comparison.fine_tuning(pretraining, share).results:
                yield from result.notes


def scientific(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2e}".replace("e+", "e")


def hours(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def all_tables(content: dict[str, Any]) -> list[Table]:
    """Return the tables of ``comparison.md`` that are not empty."""
    tables = [scores_table(content)]
    if content["setup"]["fine_tune_at"] != [float(END)]:
        tables.append(curve_table(content))
    return tables + ([findings_table(content)] if content["findings"] else [])


def scores_table(content: dict[str, Any]) -> Table:
    """Return one row for each entry, best first, those without scores last."""
    entries, tasks = content["entries"], content["setup"]["tasks"]
    best_first = ordering(entries)
    rows = [score_row(entries[name], tasks) for name in [*best_first, *(n for n in entries if n not in best_first)]]
    columns = ["", "updates", "tokens", "FLOPs", "hours", "tokens/s"]
    columns += [task_heading(task, TASKS[task].main_score) for task in tasks] + [f"AVG of {len(tasks)}"]
    return Table(f"Equal budget: {content['setup']['budget']} of pretraining each", columns, rows, content["notes"])


def score_row(entry: dict[str, Any], tasks: list[str]) -> list[str]:
    point = entry["points"].get(END)
    scores = point["scores"] if point else None
    label = entry["label"] if point else f"{entry['label']} ({entry['updates_so_far']:,} updates so far)"
    speed = entry["tokens_per_second"]
    cost = scientific(entry["max_update"] * entry["flops_per_update"])
    cells = [label, f"{entry['max_update']:,}", scientific(entry["tokens"]), cost, hours(point and point["hours"])]
    cells.append(f"{speed:,.0f}" if speed else MISSING)
    return cells + [task_cell(scores, task) for task in tasks] + [average_cell(point)]


def task_cell(scores: dict[str, Any] | None, task: str) -> str:
    found = scores["tasks"].get(task) if scores else None
    return format_score(found["median"], found["deviation"]) if found else MISSING


def average_cell(point: dict[str, Any] | None) -> str:
    """Return a dash until every task has all its seeds: averages of different tasks cannot be compared."""
    if not (point and point["complete"]):
        return MISSING
    return format_score(point["scores"]["average"]["value"], point["scores"]["average"]["deviation"])


def curve_table(content: dict[str, Any]) -> Table:
    """Return the average at every share of the budget."""
    shares = [share_name(share) for share in content["setup"]["fine_tune_at"]]
    entries = content["entries"].values()
    rows = [[entry["label"], *(average_cell(entry["points"].get(share)) for share in shares)] for entry in entries]
    columns = ["", *(f"{float(share):.4g} of the budget" for share in shares)]
    note = "before the end the learning rate is still high, as for the shares of thesis Table 5.3"
    return Table("Average during pretraining", columns, rows, [note])


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
    note = (
        "ours: the difference of the averages above; ± the root of the sum of both squared deviations, over seeds of "
        "fine-tuning only; a difference within it is not evidence"
    )
    return Table("The papers' findings and ours", ["", "paper, points", "ours, points", "ours"], rows, [note])


def draw_all(content: dict[str, Any], paper: dict[str, Any], directory: Path) -> list[Path]:
    """Write ``score_by_flops`` (thesis Figure 5.1) and ``score_by_hours`` (AMOS Figure 6) as PNG and SVG."""
    curves = {
        name: {key: curve(entry, key) for key in ("flops", "hours")} for name, entry in content["entries"].items()
    }
    if not any(of_entry["flops"] for of_entry in curves.values()):
        return []
    written = []
    with plt.rc_context(RC_PARAMS):
        for name, figure in (
            ("score_by_flops", flops_figure(content, curves, paper["flops_curve"])),
            ("score_by_hours", hours_figure(content, curves, paper["hours_statement"])),
        ):
            written += map(Path, save(figure, directory, name))
            plt.close(figure)
    return written


def curve(entry: dict[str, Any], key: str) -> list[tuple[float, float, float]]:
    """Return (cost, average, deviation) of the shares with complete scores, in order; the deviation of one seed is 0."""
    points = [point for point in entry["points"].values() if point["complete"] and point[key] is not None]
    averages = [point["scores"]["average"] for point in points]
    return [
        (point[key], average["value"], average["deviation"] or 0.0)
        for point, average in zip(points, averages, strict=True)
    ]


def draw_curves(ax: Any, content: dict[str, Any], curves: dict[str, dict[str, list]], key: str) -> None:
    """Draw one line for each entry; the bars are one standard deviation over the seeds of fine-tuning."""
    for index, (name, of_entry) in enumerate(curves.items()):
        if of_entry[key]:
            costs, scores, deviations = zip(*of_entry[key], strict=True)
            ax.errorbar(
                costs,
                scores,
                yerr=deviations,
                label=content["entries"][name]["label"],
                capsize=2,
                linewidth=1.2,
                color=RUN_COLOURS[index % len(RUN_COLOURS)],
                marker=RUN_MARKERS[index % len(RUN_MARKERS)],
                markersize=5,
            )
    ax.grid(alpha=0.25, linewidth=0.6)
    tasks = content["setup"]["tasks"]
    ax.set_ylabel(f"{'average of ' if len(tasks) > 1 else ''}{', '.join(tasks)} (%)")


def flops_figure(content: dict[str, Any], curves: dict[str, dict[str, list]], paper: dict[str, Any]) -> Any:
    figure, (ours, theirs) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    draw_curves(ours, content, curves, "flops")
    ours.set(title=f"Here: {content['setup']['size']} models, {content['setup']['budget']} each", xscale="log")
    for index, (name, points) in enumerate(paper["series"].items()):
        costs, scores = zip(*points, strict=True)
        theirs.plot(
            costs,
            scores,
            label=name,
            color=RUN_COLOURS[index % len(RUN_COLOURS)],
            marker=RUN_MARKERS[index % len(RUN_MARKERS)],
            markersize=5,
            linewidth=1.2,
        )
    theirs.set(title=f"The paper: {paper['source']}, as in Figure 5.1", xscale="log", ylabel="GLUE score, dev (%)")
    theirs.grid(alpha=0.25, linewidth=0.6)
    ours.set_xlabel("pretraining FLOPs (matrix products)")
    theirs.set_xlabel("pretraining FLOPs (thesis 5.2.2, which counts other operations too)")
    for ax in (ours, theirs):
        ax.legend(frameon=False, fontsize=8)
    return figure


def hours_figure(content: dict[str, Any], curves: dict[str, dict[str, list]], statement: str) -> Any:
    figure, ax = plt.subplots(figsize=(7, 5), layout="constrained")
    draw_curves(ax, content, curves, "hours")
    ax.set(xlabel=f"hours of pretraining ({content['setup']['device']})", xlim=(0, None))
    ax.set_title(f"Here: {content['setup']['size']} models, {content['setup']['budget']} each")
    ax.legend(frameon=False, fontsize=8)
    figure.supxlabel("\n".join(textwrap.wrap(f"The paper: {statement}", 100)), fontsize=8)
    return figure
