"""The parts of the report: what each shows, on which text, with how many samples, and where it is in the paper."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.errors import UserError
from amos_fairseq.functional.replaced_token_detection import EQUAL_LOGITS
from amos_fairseq.inspection.html_page import annotated_text, depth_legend
from amos_fairseq.inspection.results import Inspection, printable
from amos_fairseq.plotting.curves import (
    DETECTOR_PANELS,
    PANELS,
    Curve,
    Panel,
    Run,
    depth_names,
    panels_figure,
    reference_levels,
)
from amos_fairseq.plotting.probing import probing_figure
from amos_fairseq.plotting.report_figures import Sample, loss_distributions, scores_over_cost
from amos_fairseq.plotting.style import depth_colours
from amos_fairseq.probing.experiment import in_order
from amos_fairseq.probing.results import Result, read_results, results_table, row_name, scores_by_cell, table_notes
from amos_fairseq.report.page import Part
from amos_fairseq.report.recipe import compare_settings, paper_recipe
from amos_fairseq.report.results import BenchmarkResults, benchmark_table, num_seeds, points_over_cost, seeds_in_words
from amos_fairseq.report.runs import ReportRun, distinct_folders
from amos_fairseq.tables import Table

UNKNOWN = "not in the run's files"


@dataclass
class Report:
    """The parts of the page in their order, and one line for each part that is left out."""

    parts: list[Part] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, name: str, part: Part | None, reason: str) -> None:
        """Add a part, or the reason why there is none."""
        if part is None:
            self.missing.append(f"{name}: {reason}")
        else:
            self.parts.append(part)


def build_report(
    runs: Sequence[ReportRun],
    text_name: str,
    glue: Sequence[BenchmarkResults],
    tag: Sequence[BenchmarkResults],
    probing: Sequence[Part],
) -> Report:
    """Build all parts.

    Args:
        text_name: what the held-out text is called in captions.
        glue, tag: results of fine-tuning; empty without the flag.
        probing: of :func:`probing_parts`.
    """
    report = Report()
    report.parts.append(cost_part(runs))
    report.add(
        "Fine-tuning results (AMOS Table 1)",
        benchmark_part("results", "Fine-tuning results", "AMOS Table 1", glue),
        "--glue DIR adds them, the output of amos glue or amos squad",
    )
    report.add(
        "Score over the cost of pretraining (AMOS Figure 6)",
        over_cost_part([*glue, *tag], runs),
        "--glue DIR DIR ... adds it: the outputs of amos glue for two or more checkpoints of a run",
    )
    report.add("Tagging results", benchmark_part("tagging", "Tagging results", "", tag),
               "--tag DIR adds them, the output of amos tag")  # fmt: skip
    report.add("Loss on replaced tokens by depth (AMOS Figure 1a)", losses_part(runs, text_name), _why(
        runs, "text", "losses", hint="--text FILE gives a held-out text"))  # fmt: skip
    for anchor, title, source, caption, key in CURVES:
        part = curve_part(anchor, title, source, caption, key, runs)
        reason = "no run has logged it; metrics.jsonl is missing, or the objective has no such value"
        if key == "mixture_" and any(len(depth_names(panel_of(key), [run.curves])) == 1 for run in runs if run.curves):
            reason = "no run has a generator with several depths"
        report.add(f"{title} ({source})", part, reason)
    report.add(
        "State of the discriminator",
        discriminator_part(runs),
        "no run has logged what a discriminator does with tokens",
    )
    report.add("Replaced tokens by depth (AMOS Table 9)", samples_part(runs), _why(runs, "sentences"))
    report.parts += probing
    if not probing:
        report.missing.append(
            'Edge probing by layer (AMOS "Figure 4", Table 8): --probe DIR adds it, the output of amos probe'
        )
    report.add(
        "Recipe and departures from the paper", recipe_part(runs), _why(runs, "recipe") or "no recipe of a paper"
    )
    return report


def _why(runs: Sequence[ReportRun], *keys: str, hint: str = "") -> str:
    """Return why no run has a part: the reasons in ``missing`` under these keys, and of runs without a checkpoint.

    ``hint`` is added where a run has no text, which the first key says.
    """
    reasons = dict.fromkeys(run.missing[key] for run in runs for key in ("checkpoint", *keys) if key in run.missing)
    hints = [hint] if hint and any(keys[0] in run.missing for run in runs) else []
    return "; ".join([*reasons, *hints])


def cost_part(runs: Sequence[ReportRun]) -> Part:
    """The runs side by side: what was trained, on what, for how long."""
    rows = []
    for name, value in (
        ("objective", lambda run: run.objective or UNKNOWN),
        ("replaced tokens from", lambda run: run.setup or UNKNOWN),
        ("encoder", _size),
        ("updates", lambda run: f"{run.cost.num_updates:,}"),
        ("tokens", _tokens),
        ("FLOPs, matrix products", lambda run: _flops(run, run.cost.flops_per_update)),
        ("FLOPs, convention of thesis 5.2.2", lambda run: _flops(run, run.cost.thesis_flops_per_update)),
        ("hours", lambda run: UNKNOWN if run.cost.seconds is None else f"{run.cost.seconds / 3600:,.2f}"),
        ("tokens per second, median", _rate),
        ("machine", _machine),
    ):  # fmt: skip
        rows.append([name, *(value(run) for run in runs)])
    return Part(
        "cost", "Runs and their cost", "AMOS Appendix C",
        "Until the last logged update. Tokens: of full blocks, special tokens included. FLOPs: counted by amos flops, without "
        "the optimizer's step. Hours: running time of all training processes, validation and checkpoints included; for a run "
        "without its checkpoint_last.pt, or without the checkpoint that it started from, at least that time.",
        tables=[Table("", ["", *(run.name for run in runs)], rows)],
    )  # fmt: skip


def _size(run: ReportRun) -> str:
    if run.cfg is None:
        return UNKNOWN
    model = run.cfg.model
    return f"{model.encoder_layers} layers of width {model.encoder_embed_dim}, {run.cfg.task.tokens_per_sample} tokens"


def _tokens(run: ReportRun) -> str:
    per_update = run.cost.tokens_per_update
    return f"{run.cost.num_updates * per_update:,} ({per_update:,} an update)" if per_update else UNKNOWN


def _flops(run: ReportRun, per_update: int | None) -> str:
    return f"{scientific(run.cost.num_updates * per_update)}" if per_update else "not counted"


def scientific(number: float) -> str:
    """Return "1.36 \u00d7 10\u00b9\u00b3" for 1.36e13."""
    digits, exponent = f"{number:.2e}".split("e")
    superscripts = str.maketrans("0123456789-", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b")
    return f"{digits} \u00d7 10{str(int(exponent)).translate(superscripts)}"


def _rate(run: ReportRun) -> str:
    return f"{run.cost.tokens_per_second:,.0f}" if run.cost.tokens_per_second else UNKNOWN


def _machine(run: ReportRun) -> str:
    if run.cost.hardware:
        return run.cost.hardware
    if run.cfg is None:
        return UNKNOWN
    processes = run.cfg.distributed_training.distributed_world_size
    return f"not in the log; {processes} training process{'es' * (processes > 1)}"


def benchmark_part(anchor: str, title: str, source: str, results: Sequence[BenchmarkResults]) -> Part | None:
    if not results:
        return None
    table = benchmark_table("", results)
    caption = (
        f"Medians ± standard deviations over {num_seeds(results)} of fine-tuning, in percent, on the development sets. "
        "Random weights: the same model without pretraining."
    )
    return Part(anchor, title, source, caption, tables=[table], notes=list(table.notes))


def over_cost_part(results: Sequence[BenchmarkResults], runs: Sequence[ReportRun]) -> Part | None:
    """Scores of the kept checkpoints of a run."""
    panels, unit = points_over_cost(results, runs)
    if not panels:
        return None
    caption = (
        f"Median score over {num_seeds(results)} of fine-tuning for each kept checkpoint of a run; bars are standard "
        f"deviations. The horizontal axis counts {unit}; the paper's counts hours of pretraining on 64 A100."
    )
    return Part(
        "score-by-cost", "Score over the cost of pretraining", "AMOS Figure 6", caption, scores_over_cost(panels, unit)
    )


def losses_part(runs: Sequence[ReportRun], text_name: str) -> Part | None:
    shown = [run for run in runs if run.losses]
    if not shown:
        return None
    rows = []
    for run in shown:
        for of_depth in run.losses:
            count, losses = len(of_depth.losses), of_depth.losses
            statistics = [f"{np.mean(losses):.3f}", f"{np.median(losses):.3f}"] if count else ["-", "-"]
            found = f"{100 * of_depth.recall:.1f}" if count else "-"
            share = f"{100 * count / of_depth.num_masked:.1f}"
            rows.append([f"{run.name}, depth {of_depth.depth}", f"{count:,}", share, *statistics, found])
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
    figure, table = loss_distributions(loss_panels(shown)), Table("", columns, rows)
    return Part("loss-by-depth", "Loss on replaced tokens by depth", "AMOS Figure 1a", caption, figure, [table])


def loss_panels(runs: Sequence[ReportRun]) -> dict[str, list[Sample]]:
    """Return one panel for each run with several depths, and one for all runs with a single depth together."""
    panels, single = {}, [run for run in runs if len(run.losses) == 1]
    if single:
        title = single[0].name if len(single) == 1 else "one discriminator for each generator"
        panels[title] = [Sample(f"{run.name}, depth {run.losses[0].depth}", run.losses[0].losses) for run in single]
    for run in runs:
        if len(run.losses) > 1:
            panels[run.name] = [Sample(f"depth {of_depth.depth}", of_depth.losses) for of_depth in run.losses]
    return panels


TRAINING_AND_VALIDATION = " Lines: training text, means between two records. Markers: the validation split."
# Anchor, title, figure of the paper, caption, key of the log.
CURVES = (
    ("generator-loss", "Generator loss by depth", "AMOS Figure 1b",
     "MLM loss of each depth of the generator on masked tokens (Eq. 2), in nats.", "mlm_loss_"),
    ("mixture", "Mixture weights", "AMOS Figure 5a",
     "Weight of each generator depth in the mixture (Eq. 3), mean over all masked tokens.", "mixture_"),
    ("recall", "Discriminator accuracy on replaced tokens", "AMOS Figure 5b",
     "Fraction of the replaced tokens to which the discriminator gives P(replaced) > 1/2.", "rtd_recall"),
)  # fmt: skip


def panel_of(key: str) -> Panel:
    return next(panel for panel in PANELS if panel.key == key)


def curve_part(anchor: str, title: str, source: str, caption: str, key: str, runs: Sequence[ReportRun]) -> Part | None:
    """One panel of ``amos plot`` with all runs."""
    panel = panel_of(key)
    curves = [run.curves for run in runs if run.curves is not None and depth_names(panel, [run.curves])]
    if not curves or (key == "mixture_" and len(depth_names(panel, curves)) < 2):
        return None
    if reference_levels(panel, curves):
        caption += " Dotted: entropy of the token frequencies, the lowest loss without context."
    setups = [f"{run.name}, {run.setup}" for run in runs if run.curves in curves and run.setup]
    if key == "rtd_recall" and len(setups) > 1:
        caption += f" The runs are the curriculum setups: {'; '.join(setups)}."
    return Part(anchor, title, source, caption + TRAINING_AND_VALIDATION, panels_figure([panel], curves, titled=False))


def discriminator_part(runs: Sequence[ReportRun]) -> Part | None:
    """Whether detection distinguishes tokens: its curves, and a line for each run in which it ended without doing so."""
    found = [run.curves for run in runs if run.curves is not None]
    panels = [panel for panel in DETECTOR_PANELS if depth_names(panel, found)]
    if not panels:
        return None
    notes = []
    for run in runs:
        since = collapsed_since(run.curves) if run.curves is not None else None
        if since is not None:
            notes.append(
                f"{run.name}: since update {since:,} the logits of a batch have been equal (standard deviation below "
                f"{EQUAL_LOGITS}): detection gives all tokens the same probability. docs/collapse.md says what to do."
            )
    return Part(
        "discriminator", "State of the discriminator", "",
        "The detection loss minus that of a detector that knows only the fraction of replaced tokens; the standard deviation "
        "of the logits within a batch; and, of the states below the detection head on held-out text, the variance divided by "
        "the mean square, the share of the first principal component in the variance, and the participation ratio."
        + TRAINING_AND_VALIDATION,
        panels_figure(panels, found, titled=True), notes=notes,
    )  # fmt: skip


def collapsed_since(curves: Run) -> int | None:
    """Return the first of the last logged updates of training in which all logits were equal; None if the last one was not."""
    logged = curves.curves.get("train", {}).get("rtd_logit_std", Curve())
    since = None
    for update, value in zip(logged.updates, logged.values, strict=True):
        if not value < EQUAL_LOGITS:
            since = None
        elif since is None:
            since = update
    return since


def samples_part(runs: Sequence[ReportRun]) -> Part | None:
    """Texts with the tokens that each depth would replace the masked ones by."""
    texts = [_samples_of_run(run, len(runs) > 1) for run in runs if run.inspections]
    if not texts:
        return None
    sampled = any(masked.samples for run in runs for each in run.inspections for masked in each.masked)
    kind = "sampled from each depth of the generator" if sampled else "that is most probable"
    caption = f"Underlined words are masked out. In brackets: the token {kind}, in the order and color of the depths."
    if sampled:
        caption += (
            " A hyphen marks a piece that continues a word. A check mark follows a replaced token that the discriminator "
            "finds, P(replaced) > 1/2, when all masked tokens of the text are replaced by that depth."
        )
    return Part("replaced-tokens", "Replaced tokens by depth", "AMOS Table 9", caption, html="".join(texts))


def _samples_of_run(run: ReportRun, named: bool) -> str:
    heading = f"<h3>{escape(printable(run.name))}</h3>" if named else ""
    return heading + "".join(map(_samples_of_text, run.inspections))


def _samples_of_text(inspection: Inspection) -> str:
    colours = depth_colours(len(inspection.depth_names))
    pieces = []
    for masked in inspection.masked:
        original = inspection.tokens[masked.position].original
        if masked.samples:
            pieces.append([
                sample.shown + " \u2713" * (sample.piece != original and (sample.positive_probability or 0) > 0.5)
                for sample in masked.samples
            ])  # fmt: skip
        else:
            pieces.append([predictions[0].piece for predictions in masked.predictions])
    note = (
        f"{len(inspection.masked)} of {len(inspection.tokens)} tokens {inspection.selected}, seed {inspection.seed}, after "
        f"{inspection.num_updates:,} updates; in brackets {depth_legend(inspection, colours)}."
    )
    return f"{annotated_text(inspection, pieces, colours)}<p class=note>{note}</p>"


def read_probing(folders: Sequence[str]) -> list[dict[str, Any]]:
    """Return the contents of ``results.json`` in outputs of ``amos probe``; a folder that is given twice counts once.

    Raises:
        UserError: a folder has no results, or damaged ones.
    """
    contents = []
    for folder in distinct_folders(folders):
        contents.append(read_results(folder))
        if not contents[-1]["results"]:
            raise UserError(f"{folder} holds no scores yet: wait for the first one of amos probe")
    return contents


def probing_parts(contents: Sequence[dict[str, Any]]) -> list[Part]:
    """Return one part for each output of ``amos probe``: the picture and the table of its scores.

    Args:
        contents: of :func:`read_probing`.
    """
    return [
        _probing_part(content, f"probing-{number + 1}" if number else "probing", len(contents) > 1)
        for number, content in enumerate(contents)
    ]


def _probing_part(content: dict[str, Any], anchor: str, named: bool) -> Part:
    results = in_order([Result(**result) for result in content["results"]])
    run, updates = Path(str(content["checkpoint"].get("file", ""))).parent.name, content["checkpoint"]["num_updates"]
    counts = {row_name(result.task, result.metric): f"{result.targets:,}" for result in results}
    seeds = seeds_in_words(len(scores) for cell in scores_by_cell(results).values() for scores in cell.values())
    caption = (
        f"Classifiers on the frozen states of one layer of {run} after {updates:,} updates. Table: 100 times the mean over "
        f"{seeds} of the micro-F1 (or of the score that the task's name gives), ± standard deviation where there are several. "
        f"Picture: mean and range over the seeds. Classifier: {content['settings'].get('classifier', UNKNOWN)}. "
        f"Scored targets: {', '.join(f'{name} {count}' for name, count in counts.items())}."
    )
    return Part(
        anchor, f"Edge probing by layer: {run}" if named else "Edge probing by layer", 'AMOS "Figure 4", Table 8', caption,
        probing_figure(results), [results_table(results, "", [])], notes=table_notes(results, content["settings"]),
    )  # fmt: skip


def recipe_part(runs: Sequence[ReportRun]) -> Part | None:
    tables, notes = [], []
    for run in runs:
        name = run.cfg and paper_recipe(run.cfg)
        if name is None:
            continue
        per_update = run.cost.tokens_per_update
        settings = compare_settings(run.cfg, name, per_update and per_update // run.cfg.task.tokens_per_sample)
        rows = [[setting.name, setting.own, setting.paper, setting.source] for setting in settings if setting.differs]
        tables.append(Table(run.name, ["setting", "this run", name, f"source of {name}"], rows))
        same = [f"{setting.name} {setting.own}" for setting in settings if setting.is_of_paper and not setting.differs]
        notes.append(f"{run.name}, as in the paper: {', '.join(same)}.")
    if not tables:
        return None
    caption = (
        "Settings in which a run differs from the recipe of its objective and width (base for other widths), with the source "
        'of the recipe\'s value; "ours" where the papers are silent. Differences of the method itself are listed in '
        "docs/departures.md."
    )
    return Part("recipe", "Recipe and departures from the paper", "AMOS Table 3", caption, tables=tables, notes=notes)
