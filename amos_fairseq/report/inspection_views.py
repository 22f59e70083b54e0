"""An inspection in the terminal and as one HTML page: both draw the same values and the same table.

The page has no scripts, fonts or images from elsewhere. Nothing depends on color alone: probabilities are numbers, masked
tokens are underlined or in brackets, and verdicts are words. In the page, what comes from the text or the vocabulary is
escaped. The page has its own rendering: rich exports preformatted text, which neither wraps nor shows the values of the token
that the mouse points at.
"""

from html import escape

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from amos_fairseq.output.pictures import depth_colours
from amos_fairseq.report.inspection import CellLine, Inspection, Token, percent, printable, probability_colour

VERDICT_STYLES = {"detected": "bold", "missed": "italic", "false alarm": "italic", "trusted": ""}
# Rules for texts and for what may be wider than the screen, which the report has too; the others are of this page alone.
# In .scroll, a shadow at an edge says that there is more to see: the white gradients move with the content and cover the
# shadows at its ends. What is drawn in white itself, such as a figure, must let them through.
SHARED_STYLE = """
.scroll { overflow-x: auto; background:
            linear-gradient(to right, #fff 40%, #fff0) left / 3rem 100% local,
            linear-gradient(to left, #fff 40%, #fff0) right / 3rem 100% local,
            linear-gradient(to right, #0004, #0000) left / .8rem 100% scroll,
            linear-gradient(to left, #0004, #0000) right / .8rem 100% scroll;
          background-repeat: no-repeat; }
.scroll svg { mix-blend-mode: multiply; }
@media print { .scroll { overflow: visible; background: none; } }
.text { background: #fafafa; border: 1px solid #ddd; border-radius: 6px; padding: .9rem 1.1rem; line-height: 2.1;
        white-space: pre-wrap; overflow-wrap: anywhere; }
.masked { text-decoration: underline 2px; text-underline-offset: 4px; font-weight: 600; }
.depths { font-size: .9em; } .depths b { font-weight: 600; border-bottom: 3px solid; padding: 0 1px; }
.special { color: #777; font-size: .72em; border: 1px solid #ccc; border-radius: 3px; padding: 1px 3px; margin: 0 2px; }
"""
PAGE_STYLE = """
body { font: 16px/1.6 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; color: #1b1b1b; background: #fff;
       margin: 1.5rem 2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.12rem; margin: 2.2rem 0 .3rem; }
p.note { color: #555; margin: .2rem 0 .8rem; font-size: .92rem; overflow-wrap: anywhere; }
.token { border-radius: 3px; padding: 2px 0; } .flagged { outline: 1.5px dashed #7a4a00; }
.replaced { font-size: .72em; color: #555; vertical-align: super; margin: 0 2px; }
table { border-collapse: collapse; font-size: .92rem; }
th.number { text-align: right; }
th { text-align: left; border-bottom: 2px solid #444; padding: .3rem .9rem; vertical-align: bottom; }
td { border-bottom: 1px solid #ddd; padding: .45rem .9rem; vertical-align: top; }
code, .piece { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.weight { color: #555; font-size: .85em; margin-bottom: .2rem; }
.bar { display: inline-block; height: .5em; border-radius: 1px; vertical-align: middle; }
.prediction { white-space: nowrap; } .prediction .p { font-variant-numeric: tabular-nums; color: #333; margin-right: .4em; }
.original .piece { font-weight: 700; text-decoration: underline; } .bold { font-weight: 700; }
.scale span { display: inline-block; padding: 0 .55em; border: 1px solid #ddd; font-size: .82rem; }
@media (max-width: 36rem) { body { margin: 1rem; } th, td { padding-left: .4rem; padding-right: .4rem; } }
"""


def print_inspection(inspection: Inspection) -> None:
    """Print the table of masked tokens, the text with its probabilities, and the summary."""
    console = Console(highlight=False, soft_wrap=False)
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, title=f"Tokens {inspection.selected}", title_justify="left")
    rows = [inspection.row(masked) for masked in inspection.masked]
    headings = {"position": "#", f"P({inspection.positive_class})": f"{inspection.positive_class}?"}
    for column in rows[0]:
        justify = "right" if column in ("position", "log p") else "left"
        table.add_column(headings.get(column, column), justify=justify, no_wrap=column not in (*headings, "log p"))
    for row in rows:
        table.add_row(*(Text("\n").join(map(_terminal_line, cell)) for cell in row.values()))
    console.print(table)
    if inspection.positive_class or inspection.has_log_probs:
        console.print(Text(_text_heading(inspection), style="bold"))
        console.print(_terminal_text(inspection.tokens))
        console.print()
    for line in inspection.summary():
        console.print(Text(line))


def _terminal_line(line: CellLine) -> Text:
    """A probability and its piece, where a star marks the original; or a text alone."""
    text, words = printable(line.text), line.style.split()
    style = " ".join(word for word in words if word in ("bold", "italic"))
    if "verdict" in words:
        # Appended to, because a style of the whole text would fill the cell.
        cell = Text().append(f" {percent(line.probability)} ", style=_terminal_background(line.probability))
        return cell.append(f"\n{text}", style=VERDICT_STYLES[text])
    if "weight" in words:
        return Text(f"{text} {percent(line.probability)}", style="dim")
    if line.probability is None:
        return Text(text, style=style)
    return Text(f"{percent(line.probability):>7}{'*' if 'original' in words else ' '}{text}", style=style)


def _text_heading(inspection: Inspection) -> str:
    """The explanation of :func:`_terminal_text`."""
    if not inspection.positive_class:
        return f"The text, with log p(token | the rest) in nats after each token; [] was {inspection.selected}."
    name = "replacement" if inspection.positive_class == "replaced" else inspection.positive_class
    return (
        f"Input of the discriminator, with its probability of {name} in percent after each token; [original>input] was "
        f"{inspection.selected}."
    )


def _terminal_text(tokens: list[Token]) -> Text:
    """The text in order; the more probable the positive class, the more orange the background."""
    text = Text()
    for token in tokens:
        piece = printable(token.input)
        if token.masked:
            detected = token.positive_probability is not None
            piece = f"[{printable(token.original)}>{piece}]" if detected else f"[{piece}]"
        text.append(piece, style=_terminal_background(token.positive_probability) + Style(bold=token.masked))
        if token.positive_probability is not None:
            text.append(f"{100 * token.positive_probability:.0f} ", style="dim")
        else:
            text.append(" " if token.log_prob is None else f" {token.log_prob:.1f} ", style="dim")
    return text


def _terminal_background(probability: float | None) -> Style:
    return Style() if probability is None else Style(color="#000000", bgcolor=probability_colour(probability))


def render_inspection(inspection: Inspection) -> str:
    """Return the whole page."""
    sections = [f"<p class=note>{escape(line)}</p>" for line in inspection.summary()]
    sections.append(_predictions_section(inspection))
    if inspection.positive_class or inspection.has_log_probs:
        sections.append(_input_section(inspection))
    sections.append(_table_section(inspection))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width"><title>amos inspect</title>'
        f"<style>{PAGE_STYLE}{SHARED_STYLE}</style></head>\n<body><h1>One text, seen by {_networks(inspection)}</h1>"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _networks(inspection: Inspection) -> str:
    if inspection.positive_class:
        return "generator and discriminator"
    return "generator and main network" if inspection.is_corrupted else "a cloze model"


def _predictions_section(inspection: Inspection) -> str:
    """The text, with the best prediction of each depth after each masked token."""
    best = [[predictions[0].piece for predictions in masked.predictions] for masked in inspection.masked]
    return (
        "<h2>The text, and the best prediction of each depth</h2><p class=note>"
        f"Underlined tokens were {inspection.selected}. In brackets: the most probable token by depth, "
        f"{depth_legend(inspection)}.</p>{annotated_text(inspection, best)}"
    )


def depth_legend(inspection: Inspection) -> str:
    """The names of the depths as :func:`annotated_text` shows their tokens."""
    return _in_brackets([f"depth {name}" for name in inspection.depth_names])


def annotated_text(inspection: Inspection, pieces: list[list[str]]) -> str:
    """The text with one piece per depth after each masked token, as in Table 9 of the AMOS paper.

    Args:
        pieces: [M][K], for the masked tokens in their order.
    """
    pieces_at = {masked.position: own for masked, own in zip(inspection.masked, pieces, strict=True)}
    parts = []
    for position, token in enumerate(inspection.tokens):
        if token.special:
            parts.append(_special_token(token, inspection))
        elif position in pieces_at:
            parts.append(f"{_marked(token.original_text, 'masked')} {_in_brackets(pieces_at[position])}")
        else:
            parts.append(escape(token.original_text))
    return f'<div class="text">{"".join(parts)}</div>'


def _in_brackets(names: list[str]) -> str:
    """One name per depth, underlined in the color of the depth."""
    pairs = zip(names, depth_colours(len(names)), strict=True)
    marked = (f'<b style="border-color:{colour}">{_show(name)}</b>' for name, colour in pairs)
    return f'<span class="depths">({"/".join(marked)})</span>'


def _input_section(inspection: Inspection) -> str:
    """The main network's input, on a background that shows the probability of the positive class."""
    parts = [(_special_token if token.special else _input_token)(token, inspection) for token in inspection.tokens]
    heading, note = "Log-probability of every token", f"Underlined tokens were {inspection.selected}."
    if inspection.positive_class:
        heading = "Input of the discriminator, and its predictions"
        steps = [(f"{25 * step} %", probability_colour(step / 4)) for step in range(5)]
        scale = "".join(f'<span style="background:{colour}">{name}</span>' for name, colour in steps)
        note = (
            f'Background: the probability of "{inspection.positive_class}", <span class="scale">{scale}</span>; dashed frame: '
            f"above 50 %. {note} The original is raised after the token where the sample differs."
        )
    log_probs = " log p(token | the rest) is in nats." if inspection.has_log_probs else ""
    note += f" Point at a token to see its values.{log_probs}"
    return f'<h2>{heading}</h2><p class=note>{note}</p><div class="text">{"".join(parts)}</div>'


def _input_token(token: Token, inspection: Inspection) -> str:
    classes = "token" + " masked" * token.masked + " flagged" * token.flagged
    original = token.original_text.strip() or token.original
    replaced = f'<span class="replaced">{escape(original)}</span>' if token.replaced else ""
    return _marked(token.input_text, classes, _attributes(token, inspection)) + replaced


def _special_token(token: Token, inspection: Inspection) -> str:
    line_end = "\n" if token.original == "</s>" else ""
    return f'<span class="special"{_attributes(token, inspection)}>{_show(token.original)}</span>{line_end}'


def _attributes(token: Token, inspection: Inspection) -> str:
    """The background of a token, and the values that pointing at it shows."""
    is_sampled = token.masked and inspection.is_corrupted
    facts = [printable(f"original {token.original}, sampled {token.input}" if is_sampled else token.original)]
    if token.positive_probability is not None:
        facts.append(f"P({inspection.positive_class}) {percent(token.positive_probability)}: {token.verdict}")
    if token.log_prob is not None:
        facts.append(f"log p {token.log_prob:.2f}")
    style = f' style="{_background(token.positive_probability)}"' if token.positive_probability is not None else ""
    return f'{style} title="{escape("; ".join(facts))}"'


def _background(probability: float) -> str:
    return f"background:{probability_colour(probability)}"


def _marked(text: str, classes: str, attributes: str = "") -> str:
    """A part of the text in a span; the space before a word stays outside."""
    body = text.lstrip(" ")
    return f'{text[: len(text) - len(body)]}<span class="{classes}"{attributes}>{escape(body)}</span>'


def _table_section(inspection: Inspection) -> str:
    """One row per masked token with all values."""
    rows = [inspection.row(masked) for masked in inspection.masked]
    colours = zip(inspection.depth_names, depth_colours(len(inspection.depth_names)), strict=True)
    colour_of = {f"depth {name}": colour for name, colour in colours}
    heads = ""
    for column in rows[0]:
        border = f' style="border-bottom-color:{colour_of[column]}"' if column in colour_of else ""
        heads += f"<th{border}{' class=number' * _is_number(column)}>{escape(column)}</th>"
        heads += "<th>discriminator</th>" * column.startswith("P(")
    body = ""
    for row in rows:
        cells = (_table_cell(column, lines, colour_of.get(column, "#999")) for column, lines in row.items())
        body += f"<tr>{''.join(cells)}</tr>"
    return (
        f"<h2>Every token {inspection.selected}</h2><p class=note>{_table_note(inspection)}</p><div class=scroll><table>"
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _is_number(column: str) -> bool:
    return column in ("position", "log p") or column.startswith("P(")


def _table_note(inspection: Inspection) -> str:
    sentences = [
        "Predictions of each depth with their probabilities; the original is underlined, and comes last where it is not among "
        "the most probable. Special tokens are excluded, but have their share of the probability."
    ]
    if inspection.has_mixture:
        sentences.append("The weight is that of the depth in the mixture from which the replacement is sampled.")
    if inspection.has_candidates:
        sentences.append("Selection: the discriminator's probabilities of the original and its negatives.")
    sentences.append("Tokens are spelled as in the vocabulary (SentencePiece writes a space as \u2581).")
    return " ".join(sentences)


def _table_cell(column: str, lines: list[CellLine], colour: str) -> str:
    if column.startswith("P("):
        (line,) = lines
        probability = f'<td class=number style="{_background(line.probability)}">{percent(line.probability)}</td>'
        return f"{probability}<td>{line.text}</td>"
    return f"<td{' class=number' * _is_number(column)}>{''.join(_table_line(line, colour) for line in lines)}</td>"


def _table_line(line: CellLine, colour: str) -> str:
    """A probability, its piece and a bar, where the original is underlined; or a text alone."""
    words = line.style.split()
    if line.probability is None:
        return f'<div class="{line.style}">{_show(line.text)}</div>'
    if "weight" in words:
        return f'<div class="weight">{line.text} {percent(line.probability)} {_bar(line.probability, "#999")}</div>'
    piece = f'<span class="piece">{_show(line.text)}</span>{" (chosen)" * ("chosen" in words)}'
    return (
        f'<div class="prediction{" original" * ("original" in words)}"><span class="p">{percent(line.probability)}</span>'
        f"{piece} {_bar(line.probability, colour)}</div>"
    )


def _bar(share: float, colour: str) -> str:
    return f'<span class="bar" style="width:{4 * share:.2f}em;background:{colour}"></span>'


def _show(piece: str) -> str:
    return escape(printable(piece))
