"""The page of the report: what each section shows, on which text, with how many samples, and where it is in the paper."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from amos_fairseq.errors import UserError, printable
from amos_fairseq.experiments.records import LINEAR, Spread, Summary, format_spread, read_summary
from amos_fairseq.files import distinct_names, write_text
from amos_fairseq.output.terminal import MISSING, Table
from amos_fairseq.probing.probe import ProbeResults, read_probe_results
from amos_fairseq.report.curves import (
    RC_PARAMS,
    as_svg,
    depth_colours,
    logged_panels,
    loss_distributions,
    panels_figure,
    save,
)
from amos_fairseq.report.inspection import Inspection
from amos_fairseq.report.runs import LAST_CHECKPOINT, SEED, Run, is_run
from amos_fairseq.run.metrics_file import FILE_NAME
from amos_fairseq.run.precision import precision_of

UNKNOWN = "not in the run's files"
BENCHMARKS = ("glue", "squad", "classification", "tagging", "parsing")  # names of the results of fine-tuning commands


@dataclass
class Section:
    anchor: str  # target of links, also the name of the figure's files
    title: str
    source: str = ""  # what it corresponds to in a paper
    caption: str = ""
    figure: Figure | None = None
    tables: list[Table] = field(default_factory=list)
    texts: dict[str, list[Inspection]] = field(default_factory=dict)  # by run
    notes: list[str] = field(default_factory=list)  # one paragraph each, after the tables


@dataclass
class Folders:
    """The folders that a report was asked for, by what they hold."""

    runs: list[Path] = field(default_factory=list)
    results: list[tuple[Path, Summary]] = field(default_factory=list)
    probing: list[tuple[Path, ProbeResults]] = field(default_factory=list)


def sort_folders(paths: Iterable[str]) -> Folders:
    """Read the results of fine-tuning and probing in these folders, and find those of runs; one given twice counts once."""
    folders = Folders()
    for path in dict.fromkeys(map(Path, paths)):
        summaries = [read_summary(path, name, "the command of fine-tuning") for name in BENCHMARKS]
        if is_run(path):
            folders.runs.append(path)
        elif any(summaries):
            folders.results += [(path, summary) for summary in summaries if summary is not None]
        elif (probed := read_probe_results(path)) is not None:
            folders.probing.append((path, probed))
        else:
            raise UserError(
                f"{path} is no SAVE_DIR with {FILE_NAME} or {LAST_CHECKPOINT}, and no OUT of fine-tuning or amos probe with "
                "results"
            )
    return folders


@matplotlib.rc_context(RC_PARAMS)
def write_report(out: Path, figures: Path | None, runs: Sequence[Run], folders: Folders, text_name: str) -> None:
    """Write the page, and its figures and each panel of the curves as PNG and SVG to the folder ``figures``.

    ``text_name``: what the held-out text is called in captions.
    """
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
    candidates = [
        cost_section(runs),
        results_section(folders.results),
        curves_section(runs),
        losses_section(runs, text_name),
        tokens_section(runs),
        probing_section(folders.probing),
    ]
    sections = [section for section in candidates if section is not None]
    images = {}
    for section in sections:
        if (figure := section.figure) is not None:
            svg = as_svg(figure) if figures is None else save(figure, figures, section.anchor)
            images[section.anchor] = base64.b64encode(svg).decode("ascii")
    names = [run.name for run in runs] or [path.name for path, _ in [*folders.results, *folders.probing]]
    write_text(out, render(names=dict.fromkeys(names), runs=runs, sections=sections, images=images))
    print(f"page: {out}")
    if figures is not None:
        curves = [run.curves for run in runs]
        panels = logged_panels(curves)
        for panel in panels:
            save(panels_figure([panel], curves), figures, panel.file_name)
        print(f"figures: {figures}/NAME.png and .svg: {', '.join([*images, *(panel.file_name for panel in panels)])}")


def render(**values: object) -> str:
    """Fill the template. What comes from runs, texts, vocabularies and result files is escaped there."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["probability_colour"] = probability_colour
    return environment.get_template("page.html").render(depth_colours=depth_colours, seed=SEED, **values)


def probability_colour(probability: float) -> str:
    """Return a color "#rrggbb" from white at 0 to orange at 1: the background of a token by its probability of the positive
    class. Black text is readable on all of them."""
    white, orange = (255, 255, 255), (230, 159, 0)
    mixed = (round(w + (o - w) * probability) for w, o in zip(white, orange, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def cost_section(runs: Sequence[Run]) -> Section | None:
    if not runs:
        return None
    columns = [cost_column(run) for run in runs]
    names = [name for name in columns[0] if {column[name] for column in columns} != {"none"}]
    rows = [[name, *(column[name] for column in columns)] for name in names]
    caption = (
        "Until the last logged update. Tokens: of full blocks, special tokens included. FLOPs: counted by amos flops, without "
        "the optimizer's step. Hours: running time until the last checkpoint, validation and checkpoints included."
    )
    table, notes = Table("", ["", *(run.name for run in runs)], rows), [note for run in runs for note in run.notes]
    return Section("cost", "Runs and their cost", "AMOS Appendix C", caption, tables=[table], notes=notes)


def cost_column(run: Run) -> dict[str, str]:
    """Return what the table of costs says about a run, by row."""
    size = precision = tokens = processes = flops = UNKNOWN
    if run.cfg is not None:
        model, length = run.cfg.model, run.cfg.task.tokens_per_sample
        size = f"{model.encoder_layers} layers of width {model.encoder_embed_dim}, {length} tokens"
        precision = precision_of(run.cfg.get("common", {}))
        processes = str(run.cfg.distributed_training.distributed_world_size)
    if run.tokens_per_update:
        tokens = f"{run.num_updates * run.tokens_per_update:,} ({run.tokens_per_update:,} an update)"
        flops = f"{run.num_updates * run.flops_per_update:.2e}"
    return {
        "objective": run.objective or UNKNOWN,
        "replaced tokens from": "none" if run.objective == "mlm" else run.setup or UNKNOWN,
        "encoder": size,
        "precision": precision,
        "updates": f"{run.num_updates:,}",
        "tokens": tokens,
        "FLOPs": flops,
        "hours": UNKNOWN if run.seconds is None else f"{run.seconds / 3600:,.2f}",
        "tokens per second, median": f"{run.tokens_per_second:,.0f}" if run.tokens_per_second else UNKNOWN,
        "training processes": processes,
    }


def results_section(results: Sequence[tuple[Path, Summary]]) -> Section | None:
    """A table for each benchmark: a row for each OUT, a column for the main score of each task."""
    if not results:
        return None
    names = distinct_names([path for path, _ in results])
    by_benchmark: dict[str, dict[str, Summary]] = {}
    for name, (_, summary) in zip(names, results, strict=True):
        linear = ", linear model" if any(task.trial == LINEAR for task in summary.tasks.values()) else ""
        row = f"{name} ({summary.save_dir.name}, {summary.weights}{linear})"
        by_benchmark.setdefault(summary.benchmark, {})[row] = summary
    section = Section("results", "Fine-tuning results", "AMOS Table 1" if "glue" in by_benchmark else "")
    for benchmark, summaries in by_benchmark.items():
        section.tables.append(scores_table(benchmark, summaries))
        section.notes += [f"{row}: {note}" for row, summary in summaries.items() for note in summary.notes]
    section.caption = (
        "Medians over the seeds of fine-tuning, ± standard deviations where there are several, in percent, on the development "
        "sets. Random weights: the same model without pretraining."
    )
    return section


def scores_table(title: str, summaries: dict[str, Summary]) -> Table:
    rows = {row: main_scores(summary) for row, summary in summaries.items()}
    columns = list(dict.fromkeys(column for scores in rows.values() for column in scores))
    cells = [[row, *(format_spread(scores.get(column)) for column in columns)] for row, scores in rows.items()]
    return Table(title, ["", *columns], cells)


def main_scores(summary: Summary) -> dict[str, Spread]:
    """Return the main score of each task by column, such as "RTE" or "CoLA (matthews)"."""
    return {
        name if task.main_score == "accuracy" else f"{name} ({task.main_score})": task.main
        for name, task in summary.tasks.items()
    }


def curves_section(runs: Sequence[Run]) -> Section | None:
    """Every logged value that has a panel."""
    curves = [run.curves for run in runs]
    if not (panels := logged_panels(curves)):
        return None
    section = Section("overview", "Training curves", "MLM loss, mixture and recall: AMOS Figures 1b, 5a, 5b")
    section.caption = (
        "Lines: training text, means between two records. Markers: the validation split. Losses are in nats. No model without "
        "context has a lower MLM loss than the entropy of the token frequencies in the validation text, and on a small text "
        "none comes close to it. docs/logging.md says what each value means and what to expect."
    )
    section.figure = panels_figure(panels, curves)
    return section


def losses_section(runs: Sequence[Run], text_name: str) -> Section | None:
    shown = [run for run in runs if run.losses]
    if not shown:
        return None
    section = Section("loss_by_depth", "Loss on replaced tokens by depth", "AMOS Figure 1a")
    rows = []
    for run in shown:
        for depth in run.losses:
            count, losses, statistics = len(depth.losses), depth.losses, [MISSING] * 3
            if count:
                statistics = [f"{losses.mean():.3f}", f"{np.median(losses):.3f}", f"{100 * depth.recall:.1f}"]
            share = f"{100 * count / depth.num_masked:.1f}"
            rows.append([f"{run.name}, depth {depth.depth}", f"{count:,}", share, *statistics])
    columns = ["", "replaced tokens", "of masked (%)", "mean loss", "median loss", "P > 1/2 (%)"]
    section.tables = [Table("", columns, rows)]
    masked = sorted({depth.num_masked for run in shown for depth in run.losses})
    section.caption = (
        "Loss of the discriminator on replaced tokens, -log P(replaced), by the depth of the generator that made them: "
        "histogram and mean (vertical line). "
        f"After {', '.join(f'{run.checkpoint_updates:,}' for run in shown)} updates, on {text_name}; "
        f"{' to '.join(f'{n:,}' for n in dict.fromkeys([masked[0], masked[-1]]))} masked tokens for each depth; samples that "
        "equal the original are not replaced. The paper trains one discriminator with each generator: runs with one depth "
        "each, given together. The one discriminator of a run with several depths, which was trained on their mixture, reads "
        "the samples of each depth alone."
    )
    section.figure = loss_distributions(loss_panels(shown))
    return section


def loss_panels(runs: Sequence[Run]) -> dict[str, dict[str, np.ndarray]]:
    """Return one panel for each run with several depths, and one for all runs with a single depth together."""
    panels, single = {}, [run for run in runs if len(run.losses) == 1]
    if single:
        title = single[0].name if len(single) == 1 else "one discriminator for each generator"
        panels[title] = {f"{run.name}, depth {run.losses[0].depth}": run.losses[0].losses for run in single}
    for run in runs:
        if len(run.losses) > 1:
            panels[run.name] = {f"depth {depth.depth}": depth.losses for depth in run.losses}
    return panels


def tokens_section(runs: Sequence[Run]) -> Section | None:
    shown = {run.name: run.inspections for run in runs if run.inspections}
    if not shown:
        return None
    section = Section("tokens", "Tokens of a text", "AMOS Table 9", texts=shown)
    section.caption = (
        "Underlined words are masked out. In brackets, in the order and color of the depths: the most probable token"
    )
    if any(run.setup for run in runs if run.inspections):  # not of MLM alone
        section.caption += (
            " or, of a run that replaces tokens, the one sampled from each depth of the generator. A check mark follows a "
            "replaced token that the discriminator finds, P(replaced) > 1/2, when all masked tokens of the text are replaced "
            "by that depth"
        )
    section.caption += ". A hyphen marks a piece that continues a word."
    return section


def probing_section(probing: Sequence[tuple[Path, ProbeResults]]) -> Section | None:
    """The table of each output of ``amos probe``."""
    if not probing:
        return None
    tables = [content.table() for _, content in probing]
    section = Section("probing", "Edge probing by layer", 'AMOS "Figure 4", Table 8', tables=tables)
    section.caption = "micro-F1 of classifiers on the frozen states of one layer."
    section.notes = list(dict.fromkeys(note for table in tables for note in table.notes))
    return section
