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

from amos_fairseq.pictures import depth_colours
from amos_fairseq.report.inspection import (
    Column,
    Entry,
    Inspection,
    MaskedToken,
    Token,
    percent,
    printable,
    probability_colour,
)

VERDICT_STYLES = {"detected": "bold", "missed": "italic", "false alarm": "italic", "trusted": ""}
# Rules for texts, which the report shows too; the others are of this page alone.
TEXT_STYLE = """
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
p.note { color: #555; margin: .2rem 0 .8rem; font-size: .92rem; }
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
.original .piece { font-weight: 700; text-decoration: underline; }
.scale span { display: inline-block; padding: 0 .55em; border: 1px solid #ddd; font-size: .82rem; }
"""


def print_inspection(inspection: Inspection) -> None:
    """Print the table of masked tokens, the text with its probabilities, and the summary."""
    console = Console(highlight=False, soft_wrap=False)
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, title=f"Tokens {inspection.selected}", title_justify="left")
    headings = {"position": "#", "detection": f"{inspection.positive_class}?"}
    for kind, heading, _ in inspection.columns():
        justify = "right" if kind in ("position", "log p") else "left"
        table.add_column(headings.get(kind, heading), justify=justify, no_wrap=kind not in (*headings, "log p"))
    for masked in inspection.masked:
        table.add_row(*(_terminal_cell(inspection, masked, column) for column in inspection.columns()))
    console.print(table)
    if inspection.positive_class or inspection.has_log_probs:
        console.print(Text(_text_heading(inspection), style="bold"))
        console.print(_terminal_text(inspection.tokens))
        console.print()
    for line in inspection.summary():
        console.print(Text(line))


def _terminal_cell(inspection: Inspection, masked: MaskedToken, column: Column) -> Text:
    token = inspection.tokens[masked.position]
    match column.kind:
        case "position":
            return Text(str(masked.position))
        case "original":
            return Text(printable(token.original), style="bold")
        case "depth":
            share = masked.mixture_weights[column.depth]
            weight = [Text(f"weight {percent(share)}", style="dim")] if inspection.has_mixture else []
            entries = inspection.depth_entries(masked, column.depth)
            return Text("\n").join([*weight, *(_terminal_line(entry, bold=entry.is_original) for entry in entries)])
        case "selection":
            return Text("\n").join(_terminal_line(one, bold=one.is_chosen) for one in masked.candidate_entries())
        case "sampled":
            return Text(printable(token.input))
        case "main network":
            return Text("\n".join(masked.discriminator_lines()))
        case "detection":
            cell = Text()  # appended to, because a style of the whole text would fill the cell
            cell.append(f" {percent(token.positive_probability)} ", style=_terminal_background(token))
            return cell.append(f"\n{token.verdict}", style=VERDICT_STYLES[token.verdict])
    return Text(f"{token.log_prob:.2f}")


def _terminal_line(entry: Entry, bold: bool) -> Text:
    """A probability and its piece; a star marks the original."""
    line = f"{percent(entry.probability):>7}{'*' if entry.is_original else ' '}{printable(entry.piece)}"
    return Text(line, style="italic" if entry.is_extra else "bold" if bold else "")


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
        text.append(piece, style=_terminal_background(token) + Style(bold=token.masked))
        if token.positive_probability is not None:
            text.append(f"{100 * token.positive_probability:.0f} ", style="dim")
        else:
            text.append(" " if token.log_prob is None else f" {token.log_prob:.1f} ", style="dim")
    return text


def _terminal_background(token: Token) -> Style:
    if token.positive_probability is None:
        return Style()
    return Style(color="#000000", bgcolor=probability_colour(token.positive_probability))


def render_inspection(inspection: Inspection) -> str:
    """Return the whole page."""
    colours = depth_colours(len(inspection.depth_names))
    sections = [f"<p class=note>{escape(line)}</p>" for line in inspection.summary()]
    sections.append(_predictions_section(inspection, colours))
    if inspection.positive_class or inspection.has_log_probs:
        sections.append(_input_section(inspection))
    sections.append(_table_section(inspection, colours))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width"><title>amos inspect</title>'
        f"<style>{PAGE_STYLE}{TEXT_STYLE}</style></head>\n<body><h1>One text, seen by {_networks(inspection)}</h1>"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _networks(inspection: Inspection) -> str:
    if inspection.positive_class:
        return "generator and discriminator"
    return "generator and main network" if inspection.is_corrupted else "a cloze model"


def _predictions_section(inspection: Inspection, colours: list[str]) -> str:
    """The text, with the best prediction of each depth after each masked token."""
    best = [[predictions[0].piece for predictions in masked.predictions] for masked in inspection.masked]
    return (
        "<h2>The text, and the best prediction of each depth</h2><p class=note>"
        f"Underlined tokens were {inspection.selected}. In brackets: the most probable token by depth, "
        f"{depth_legend(inspection, colours)}.</p>{annotated_text(inspection, best, colours)}"
    )


def depth_legend(inspection: Inspection, colours: list[str]) -> str:
    """The names of the depths as :func:`annotated_text` shows their tokens."""
    return _in_brackets([f"depth {name}" for name in inspection.depth_names], colours)


def annotated_text(inspection: Inspection, pieces: list[list[str]], colours: list[str]) -> str:
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
            parts.append(f"{_marked(token.original_text, 'masked')} {_in_brackets(pieces_at[position], colours)}")
        else:
            parts.append(escape(token.original_text))
    return f'<div class="text">{"".join(parts)}</div>'


def _in_brackets(names: list[str], colours: list[str]) -> str:
    """One name per depth, underlined in the color of the depth."""
    marked = (
        f'<b style="border-color:{colour}">{_show(name)}</b>' for name, colour in zip(names, colours, strict=True)
    )
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
    style = f' style="{_background(token)}"' if token.positive_probability is not None else ""
    return f'{style} title="{escape("; ".join(facts))}"'


def _background(token: Token) -> str:
    return f"background:{probability_colour(token.positive_probability)}"


def _marked(text: str, classes: str, attributes: str = "") -> str:
    """A part of the text in a span; the space before a word stays outside."""
    body = text.lstrip(" ")
    return f'{text[: len(text) - len(body)]}<span class="{classes}"{attributes}>{escape(body)}</span>'


def _table_section(inspection: Inspection, colours: list[str]) -> str:
    """One row per masked token with all values."""
    columns = inspection.columns()
    heads = "".join(_table_head(column, colours) for column in columns)
    rows = "".join(
        f"<tr>{''.join(_table_cell(inspection, masked, column, colours) for column in columns)}</tr>"
        for masked in inspection.masked
    )
    return (
        f"<h2>Every token {inspection.selected}</h2><p class=note>{_table_note(inspection)}</p><table><thead><tr>"
        f"{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _table_head(column: Column, colours: list[str]) -> str:
    if column.kind == "depth":
        return f'<th style="border-bottom-color:{colours[column.depth]}">{escape(column.heading)}</th>'
    is_number = column.kind in ("position", "detection", "log p")
    head = f"<th{' class=number' * is_number}>{column.heading}</th>"
    return head + "<th>discriminator</th>" * (column.kind == "detection")


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


def _table_cell(inspection: Inspection, masked: MaskedToken, column: Column, colours: list[str]) -> str:
    token = inspection.tokens[masked.position]
    match column.kind:
        case "position":
            return f"<td class=number>{masked.position}</td>"
        case "original":
            return f"<td><b class=piece>{_show(token.original)}</b></td>"
        case "depth":
            share, colour = masked.mixture_weights[column.depth], colours[column.depth]
            weight = f'<div class="weight">weight {percent(share)} {_bar(share, "#999")}</div>' * inspection.has_mixture
            entries = inspection.depth_entries(masked, column.depth)
            return f"<td>{weight}{''.join(_entry(one, colour) for one in entries)}</td>"
        case "selection":
            return f"<td>{''.join(_entry(one, '#999') for one in masked.candidate_entries())}</td>"
        case "sampled":
            return f"<td class=piece>{_show(token.input)}</td>"
        case "main network":
            return f"<td>{'<br>'.join(map(escape, masked.discriminator_lines()))}</td>"
        case "detection":
            probability = f'<td class=number style="{_background(token)}">{percent(token.positive_probability)}</td>'
            return f"{probability}<td>{token.verdict}</td>"
    return f"<td class=number>{token.log_prob:.2f}</td>"


def _entry(entry: Entry, colour: str) -> str:
    """A probability, its piece and a bar; the original is underlined."""
    piece = f'<span class="piece">{_show(entry.piece)}</span>{" (chosen)" * entry.is_chosen}'
    return (
        f'<div class="prediction{" original" * entry.is_original}"><span class="p">{percent(entry.probability)}</span>'
        f"{piece} {_bar(entry.probability, colour)}</div>"
    )


def _bar(share: float, colour: str) -> str:
    return f'<span class="bar" style="width:{4 * share:.2f}em;background:{colour}"></span>'


def _show(piece: str) -> str:
    return escape(printable(piece))
