"""An inspection in the terminal, and the HTML pages: one file without scripts, fonts or images from elsewhere.

Nothing depends on color alone: probabilities are numbers, masked tokens are underlined or in brackets, and verdicts are
words.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from amos_fairseq.errors import printable
from amos_fairseq.output.pictures import depth_colours
from amos_fairseq.report.inspection import CellLine, Inspection, percent


def render(template: str, **values: Any) -> str:
    """Fill one of ``templates/``. What comes from runs, texts, vocabularies and result files is escaped there."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "probability_colour": probability_colour}
    return environment.get_template(template).render(depth_colours=depth_colours, **values)


def render_inspection(inspection: Inspection) -> str:
    networks = "generator and main network" if inspection.is_corrupted else "a cloze model"
    return render(
        "inspect.html",
        inspection=inspection,
        networks="generator and discriminator" if inspection.positive_class else networks,
        rows=[inspection.row(masked) for masked in inspection.masked],
    )


def print_inspection(inspection: Inspection) -> None:
    console = Console(highlight=False, soft_wrap=False)
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, title=f"Tokens {inspection.selected}", title_justify="left")
    rows = [inspection.row(masked) for masked in inspection.masked]
    for column in rows[0]:
        is_number = column in ("#", "log p")
        no_wrap = not (is_number or column.startswith("P("))  # a narrow terminal cuts pieces off
        table.add_column(column, justify="right" if is_number else "left", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*(Text("\n").join(map(_terminal_line, cell)) for cell in row.values()))
    console.print(table)
    if inspection.positive_class or inspection.has_log_probs:
        console.print(_terminal_text(inspection))
        console.print()
    for line in inspection.summary():
        console.print(Text(line))


def _terminal_line(line: CellLine) -> Text:
    """A probability and its piece, where a star marks the original; or a text alone."""
    star, style = ("*", "bold") if line.is_original else (" ", "")
    probability = "" if line.probability is None else f"{percent(line.probability):>7}{star}"
    return Text(probability + printable(line.text), style=style)


def _terminal_text(inspection: Inspection) -> Text:
    """The text in order; the more probable the positive class, the more orange the background."""
    if inspection.positive_class:
        name = "replacement" if inspection.positive_class == "replaced" else inspection.positive_class
        heading = f"Input of the discriminator, its probability of {name} in percent after each token; [original>input]"
    else:
        heading = "The text, with log p(token | the rest) in nats after each token; []"
    text = Text().append(f"{heading} was {inspection.selected}.\n", style="bold")
    for token in inspection.tokens:
        piece, probability, log_prob = printable(token.input), token.positive_probability, token.log_prob
        if token.masked:
            piece = f"[{piece}]" if probability is None else f"[{printable(token.original)}>{piece}]"
        colour = None if probability is None else probability_colour(probability)
        text.append(piece, style=Style(bold=token.masked, bgcolor=colour, color=colour and "#000000"))
        value = f" {log_prob:.1f}" if log_prob is not None else ""
        text.append(f"{value if probability is None else f'{100 * probability:.0f}'} ", style="dim")
    return text


def probability_colour(probability: float) -> str:
    """Return a color "#rrggbb" from white at 0 to orange at 1: the background of a token by its probability of the positive
    class. Black text is readable on all of them."""
    white, orange = (255, 255, 255), (230, 159, 0)
    mixed = (round(w + (o - w) * probability) for w, o in zip(white, orange, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)
