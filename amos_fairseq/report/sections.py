"""The sections of the report: what each shows, on which text, with how many samples, and where it is in the paper."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from amos_fairseq.downstream.results import Summary
from amos_fairseq.functional.replaced_token_detection import EQUAL_LOGITS
from amos_fairseq.output.pictures import RC_PARAMS
from amos_fairseq.output.tables import MISSING, Table
from amos_fairseq.probing.results import (
    MAJORITY,
    ProbeResult,
    in_order,
    probing_figure,
    results_table,
    row_name,
    scores_by_cell,
    table_notes,
)
from amos_fairseq.report.curves import DETECTOR_PANELS, PANELS, RunCurves, depth_names, panels_figure, reference_levels
from amos_fairseq.report.figures import loss_distributions, scores_over_cost
from amos_fairseq.report.inspection import Inspection, MaskedToken, printable
from amos_fairseq.report.inspection_views import annotated_text, depth_legend
from amos_fairseq.report.page import Page, Section
from amos_fairseq.report.recipe import compare_settings, paper_recipe
from amos_fairseq.report.results import benchmark_table, num_seeds, points_over_cost, seeds_in_words
from amos_fairseq.report.runs import PretrainingRun
from amos_fairseq.run.metrics_file import FILE_NAME
from amos_fairseq.run.precision import precision_of

UNKNOWN = "not in the run's files"
NO_LOG = f"no {FILE_NAME}, which a run writes from update common.log_interval on"
PROBING = 'AMOS "Figure 4", Table 8'
TRAINING_AND_VALIDATION = " Lines: training text, means between two records. Markers: the validation split."
# Title, figure or table of the paper, caption, key of the log.
CURVES = {
    "generator-loss": (
        "Generator loss by depth",
        "AMOS Figure 1b",
        "MLM loss of each depth of the generator on masked tokens (Eq. 2), in nats.",
        "mlm_loss_",
    ),
    "mixture": (
        "Mixture weights",
        "AMOS Figure 5a",
        "Weight of each generator depth in the mixture (Eq. 3), mean over all masked tokens.",
        "mixture_",
    ),
    "recall": (
        "Discriminator accuracy on replaced tokens",
        "AMOS Figure 5b",
        "Fraction of the replaced tokens to which the discriminator gives P(replaced) > 1/2.",
        "rtd_recall",
    ),
}


@matplotlib.rc_context(RC_PARAMS)
def build_page(
    runs: Sequence[PretrainingRun],
    text_name: str,
    glue: Sequence[Summary] = (),
    tag: Sequence[Summary] = (),
    probing: Sequence[dict[str, Any]] = (),
) -> Page:
    """Build all sections, and a line for each one that is left out.

    Args:
        text_name: what the held-out text is called in captions.
        glue, tag: results of fine-tuning; empty without the flag.
        probing: results of :func:`amos_fairseq.report.results.read_probing`.
    """
    glue_reason = "--glue DIR adds them, the output of amos glue, amos squad or amos classify"
    tag_reason = "--tag DIR adds them, the output of amos tag"
    probed = [probing_section(own, number, len(probing) > 1) for number, own in enumerate(probing, start=1)]
    parts = [
        cost_section(runs),
        benchmark_section("results", "Fine-tuning results", "AMOS Table 1", glue, glue_reason),
        over_cost_section([*glue, *tag], runs),
        benchmark_section("tagging", "Tagging results", "", tag, tag_reason),
        losses_section(runs, text_name),
        *(curve_section(anchor, runs) for anchor in CURVES),
        discriminator_section(runs),
        samples_section(runs),
        *(probed or [_left_out("Edge probing by layer", PROBING, "--probe DIR adds it, the output of amos probe")]),
        recipe_section(runs),
    ]
    sections = [part for part in parts if isinstance(part, Section)]
    return Page(*title_and_lead(runs), sections, [part for part in parts if isinstance(part, str)])


def _left_out(title: str, source: str, reason: str) -> str:
    """Return the line that stands for a section without content."""
    return f"{title} ({source}): {reason}" if source else f"{title}: {reason}"


def title_and_lead(runs: Sequence[PretrainingRun]) -> tuple[str, str]:
    """Return the heading of the page, and the line below it."""
    names = ", ".join(run.name for run in runs)
    described = [" ".join(filter(None, [run.objective.upper(), run.setup and f"({run.setup})"])) for run in runs]
    updates = ", ".join(f"{run.cost.num_updates:,}" for run in runs)
    objectives = "; ".join(filter(None, dict.fromkeys(described)))
    return f"Pretraining of {names}", " ".join(filter(None, [objectives and f"{objectives}.", f"Updates: {updates}."]))


def _why(runs: Sequence[PretrainingRun], *keys: str, hint: str = "") -> str:
    """Return why no run has a section: the reasons in ``missing`` under these keys, and of runs without a checkpoint.

    ``hint`` is added where a run has no text, which the first key says.
    """
    reasons = dict.fromkeys(run.missing[key] for run in runs for key in ("checkpoint", *keys) if key in run.missing)
    hints = [hint] if hint and any(keys[0] in run.missing for run in runs) else []
    return "; ".join([*reasons, *hints])


def cost_section(runs: Sequence[PretrainingRun]) -> Section:
    """The runs side by side: what was trained, on what, for how long."""
    values = {
        "objective": lambda run: run.objective or UNKNOWN,
        "replaced tokens from": lambda run: run.setup or UNKNOWN,
        "encoder": _size,
        "precision": _precision,
        "updates": lambda run: f"{run.cost.num_updates:,}",
        "tokens": _tokens,
        "FLOPs, matrix products": lambda run: _flops(run, run.cost.flops_per_update),
        "FLOPs, convention of thesis 5.2.2": lambda run: _flops(run, run.cost.thesis_flops_per_update),
        "hours": lambda run: _unlogged(run) if run.cost.seconds is None else f"{run.cost.seconds / 3600:,.2f}",
        "tokens per second, median": _tokens_per_second,
        "machine": _machine,
    }
    rows = [[name, *map(value, runs)] for name, value in values.items()]
    caption = (
        "Until the last logged update. Tokens: of full blocks, special tokens included. FLOPs: counted by amos flops, without "
        "the optimizer's step. Hours: running time of all training processes, validation and checkpoints included; for a run "
        "without its checkpoint_last.pt, or without the checkpoint that it started from, at least that time."
    )
    table = Table("", ["", *(run.name for run in runs)], rows)
    return Section("cost", "Runs and their cost", "AMOS Appendix C", caption, tables=[table])


def _unlogged(run: PretrainingRun) -> str:
    """Return why a value of the log is not known. A run that was stopped within its first interval has no log."""
    return NO_LOG if run.curves is None else UNKNOWN


def _tokens_per_second(run: PretrainingRun) -> str:
    return f"{run.cost.tokens_per_second:,.0f}" if run.cost.tokens_per_second else _unlogged(run)


def _size(run: PretrainingRun) -> str:
    if run.cfg is None:
        return UNKNOWN
    model = run.cfg.model
    return f"{model.encoder_layers} layers of width {model.encoder_embed_dim}, {run.cfg.task.tokens_per_sample} tokens"


def _precision(run: PretrainingRun) -> str:
    return UNKNOWN if run.cfg is None or "common" not in run.cfg else precision_of(run.cfg.common)


def _tokens(run: PretrainingRun) -> str:
    per_update = run.cost.tokens_per_update
    return f"{run.cost.num_updates * per_update:,} ({per_update:,} an update)" if per_update else UNKNOWN


def _flops(run: PretrainingRun, per_update: int | None) -> str:
    """Return "1.36 \u00d7 10\u00b9\u00b3" for 1.36e13."""
    if not per_update:
        return "not counted"
    digits, exponent = f"{run.cost.num_updates * per_update:.2e}".split("e")
    superscripts = str.maketrans("0123456789-", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b")
    return f"{digits} \u00d7 10{str(int(exponent)).translate(superscripts)}"


def _machine(run: PretrainingRun) -> str:
    if run.cost.hardware:
        return run.cost.hardware
    if run.cfg is None:
        return UNKNOWN
    processes = run.cfg.distributed_training.distributed_world_size
    return f"no GPU in the log; {processes} training process{'es' * (processes > 1)}"


def benchmark_section(anchor: str, title: str, source: str, results: Sequence[Summary], without: str) -> Section | str:
    """``without``: what adds results."""
    if not results:
        return _left_out(title, source, without)
    table = benchmark_table(results)
    caption = (
        f"Medians ± standard deviations over {num_seeds(results)} of fine-tuning, in percent, on the development sets. "
        "Random weights: the same model without pretraining."
    )
    return Section(anchor, title, source, caption, tables=[table], notes=list(table.notes))


def over_cost_section(results: Sequence[Summary], runs: Sequence[PretrainingRun]) -> Section | str:
    """Scores of the kept checkpoints of a run."""
    title, source = "Score over the cost of pretraining", "AMOS Figure 6"
    panels, unit = points_over_cost(results, runs)
    if not panels:
        reason = "--glue DIR DIR ... adds it: the outputs of amos glue for two or more checkpoints of a run"
        return _left_out(title, source, reason)
    caption = (
        f"Median score over {num_seeds(results)} of fine-tuning for each kept checkpoint of a run; bars are standard "
        f"deviations. The horizontal axis counts {unit}; the paper's counts hours of pretraining on 64 A100."
    )
    return Section("score-by-cost", title, source, caption, scores_over_cost(panels, unit))


def losses_section(runs: Sequence[PretrainingRun], text_name: str) -> Section | str:
    title, source = "Loss on replaced tokens by depth", "AMOS Figure 1a"
    shown = [run for run in runs if run.losses]
    if not shown:
        hint = "--text FILE gives a held-out text"
        return _left_out(title, source, _why(runs, "text", "losses", hint=hint))
    rows = []
    for run in shown:
        for of_depth in run.losses:
            count, losses = len(of_depth.losses), of_depth.losses
            share, statistics = f"{100 * count / of_depth.num_masked:.1f}", [MISSING] * 3
            if count:
                statistics = [f"{losses.mean():.3f}", f"{np.median(losses):.3f}", f"{100 * of_depth.recall:.1f}"]
            rows.append([f"{run.name}, depth {of_depth.depth}", f"{count:,}", share, *statistics])
    columns = ["", "replaced tokens", "of masked (%)", "mean loss", "median loss", "P > 1/2 (%)"]
    masked = sorted({of_depth.num_masked for run in shown for of_depth in run.losses})
    updates = ", ".join(f"{run.checkpoint_updates:,}" for run in shown)
    mixed = any(len(run.losses) > 1 for run in shown)
    departure = (
        " The paper trains one discriminator with each generator; here the one discriminator of a run, which was trained on "
        "the mixture, reads the samples of each depth alone. Runs with one depth each, given together, are the paper's setup."
    )
    caption = (
        "Loss of the discriminator on replaced tokens, -log P(replaced), by the depth of the generator that made them: "
        "histogram, kernel density (Gaussian, reflected at 0) and mean (vertical line). "
        f"After {updates} updates, on {text_name}; {' to '.join(f'{n:,}' for n in dict.fromkeys([masked[0], masked[-1]]))} "
        f"masked tokens for each depth; samples that equal the original are not replaced.{departure * mixed}"
    )
    figure = loss_distributions(loss_panels(shown))
    return Section("loss-by-depth", title, source, caption, figure, [Table("", columns, rows)])


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


def curve_section(anchor: str, runs: Sequence[PretrainingRun]) -> Section | str:
    """One panel of ``amos plot`` with all runs."""
    title, source, caption, key = CURVES[anchor]
    panel = next(panel for panel in PANELS if panel.key == key)
    curves = [run.curves for run in runs if run.curves is not None and depth_names(panel, [run.curves])]
    if not curves:
        reason = "no run has logged it; metrics.jsonl is missing, or the objective has no such value"
        return _left_out(title, source, reason)
    if anchor == "mixture" and len(depth_names(panel, curves)) < 2:
        return _left_out(title, source, "no run has a generator with several depths")
    if reference_levels(panel, curves):
        caption += " Dotted: entropy of the token frequencies, the lowest loss without context."
    drawn = [run for run in runs if run.curves in curves]
    if anchor == "recall" and are_curriculum_setups(drawn):
        caption += f" The runs are curriculum setups: {'; '.join(f'{run.name}, {run.setup}' for run in drawn)}."
    figure = panels_figure([panel], curves, titled=False)
    return Section(anchor, title, source, caption + TRAINING_AND_VALIDATION, figure)


def are_curriculum_setups(runs: Sequence[PretrainingRun]) -> bool:
    """Whether runs compare what AMOS Figure 5b compares: ways to mix the same depths, in models of one size."""
    if not all(run.objective == "amos" and run.setup for run in runs):
        return False
    models = {
        (model.generator_depths, model.encoder_layers, model.encoder_embed_dim)
        for model in (run.cfg.model for run in runs)
    }
    return len(models) == 1 and 1 < len(runs) == len({run.setup for run in runs})


def discriminator_section(runs: Sequence[PretrainingRun]) -> Section | str:
    """Whether detection distinguishes tokens: its curves, and a line for each run in which it ended without doing so."""
    title, found = "State of the discriminator", {run.name: run.curves for run in runs if run.curves is not None}
    curves = list(found.values())
    panels = [panel for panel in DETECTOR_PANELS if depth_names(panel, curves)]
    if not panels:
        return _left_out(title, "", "no run has logged what a discriminator does with tokens")
    notes = [
        f"{name}: since update {since:,} the logits of a batch have been equal (standard deviation below "
        f"{EQUAL_LOGITS}): detection gives all tokens the same probability. docs/collapse.md says what to do."
        for name, own in found.items()
        if (since := collapsed_since(own)) is not None
    ]
    caption = (
        "The detection loss minus that of a detector that knows only the fraction of replaced tokens; the standard deviation "
        "of the logits within a batch; and, of the states below the detection head on held-out text, the variance divided by "
        "the mean square, the share of the first principal component in the variance, and the participation ratio."
    )
    figure = panels_figure(panels, curves, titled=True)
    return Section("discriminator", title, "", caption + TRAINING_AND_VALIDATION, figure, notes=notes)


def collapsed_since(curves: RunCurves) -> int | None:
    """Return the first of the last logged updates of training in which all logits were equal; None if the last one was not."""
    logged, since = curves.get("train", "rtd_logit_std"), None
    for update, value in zip(logged.updates, logged.values, strict=True):
        if not value < EQUAL_LOGITS:
            since = None
        elif since is None:
            since = update
    return since


def samples_section(runs: Sequence[PretrainingRun]) -> Section | str:
    """Texts with the tokens that each depth would replace the masked ones by."""
    title, source = "Replaced tokens by depth", "AMOS Table 9"
    shown = [run for run in runs if run.inspections]
    if not shown:
        return _left_out(title, source, _why(runs, "sentences"))
    html = ""
    for run in shown:
        html += f"<h3>{escape(printable(run.name))}</h3>" * (len(runs) > 1) + "".join(map(_samples, run.inspections))
    sampled = any(masked.samples for run in shown for each in run.inspections for masked in each.masked)
    kind = "sampled from each depth of the generator" if sampled else "that is most probable"
    caption = f"Underlined words are masked out. In brackets: the token {kind}, in the order and color of the depths."
    if sampled:
        caption += (
            " A hyphen marks a piece that continues a word. A check mark follows a replaced token that the discriminator "
            "finds, P(replaced) > 1/2, when all masked tokens of the text are replaced by that depth."
        )
    return Section("replaced-tokens", title, source, caption, html=html)


def _samples(inspection: Inspection) -> str:
    def pieces(masked: MaskedToken) -> list[str]:
        original = inspection.tokens[masked.position].original
        found = [one.piece != original and (one.positive_probability or 0) > 0.5 for one in masked.samples]
        if not found:
            return [predictions[0].piece for predictions in masked.predictions]
        return [one.shown + " \u2713" * mark for one, mark in zip(masked.samples, found, strict=True)]

    note = (
        f"{len(inspection.masked)} of {len(inspection.tokens)} tokens {inspection.selected}, seed {inspection.seed}, after "
        f"{inspection.num_updates:,} updates; in brackets {depth_legend(inspection)}."
    )
    text = annotated_text(inspection, list(map(pieces, inspection.masked)))
    return f"{text}<p class=note>{note}</p>"


def probing_section(content: dict[str, Any], number: int, named: bool) -> Section:
    """The picture and the table of the scores of one output of ``amos probe``."""
    results, settings = in_order([ProbeResult(**result) for result in content["results"]]), content["settings"]
    run, updates = Path(str(content["checkpoint"].get("file", ""))).parent.name, content["checkpoint"]["num_updates"]
    counts = {row_name(result.task, result.metric): f"{result.targets:,}" for result in results}
    probes = [result for result in results if result.baseline != MAJORITY]
    seeds = seeds_in_words(len(scores) for cell in scores_by_cell(probes).values() for scores in cell.values())
    caption = (
        f"Classifiers on the frozen states of one layer of {run} after {updates:,} updates. Table: 100 times the mean over "
        f"{seeds} of the micro-F1 (or of the score that the task's name gives), ± standard deviation where there are several. "
        f"Picture: mean and range over the seeds. Classifier: {settings.get('classifier', UNKNOWN)}. "
        f"Scored targets: {', '.join(f'{name} {count}' for name, count in counts.items())}."
    )
    anchor, title = "probing" if number == 1 else f"probing-{number}", "Edge probing by layer" + f": {run}" * named
    figure, table, notes = probing_figure(results), results_table(results, "", []), table_notes(results, settings)
    return Section(anchor, title, PROBING, caption, figure, [table], notes=notes)


def recipe_section(runs: Sequence[PretrainingRun]) -> Section | str:
    title, tables, notes = "Recipe and departures from the paper", [], []
    for run in runs:
        name = run.cfg and paper_recipe(run.cfg)
        if name is None:
            continue
        per_update = run.cost.tokens_per_update
        settings = compare_settings(run.cfg, name, per_update and per_update // run.cfg.task.tokens_per_sample)
        rows = [[setting.name, setting.own, setting.paper, setting.source] for setting in settings if setting.differs]
        if rows:
            tables.append(Table(run.name, ["setting", "this run", name, f"source of {name}"], rows))
        else:
            notes.append(f"{run.name}: no setting differs from {name}.")
        same = [f"{setting.name} {setting.own}" for setting in settings if setting.is_of_paper and not setting.differs]
        notes.append(f"{run.name}, as in the paper: {', '.join(same)}.")
    if not notes:
        return _left_out(title, "", _why(runs, "recipe") or "no recipe of a paper")
    caption = (
        "Settings in which a run differs from the recipe of its objective and width (base for other widths), with the source "
        'of the recipe\'s value; "ours" where the papers are silent. Differences of the method itself are listed in '
        "docs/departures.md."
    )
    return Section("recipe", title, "AMOS Table 3", caption, tables=tables, notes=notes)
