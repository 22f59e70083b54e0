"""Write the report: the figures as files of their own, then the page."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from amos_fairseq.files import write_text
from amos_fairseq.plotting.style import RC_PARAMS, save
from amos_fairseq.report.page import render_page
from amos_fairseq.report.results import BenchmarkResults
from amos_fairseq.report.runs import ReportRun
from amos_fairseq.report.sections import build_report, probing_parts

FIGURE_FILE = re.compile(
    r"(score_by_cost|loss_by_depth|generator_loss|mixture|recall|discriminator|probing(_\d+)?)\.(png|svg)"
)


def write_report(
    out: Path,
    runs: Sequence[ReportRun],
    text_name: str,
    glue: Sequence[BenchmarkResults] = (),
    tag: Sequence[BenchmarkResults] = (),
    probe: Sequence[dict[str, Any]] = (),
) -> tuple[list[str], list[str]]:
    """Write the page ``out`` and its figures as PNG and SVG to a folder beside it, ``report_figures`` for ``report.html``.

    Figures of an older page that this one does not have are removed.

    Args:
        text_name: what the held-out text is called in captions.
        probe: results of :func:`amos_fairseq.report.sections.read_probing`.

    Returns:
        The paths that were written, and one line for each part that is left out.

    Raises:
        OSError: a file cannot be written.
    """
    with matplotlib.rc_context(RC_PARAMS):
        report = build_report(runs, text_name, glue, tag, probing_parts(probe))
        folder = out.with_name(f"{out.stem}_figures")
        figures = {part.anchor: part.figure for part in report.parts if part.figure is not None}
        if figures:
            folder.mkdir(parents=True, exist_ok=True)
        remove_old_figures(folder)
        paths = {anchor: save(figure, folder, anchor.replace("-", "_")) for anchor, figure in figures.items()}
    svgs = {anchor: Path(svg).read_text(encoding="utf-8") for anchor, (_, svg) in paths.items()}
    write_text(out, render_page(*title_and_lead(runs), report.parts, svgs, report.missing))
    return [str(out), *(path for own in paths.values() for path in own)], report.missing


def remove_old_figures(folder: Path) -> None:
    for file in folder.iterdir() if folder.is_dir() else ():
        if FIGURE_FILE.fullmatch(file.name):
            file.unlink()


def title_and_lead(runs: Sequence[ReportRun]) -> tuple[str, str]:
    """Return the heading of the page, and the line below it."""
    names = ", ".join(run.name for run in runs)
    described = [" ".join(filter(None, [run.objective.upper(), run.setup and f"({run.setup})"])) for run in runs]
    updates = ", ".join(f"{run.cost.num_updates:,}" for run in runs)
    objectives = "; ".join(filter(None, dict.fromkeys(described)))
    return f"Pretraining of {names}", " ".join(filter(None, [objectives and f"{objectives}.", f"Updates: {updates}."]))
