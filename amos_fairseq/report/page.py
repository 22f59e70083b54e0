"""The HTML of the report: one file without scripts, fonts or images from elsewhere.

Everything that comes from runs, texts or result files is escaped.
"""

import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from amos_fairseq.files import write_text
from amos_fairseq.output.pictures import RC_PARAMS, save
from amos_fairseq.output.tables import Table
from amos_fairseq.report.inspection import printable
from amos_fairseq.report.inspection_views import SHARED_STYLE

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { font: 17px/1.6 Charter, "Bitstream Charter", "Source Serif 4", "Source Serif Pro", Cambria, Georgia, serif;
       color: #1c1c1c; background: #fff; max-width: 70rem; margin: 0 auto; padding: 3rem 1.5rem 5rem; }
h1 { font-size: 2.1rem; line-height: 1.2; font-weight: 600; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; line-height: 1.3; font-weight: 600; margin: 0 0 .4rem; }
h3 { font-size: 1.02rem; font-weight: 600; margin: 1.6rem 0 .4rem; }
p { margin: .4rem 0; } p.lead { font-size: 1.1rem; color: #444; max-width: 46rem; margin-bottom: 1.6rem; }
nav, table, figcaption, p.note, .source { font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
nav { font-size: .92rem; border-top: 2px solid #1c1c1c; border-bottom: 1px solid #ccc; padding: .9rem 0; margin-bottom: 1rem; }
nav ol { margin: 0; padding: 0; list-style: none; columns: 20rem 3; column-gap: 2.5rem; }
nav li { break-inside: avoid; padding: .12rem 0; }
nav a { color: inherit; text-decoration: none; border-bottom: 1px solid transparent; }
nav a:hover, nav a:focus { border-color: #0072b2; color: #0072b2; }
nav .source, h2 .source { color: #666; font-weight: 400; font-size: .85em; margin-left: .5em; white-space: nowrap; }
section { padding-top: 2rem; margin-top: 2rem; border-top: 1px solid #ddd; }
nav + section { border-top: 0; margin-top: 0; }
.text, p.note { max-width: 52rem; }
figure { margin: 1.2rem 0; }
figure.side { display: grid; grid-template-columns: minmax(0, max-content) minmax(14rem, 26rem); gap: 2.5rem;
              align-items: start; }
figure svg { display: block; max-width: 100%; height: auto; }
figcaption { margin-top: .6rem; max-width: 52rem; }
figcaption, p.note { font-size: .86rem; line-height: 1.5; color: #444; }
table { border-collapse: collapse; font-size: .88rem; line-height: 1.4; margin: .8rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 0 0 .4rem; }
thead th { text-align: left; font-weight: 600; border-top: 2px solid #1c1c1c; border-bottom: 1px solid #1c1c1c;
           padding: .35rem 1.1rem .35rem 0; vertical-align: bottom; }
tbody th { text-align: left; font-weight: 500; min-width: 8rem; }
tbody th, td { border-bottom: 1px solid #e2e2e2; padding: .3rem 1.1rem .3rem 0; vertical-align: top; }
thead th.number, td.number { text-align: right; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 2px solid #1c1c1c; }
td:not(.number) { min-width: 8.5rem; }
td:last-child, th:last-child { padding-right: .3rem; }
.missing { color: #555; } .missing li { margin: .3rem 0; }
ul { padding-left: 1.1rem; }
@media (max-width: 60rem) { figure.side { grid-template-columns: minmax(0, 1fr); gap: .6rem; } }
@media (max-width: 36rem) {
  body { font-size: 16px; padding: 1.5rem 1rem 3rem; } h1 { font-size: 1.6rem; }
  figure.wide svg { min-width: 44rem; }
  nav .source { display: none; }
}
@media print {
  @page { margin: 1.6cm; }
  body { font-size: 10pt; max-width: none; padding: 0; }
  section { padding-top: .8rem; margin-top: .8rem; }
  figure.side { grid-template-columns: minmax(0, 1fr); gap: .4rem; }
  figure, table tr, .text { break-inside: avoid; } h2, h3, caption { break-after: avoid; }
  figure svg { max-width: 15cm; max-height: 7.2cm; width: auto; min-width: 0; }
  thead th.number { white-space: normal; } tbody th { white-space: nowrap; }
  .text { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""
PIXELS_PER_POINT = 1.4  # of figures on the screen: their text is as large as the captions
SIDE_POINTS = 500  # figures that are narrower have the caption at their side
FIGURE_FILE = re.compile(
    r"(score_by_cost|loss_by_depth|generator_loss|mixture|recall|discriminator|probing(_\d+)?)\.(png|svg)"
)


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        anchor: target of links, also the name of the figure's files.
        source: what it corresponds to in a paper.
        caption: plain text.
        figure: drawn by matplotlib; None without one.
        html: trusted HTML below the tables.
        notes: plain text, one paragraph each, after the tables.
    """

    anchor: str
    title: str
    source: str
    caption: str
    figure: Figure | None = None
    tables: list[Table] = field(default_factory=list)
    html: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Page:
    """The whole page. ``missing`` has one line for each section that is left out."""

    title: str
    lead: str
    sections: list[Section]
    missing: list[str]


@matplotlib.rc_context(RC_PARAMS)
def write_page(out: Path, page: Page) -> list[str]:
    """Write a page and its figures as PNG and SVG to a folder beside it, ``report_figures`` for ``report.html``.

    Figures of an older page that this one does not have are removed.

    Returns:
        The paths that were written.

    Raises:
        OSError: a file cannot be written.
    """
    folder = out.with_name(f"{out.stem}_figures")
    figures = {section.anchor: section.figure for section in page.sections if section.figure is not None}
    if figures:
        folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir() if folder.is_dir() else ():
        if FIGURE_FILE.fullmatch(file.name):
            file.unlink()
    paths = {anchor: save(figure, folder, anchor.replace("-", "_")) for anchor, figure in figures.items()}
    svgs = {anchor: Path(svg).read_text(encoding="utf-8") for anchor, (_, svg) in paths.items()}
    write_text(out, render_page(page, svgs))
    return [str(out), *(path for own in paths.values() for path in own)]


def render_page(page: Page, svgs: dict[str, str]) -> str:
    """Return the HTML. ``svgs``: the figures of the sections by anchor, as matplotlib writes them."""
    entries = [(section.anchor, section.title, section.source) for section in page.sections]
    left_out = ""
    if page.missing:
        entries.append(("left-out", "Left out", ""))
        lines = "".join(f"<li>{_show(line)}</li>" for line in page.missing)
        left_out = f'<section id="left-out" class="missing"><h2>Left out</h2><ul>{lines}</ul></section>'
    links = "".join(
        f'<li><a href="#{anchor}">{escape(name)}</a>{_source(source)}</li>' for anchor, name, source in entries
    )
    title = _show(page.title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}{SHARED_STYLE}</style></head>\n<body>"
        f'<header><h1>{title}</h1><p class="lead">{_show(page.lead)}</p></header>\n'
        f'<nav aria-label="Contents"><ol>{links}</ol></nav>\n'
        + "\n".join(_render_section(section, svgs.get(section.anchor, "")) for section in page.sections)
        + f"{left_out}\n</body></html>\n"
    )


def _source(source: str) -> str:
    return f'<span class="source">{escape(source)}</span>' if source else ""


def _render_section(section: Section, svg: str) -> str:
    caption = _show(section.caption)
    body = [f"<h2>{escape(section.title)}{_source(section.source)}</h2>"]
    if svg:
        image = inline_svg(svg, section.anchor, section.title)
        kind = "side" if svg_width(svg) < SIDE_POINTS else "wide"
        body.append(
            f'<figure class="{kind}"><div class="scroll">{image}</div><figcaption>{caption}</figcaption></figure>'
        )
    else:
        body.append(f'<p class="note">{caption}</p>')
    body += [f'<div class="scroll">{render_table(table)}</div>' for table in section.tables]
    body.append(section.html)
    body += [f'<p class="note">{_show(note)}</p>' for note in section.notes]
    return f'<section id="{section.anchor}">{"".join(body)}</section>'


def inline_svg(svg: str, prefix: str, label: str) -> str:
    """Return matplotlib's SVG for use inside HTML: without its own header and metadata, and with unique ids."""
    width = svg_width(svg)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    # The viewBox has the proportions.
    opening = re.sub(r'\s(width|height)="[^"]*"', "", svg[: svg.index(">")])
    return f'{opening} width="{round(PIXELS_PER_POINT * width)}" role="img" aria-label="{escape(label)}"{svg[svg.index(">") :]}'


def svg_width(svg: str) -> float:
    """Return the width of a figure of matplotlib in points."""
    return float(re.search(r'<svg[^>]*\swidth="([\d.]+)pt"', svg)[1])


def render_table(table: Table) -> str:
    """Render a table; columns of numbers are aligned at the right."""
    is_number = [False, *(all(_is_number(row[i]) for row in table.rows) for i in range(1, len(table.columns)))]
    kinds = [' class="number"' * numbers for numbers in is_number]
    head = "".join(f'<th scope="col"{kind}>{_show(name)}</th>' for name, kind in zip(table.columns, kinds, strict=True))
    rows = "".join(
        f'<tr><th scope="row">{_show(row[0])}</th>'
        + "".join(f"<td{kind}>{_show(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    caption = f"<caption>{_show(table.title)}</caption>" if table.title else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _is_number(cell: str) -> bool:
    return bool(re.match(r"-$|[-+<>]?\s?\d", cell))


def _show(text: str) -> str:
    return escape(printable(text))
