"""The sections of the report: what each shows, on which text, with how many samples, and where it is in the paper."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from amos_fairseq.experiments.records import Summary
from amos_fairseq.files import distinct_names, write_text
from amos_fairseq.functional.replaced_token_detection import EQUAL_LOGITS
from amos_fairseq.output.pictures import RC_PARAMS, save
from amos_fairseq.output.tables import MISSING, Table
from amos_fairseq.probing.results import (
    MAJORITY,
    ProbeResults,
    in_order,
    probing_figure,
    results_table,
    row_name,
    scores_by_cell,
)
from amos_fairseq.report.curves import DETECTOR_PANELS, PANELS, RunCurves, depth_names, panels_figure, reference_levels
from amos_fairseq.report.figures import loss_distributions, scores_over_cost
from amos_fairseq.report.inspection import Inspection
from amos_fairseq.report.pages import render
from amos_fairseq.report.results import benchmark_table, num_seeds, points_over_cost, seeds_in_words
from amos_fairseq.report.runs import PretrainingRun
from amos_fairseq.run.metrics_file import FILE_NAME
from amos_fairseq.run.precision import precision_of

UNKNOWN = "not in the run's files"
TRAINING_AND_VALIDATION = " Lines: training text, means between two records. Markers: the validation split."
# Of the curves of `amos plot` that the paper has: anchor, key of the log, title, figure of the paper, caption.
CURVES = (
    (
        "generator_loss",
        "mlm_loss_",
        "Generator loss by depth",
        "AMOS Figure 1b",
        "MLM loss of each depth of the generator on masked tokens (Eq. 2), in nats.",
    ),
    (
        "mixture",
        "mixture_",
        "Mixture weights",
        "AMOS Figure 5a",
        "Weight of each generator depth in the mixture (Eq. 3), mean over all masked tokens.",
    ),
    (
        "recall",
        "rtd_recall",
        "Discriminator accuracy on replaced tokens",
        "AMOS Figure 5b",
        "Fraction of the replaced tokens to which the discriminator gives P(replaced) > 1/2.",
    ),
)
FIGURE_NAMES = re.compile(r"(score_by_cost|loss_by_depth|generator_loss|mixture|recall|discriminator|probing(_\d+)?)")


@dataclass
class Section:
    """One section of the page, or, with ``missing``, the line that says why it is left out."""

    anchor: str  # target of links, also the name of the figure's files
    title: str
    source: str  # what it corresponds to in a paper
    caption: str = ""
    figure: Figure | None = None
    tables: list[Table] = field(default_factory=list)
    texts: dict[str, list[Inspection]] = field(default_factory=dict)  # by run
    notes: list[str] = field(default_factory=list)  # one paragraph each, after the tables
    missing: str = ""


@matplotlib.rc_context(RC_PARAMS)
def write_report(
    out: Path,
    runs: Sequence[PretrainingRun],
    text_name: str,
    glue: Sequence[Summary],
    tag: Sequence[Summary],
    probing: Sequence[ProbeResults],
    over: str | None,
) -> None:
    """Write the page, and its figures as PNG and SVG to a folder beside it, ``report_figures`` for ``report.html``.

    Figures of an older page are removed. ``text_name``: what the held-out text is called in captions. ``over``: see
    :func:`points_over_cost`.
    """
    glue_missing = "--glue DIR adds them, the output of amos glue, amos squad or amos classify"
    are_mlm = all(run.objective == "mlm" for run in runs)
    sections = [
        cost_section(runs),
        benchmark_section("results", "Fine-tuning results", "AMOS Table 1", glue, glue_missing),
        over_cost_section([*glue, *tag], runs, over),
        benchmark_section(
            "tagging", "Tagging results", "", tag, "--tag DIR adds them, the output of amos tag or amos parse"
        ),
        *(mlm_sections(runs) if are_mlm else sections_of_replacement(runs, text_name)),
        *probing_sections(probing),
    ]
    folder = out.with_name(f"{out.stem}_figures")
    for file in folder.iterdir() if folder.is_dir() else ():
        if FIGURE_NAMES.fullmatch(file.stem) and file.suffix in (".png", ".svg"):
            file.unlink()
    images = {}
    for section in sections:
        if section.figure is not None:
            folder.mkdir(parents=True, exist_ok=True)
            _, svg = save(section.figure, folder, section.anchor)
            images[section.anchor] = base64.b64encode(Path(svg).read_bytes()).decode("ascii")
    missing = []
    for section in (section for section in sections if section.missing):
        title = f"{section.title} ({section.source})" if section.source else section.title
        missing.append(f"{title}: {section.missing}")
    shown = [section for section in sections if not section.missing]
    write_text(out, render("report.html", runs=runs, sections=shown, missing=missing, images=images))
    for line in missing:
        print(f"left out: {line}")
    print(f"page: {out}")
    if images:
        print(f"figures: {folder}")


def mlm_sections(runs: Sequence[PretrainingRun]) -> list[Section]:
    """What there is of runs in which nothing is replaced and there is no generator."""
    loss, samples = curve_section(runs, *CURVES[0]), samples_section(runs)
    loss.title, samples.title = "MLM loss", "Predictions of masked tokens"
    loss.caption = loss.caption.replace(" of each depth of the generator", "")
    loss.source = samples.source = ""
    return [loss, samples]


def sections_of_replacement(runs: Sequence[PretrainingRun], text_name: str) -> list[Section]:
    return [
        losses_section(runs, text_name),
        *(curve_section(runs, *curve) for curve in CURVES),
        discriminator_section(runs),
        samples_section(runs),
    ]


def why_missing(runs: Sequence[PretrainingRun], *contents: str) -> str:
    """Return why no run has these contents: the reasons in ``missing``, and of runs without a checkpoint."""
    reasons = [run.missing[key] for run in runs for key in ("checkpoint", *contents) if key in run.missing]
    return "; ".join(dict.fromkeys(reasons))


def notes_of_missing(runs: Sequence[PretrainingRun], *contents: str) -> list[str]:
    """Return a line for each of these runs, which a section leaves out beside others."""
    reasons = {run.name: why_missing([run], *contents) for run in runs}
    return [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]


def cost_section(runs: Sequence[PretrainingRun]) -> Section:
    columns = [cost_column(run) for run in runs]
    names = [name for name in columns[0] if {column[name] for column in columns} != {"none"}]
    rows = [[name, *(column[name] for column in columns)] for name in names]
    caption = (
        "Until the last logged update. Tokens: of full blocks, special tokens included. FLOPs: counted by amos flops, without "
        "the optimizer's step. Hours: running time of all training processes, validation and checkpoints included; for a run "
        "without its checkpoint_last.pt, or without the checkpoint that it started from, at least that time."
    )
    table = Table("", ["", *(run.name for run in runs)], rows)
    return Section("cost", "Runs and their cost", "AMOS Appendix C", caption, tables=[table])


def cost_column(run: PretrainingRun) -> dict[str, str]:
    """Return what the table of costs says about a run, by row."""
    size = precision = tokens = machine = unlogged = UNKNOWN
    if run.curves is None:  # of a run that was stopped within its first interval
        unlogged = f"no {FILE_NAME}, which a run writes from update common.log_interval on"
    if run.cfg is not None:
        model, length = run.cfg.model, run.cfg.task.tokens_per_sample
        size = f"{model.encoder_layers} layers of width {model.encoder_embed_dim}, {length} tokens"
        precision = precision_of(run.cfg.get("common", {}))
        processes = run.cfg.distributed_training.distributed_world_size
        machine = f"no GPU in the log; training processes: {processes}"
    if run.tokens_per_update:
        tokens = f"{run.num_updates * run.tokens_per_update:,} ({run.tokens_per_update:,} an update)"
    return {
        "objective": run.objective or UNKNOWN,
        "replaced tokens from": "none" if run.objective == "mlm" else run.setup or UNKNOWN,
        "encoder": size,
        "precision": precision,
        "updates": f"{run.num_updates:,}",
        "tokens": tokens,
        "FLOPs": flops_in_words(run.num_updates, run.flops_per_update),
        "hours": unlogged if run.seconds is None else f"{run.seconds / 3600:,.2f}",
        "tokens per second, median": f"{run.tokens_per_second:,.0f}" if run.tokens_per_second else unlogged,
        "machine": run.hardware or machine,
    }


def flops_in_words(num_updates: int, per_update: int | None) -> str:
    """Return "1.36 \u00d7 10\u00b9\u00b3" for 1.36e13."""
    if not per_update:
        return "not counted"
    digits, exponent = f"{num_updates * per_update:.2e}".split("e")
    superscripts = str.maketrans("0123456789-", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b")
    return f"{digits} \u00d7 10{str(int(exponent)).translate(superscripts)}"


def benchmark_section(anchor: str, title: str, source: str, results: Sequence[Summary], missing: str) -> Section:
    """``missing``: what adds results."""
    if not results:
        return Section(anchor, title, source, missing=missing)
    table = benchmark_table(results)
    spread = "Medians ± standard deviations" if num_seeds(results) != "1 seed" else "Scores"
    caption = f"{spread} over {num_seeds(results)} of fine-tuning, in percent, on the development sets."
    if any(result.from_scratch for result in results):
        caption += " Random weights: the same model without pretraining."
    return Section(anchor, title, source, caption, tables=[table], notes=list(table.notes))


def over_cost_section(results: Sequence[Summary], runs: Sequence[PretrainingRun], over: str | None) -> Section:
    section = Section("score_by_cost", "Score over the cost of pretraining", "AMOS Figure 6, TEAMS Figure 3")
    panels, unit, section.notes = points_over_cost(results, runs, over)
    if not panels:
        if over is not None:
            section.missing = f"--over {over} has no effect: no run has two checkpoints with scores of one task; "
        section.missing += (
            "it needs results of two or more checkpoints of one run, and for each of them one result of a task: give --glue "
            "DIR DIR ... or --tag DIR DIR ..."
        )
        return section
    section.caption = (
        f"Median score over {num_seeds(results)} of fine-tuning for each kept checkpoint of a run; bars are standard "
        f"deviations. The horizontal axis counts {unit}; AMOS's counts hours of pretraining on 64 A100."
    )
    section.figure = scores_over_cost(panels, unit)
    return section


def losses_section(runs: Sequence[PretrainingRun], text_name: str) -> Section:
    section = Section("loss_by_depth", "Loss on replaced tokens by depth", "AMOS Figure 1a")
    shown = [run for run in runs if run.losses]
    if not shown:
        section.missing = why_missing(runs, "text", "losses")
        if any("text" in run.missing for run in runs):
            section.missing += "; --text FILE gives a held-out text"
        return section
    rows = []
    for run in shown:
        for of_depth in run.losses:
            count, losses, statistics = len(of_depth.losses), of_depth.losses, [MISSING] * 3
            if count:
                statistics = [f"{losses.mean():.3f}", f"{np.median(losses):.3f}", f"{100 * of_depth.recall:.1f}"]
            share = f"{100 * count / of_depth.num_masked:.1f}"
            rows.append([f"{run.name}, depth {of_depth.depth}", f"{count:,}", share, *statistics])
    columns = ["", "replaced tokens", "of masked (%)", "mean loss", "median loss", "P > 1/2 (%)"]
    section.tables = [Table("", columns, rows)]
    masked = sorted({of_depth.num_masked for run in shown for of_depth in run.losses})
    section.caption = (
        "Loss of the discriminator on replaced tokens, -log P(replaced), by the depth of the generator that made them: "
        "histogram, kernel density (Gaussian, reflected at 0) and mean (vertical line). "
        f"After {', '.join(f'{run.checkpoint_updates:,}' for run in shown)} updates, on {text_name}; "
        f"{' to '.join(f'{n:,}' for n in dict.fromkeys([masked[0], masked[-1]]))} masked tokens for each depth; samples that "
        "equal the original are not replaced."
    )
    if any(len(run.losses) > 1 for run in shown):
        section.caption += (
            " The paper trains one discriminator with each generator; here the one discriminator of a run, which was trained "
            "on the mixture, reads the samples of each depth alone. Runs with one depth each, given together, are the "
            "paper's setup."
        )
    section.figure = loss_distributions(loss_panels(shown))
    section.notes = notes_of_missing([run for run in runs if not run.losses], "text", "losses")
    return section


def loss_panels(runs: Sequence[PretrainingRun]) -> dict[str, dict[str, np.ndarray]]:
    """Return one panel for each run with several depths, and one for all runs with a single depth together."""
    panels, single = {}, [run for run in runs if len(run.losses) == 1]
    if single:
        title = single[0].name if len(single) == 1 else "one discriminator for each generator"
        panels[title] = {f"{run.name}, depth {run.losses[0].depth}": run.losses[0].losses for run in single}
    for run in runs:
        if len(run.losses) > 1:
            panels[run.name] = {f"depth {of_depth.depth}": of_depth.losses for of_depth in run.losses}
    return panels


def curve_section(
    runs: Sequence[PretrainingRun], anchor: str, key: str, title: str, source: str, caption: str
) -> Section:
    """The panel of ``amos plot`` for the key of the log, with all runs."""
    section = Section(anchor, title, source)
    panel = next(panel for panel in PANELS if panel.key == key)
    curves = [run.curves for run in runs if run.curves is not None and depth_names(panel, [run.curves])]
    if not curves:
        section.missing = f"no run has logged it; {FILE_NAME} is missing, or the objective has no such value"
    elif anchor == "mixture" and len(depth_names(panel, curves)) < 2:
        section.missing = "no run has a generator with several depths"
    else:
        if reference_levels(panel, curves):
            caption += (
                " Dotted: entropy of the token frequencies in the validation text. No model without context has a lower loss "
                "on this text, and on a small text none comes close to it."
            )
        section.caption = caption + TRAINING_AND_VALIDATION
        section.figure = panels_figure([panel], curves, titled=False)
    return section


def discriminator_section(runs: Sequence[PretrainingRun]) -> Section:
    """Whether detection distinguishes tokens: its curves, and a line for each run in which it ended without doing so."""
    section = Section("discriminator", "State of the discriminator", "")
    curves = [run.curves for run in runs if run.curves is not None]
    panels = [panel for panel in DETECTOR_PANELS if depth_names(panel, curves)]
    if not panels:
        section.missing = "no run has logged what a discriminator does with tokens"
        return section
    section.caption = (
        "The detection loss minus that of a detector that knows only the fraction of replaced tokens; the standard deviation "
        "of the logits within a batch; and, of the states below the detection head on held-out text, the variance divided by "
        "the mean square, the share of the first principal component in the variance, and the participation ratio."
    ) + TRAINING_AND_VALIDATION
    section.figure = panels_figure(panels, curves)
    for run in curves:
        if (since := collapsed_since(run)) is not None:
            section.notes.append(
                f"{run.name}: since update {since:,} the logits of a batch have been equal (standard deviation below "
                f"{EQUAL_LOGITS}): detection gives all tokens the same probability. docs/collapse.md says what to do."
            )
    return section


def collapsed_since(curves: RunCurves) -> int | None:
    """Return the first of the last logged updates of training in which all logits were equal; None if the last one was not."""
    logged, since = curves.get("train", "rtd_logit_std"), None
    for update, value in zip(logged.updates, logged.values, strict=True):
        if not value < EQUAL_LOGITS:
            since = None
        elif since is None:
            since = update
    return since


def samples_section(runs: Sequence[PretrainingRun]) -> Section:
    section = Section("replaced_tokens", "Replaced tokens by depth", "AMOS Table 9")
    shown = [run for run in runs if run.inspections]
    if not shown:
        section.missing = why_missing(runs, "sentences")
        return section
    section.texts = {run.name: run.inspections for run in shown}
    section.caption = "Underlined words are masked out. In brackets, in the order and color of the depths: the token "
    are_samples = [one.is_corrupted for run in shown for one in run.inspections]
    if any(are_samples):
        section.caption += (
            "sampled from each depth of the generator. A hyphen marks a piece that continues a word. A check mark follows a "
            "replaced token that the discriminator finds, P(replaced) > 1/2, when all masked tokens of the text are replaced "
            "by that depth."
        )
        if not all(are_samples):
            section.caption += " Of a run in which nothing is replaced: the token that is most probable."
    else:
        section.caption += "that is most probable. A hyphen marks a piece that continues a word."
    section.notes = notes_of_missing([run for run in runs if not run.inspections], "sentences")
    return section


def probing_sections(contents: Sequence[ProbeResults]) -> list[Section]:
    """The picture and the table of the scores of each output of ``amos probe``."""
    title, source = "Edge probing by layer", 'AMOS "Figure 4", Table 8'
    if not contents:
        return [Section("probing", title, source, missing="--probe DIR adds it, the output of amos probe")]
    sections = []
    runs = distinct_names([Path(str(content.checkpoint.get("file", ""))).parent for content in contents])
    for number, (content, run) in enumerate(zip(contents, runs, strict=True), start=1):
        results = in_order(content.results)
        targets = {row_name(result.task, result.metric): f"{result.targets:,}" for result in results}
        cells = scores_by_cell([result for result in results if result.baseline != MAJORITY])
        seeds = seeds_in_words(len(scores) for cell in cells.values() for scores in cell.values())
        caption = (
            f"Classifiers on the frozen states of one layer of {run} after {content.checkpoint['num_updates']:,} updates. "
            f"Table: 100 times the mean over {seeds} of the micro-F1 (or of the score that the task's name gives), ± standard "
            "deviation where there are several. Picture: mean and range over the seeds. Classifier: "
            f"{content.settings.get('classifier', UNKNOWN)}. "
            f"Scored targets: {', '.join(f'{name} {count}' for name, count in targets.items())}."
        )
        section = Section("probing" if number == 1 else f"probing_{number}", title, source, caption)
        if len(contents) > 1:
            section.title += f": {run}"
        section.figure, section.tables = probing_figure(results), [results_table(results, "", [])]
        section.notes = content.notes
        sections.append(section)
    return sections
