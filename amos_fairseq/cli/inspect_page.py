"""An inspection as one HTML page that needs nothing else: no script, no font, no picture from elsewhere.

Meaning is never carried by colour alone: probabilities stand as numbers, masked tokens are underlined, and verdicts are
words. Everything that comes from the text or the vocabulary is escaped.
"""

from html import escape

from amos_fairseq.cli.colours import depth_colours, suspicion_colour
from amos_fairseq.cli.inspection import Inspection, MaskedToken, Token, printable

STYLE = """
body { font: 16px/1.6 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; color: #1b1b1b; background: #fff;
       max-width: 68rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.12rem; margin: 2.2rem 0 .3rem; }
p.note { color: #555; margin: .2rem 0 .8rem; font-size: .92rem; }
.text { background: #fafafa; border: 1px solid #ddd; border-radius: 6px; padding: .9rem 1.1rem; line-height: 2.1;
        white-space: pre-wrap; overflow-wrap: anywhere; }
.masked { text-decoration: underline 2px; text-underline-offset: 4px; font-weight: 600; }
.alternatives { font-size: .9em; } .alternatives b { font-weight: 600; border-bottom: 3px solid; padding: 0 1px; }
.token { border-radius: 3px; padding: 2px 0; } .accused { outline: 1.5px dashed #7a4a00; }
.was { font-size: .72em; color: #555; vertical-align: super; margin: 0 2px; }
.special { color: #777; font-size: .72em; border: 1px solid #ccc; border-radius: 3px; padding: 1px 3px; margin: 0 2px; }
table { border-collapse: collapse; font-size: .92rem; }
th.number { text-align: right; }
th { text-align: left; border-bottom: 2px solid #444; padding: .3rem .9rem; vertical-align: bottom; }
td { border-bottom: 1px solid #ddd; padding: .45rem .9rem; vertical-align: top; }
code, .piece { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.weight { color: #555; font-size: .85em; margin-bottom: .2rem; }
.bar { display: inline-block; height: .5em; border-radius: 1px; vertical-align: middle; }
.proposal { white-space: nowrap; } .proposal .p { font-variant-numeric: tabular-nums; color: #333; margin-right: .4em; }
.original .piece { font-weight: 700; text-decoration: underline; }
.scale span { display: inline-block; padding: 0 .55em; border: 1px solid #ddd; font-size: .82rem; }
"""


def render_page(inspection: Inspection) -> str:
    """The whole page."""
    colours = depth_colours(len(inspection.depth_names))
    summary = "".join(f"<p class=note>{escape(line)}</p>" for line in inspection.summary())
    sections = (alternatives_section, judgement_section, table_section)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width"><title>amos inspect</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>One text, seen by generator and discriminator</h1>{summary}\n"
        + "\n".join(section(inspection, colours) for section in sections)
        + "\n</body></html>\n"
    )


def alternatives_section(inspection: Inspection, colours: list[str]) -> str:
    """The original with each depth's best guess behind a masked token, as in Table 9 of the paper."""
    names = "/".join(
        f'<b style="border-color:{colour}">depth {escape(name)}</b>'
        for name, colour in zip(inspection.depth_names, colours, strict=True)
    )
    guesses = {masked.position: masked for masked in inspection.masked}
    parts = []
    for position, token in enumerate(inspection.tokens):
        if token.special:
            parts.append(special_token(token))
        elif position in guesses:
            parts.append(
                with_space_outside(token.original_surface, "masked") + alternatives(guesses[position], colours)
            )
        else:
            parts.append(escape(token.original_surface))
    return (
        "<h2>The text, and what each depth would write</h2><p class=note>Underlined tokens were masked. In brackets the "
        f'likeliest proposal of each depth: <span class="alternatives">({names})</span>.</p>'
        f'<div class="text">{"".join(parts)}</div>'
    )


def alternatives(masked: MaskedToken, colours: list[str]) -> str:
    best = (
        f'<b style="border-color:{colour}">{show(proposals[0].piece)}</b>'
        for proposals, colour in zip(masked.proposals, colours, strict=True)
    )
    return f' <span class="alternatives">({"/".join(best)})</span>'


def judgement_section(inspection: Inspection, colours: list[str]) -> str:
    """The corrupted text on a background that tells the probability of replacement."""
    parts = [special_token(token) if token.special else judged_token(token) for token in inspection.tokens]
    steps = "".join(f'<span style="background:{suspicion_colour(step / 4)}">{step / 4:.2f}</span>' for step in range(5))
    return (
        "<h2>What the discriminator read, and how it judged</h2><p class=note>Background: its probability that the token "
        f'was replaced, <span class="scale">{steps}</span>; a dashed frame: above 0.5. Underlined tokens were masked, '
        "the original stands raised where the sample differs. Each token tells its numbers when pointed at.</p>"
        f'<div class="text">{"".join(parts)}</div>'
    )


def judged_token(token: Token) -> str:
    classes = "token" + " masked" * token.masked + " accused" * token.accused
    original = token.original_surface.strip() or token.original
    was = f'<span class="was">{escape(original)}</span>' if token.replaced else ""
    style = f"background:{suspicion_colour(token.replaced_probability)}"
    return with_space_outside(token.surface, classes, style, title_of(token)) + was


def special_token(token: Token) -> str:
    style = f"background:{suspicion_colour(token.replaced_probability)}"
    line_end = "\n" if token.original == "</s>" else ""
    return f'<span class="special" style="{style}" title="{title_of(token)}">{show(token.original)}</span>{line_end}'


def title_of(token: Token) -> str:
    """What pointing at a token tells."""
    origin = f"original {token.original}, sampled {token.read}; " if token.masked else f"{token.original}; "
    return escape(f"{printable(origin)}P(replaced) {token.replaced_probability:.3f}: {token.verdict}")


def with_space_outside(surface: str, classes: str, style: str = "", title: str = "") -> str:
    """A marked part of the text; the space before a word stays unmarked."""
    body = surface.lstrip(" ")
    attributes = "".join(f' {name}="{value}"' for name, value in (("style", style), ("title", title)) if value)
    return f'{surface[: len(surface) - len(body)]}<span class="{classes}"{attributes}>{escape(body)}</span>'


def table_section(inspection: Inspection, colours: list[str]) -> str:
    """One row per masked token with every number."""
    heads = "".join(
        f'<th style="border-bottom-color:{colour}">depth {escape(name)}</th>'
        for name, colour in zip(inspection.depth_names, colours, strict=True)
    )
    rows = "".join(table_row(inspection.tokens[masked.position], masked, colours) for masked in inspection.masked)
    return (
        "<h2>Every masked token</h2><p class=note>Probability of each proposal; the original is underlined, and stands "
        "last where it is not among the first. Special symbols are never sampled and left out, but have their part of the "
        "probability. The weight is that of the depth in the mixture from which the replacement is sampled. Pieces are "
        "spelled as in the vocabulary (SentencePiece writes a space as \u2581).</p>"
        f"<table><thead><tr><th class=number>position</th><th>original</th>{heads}<th>sampled</th>"
        f"<th class=number>P(replaced)</th><th>discriminator</th></tr></thead><tbody>{rows}</tbody></table>"
    )


def table_row(token: Token, masked: MaskedToken, colours: list[str]) -> str:
    depths = "".join(f"<td>{depth_cell(token, masked, depth, colour)}</td>" for depth, colour in enumerate(colours))
    background = f"background:{suspicion_colour(token.replaced_probability)}"
    return (
        f"<tr><td class=number>{masked.position}</td><td><b class=piece>{show(token.original)}</b></td>{depths}"
        f"<td class=piece>{show(token.read)}</td>"
        f'<td class=number style="{background}">{token.replaced_probability:.3f}</td><td>{token.verdict}</td></tr>'
    )


def depth_cell(token: Token, masked: MaskedToken, depth: int, colour: str) -> str:
    shown = [(proposal.piece, proposal.probability) for proposal in masked.proposals[depth]]
    if all(piece != token.original for piece, _ in shown):
        shown.append((token.original, masked.original_probabilities[depth]))
    weight = f'<div class="weight">weight {masked.weights[depth]:.3f} {bar(masked.weights[depth], "#999")}</div>'
    return weight + "".join(
        f'<div class="proposal{" original" * (piece == token.original)}"><span class="p">{probability:.3f}</span>'
        f'<span class="piece">{show(piece)}</span> {bar(probability, colour)}</div>'
        for piece, probability in shown
    )


def bar(share: float, colour: str) -> str:
    return f'<span class="bar" style="width:{4 * share:.2f}em;background:{colour}"></span>'


def show(piece: str) -> str:
    return escape(printable(piece))
