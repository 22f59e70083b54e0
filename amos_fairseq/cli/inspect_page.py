"""An inspection as one HTML page that needs nothing else: no script, no font, no picture from elsewhere.

Meaning is never carried by colour alone: probabilities stand as numbers, masked tokens are underlined, and verdicts are
words. Everything that comes from the text or the vocabulary is escaped.
"""

from html import escape

from amos_fairseq.cli.colours import depth_colours, suspicion_colour
from amos_fairseq.cli.inspected import Inspection, MaskedToken, Token, best_of, printable, told_lines

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
    sections = [alternatives_section, judgement_section, table_section]
    if not (inspection.positive or inspection.has_log_probs):
        sections.remove(judgement_section)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width"><title>amos inspect</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>One text, seen by {readers(inspection)}</h1>{summary}\n"
        + "\n".join(section(inspection, colours) for section in sections)
        + "\n</body></html>\n"
    )


def readers(inspection: Inspection) -> str:
    if inspection.positive:
        return "generator and discriminator"
    return "a generator and a network that undoes it" if inspection.is_corrupted else "a cloze model"


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
            parts.append(special_token(token, inspection))
        elif position in guesses:
            parts.append(
                with_space_outside(token.original_surface, "masked") + alternatives(guesses[position], colours)
            )
        else:
            parts.append(escape(token.original_surface))
    return (
        "<h2>The text, and what each depth would write</h2><p class=note>"
        f"Underlined tokens were {inspection.chosen}. In brackets the "
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
    """The text as the main network read it, on a background that tells the probability of the positive class."""
    parts = [
        special_token(token, inspection) if token.special else judged_token(token, inspection)
        for token in inspection.tokens
    ]
    heading, note = judgement_words(inspection)
    return f'<h2>{heading}</h2><p class=note>{note}</p><div class="text">{"".join(parts)}</div>'


def judgement_words(inspection: Inspection) -> tuple[str, str]:
    log_probs = " log p(token | the rest) is in nats." if inspection.has_log_probs else ""
    pointed = "Each token tells its numbers when pointed at." + log_probs
    if not inspection.positive:
        return "What it thinks of every token", f"Underlined tokens were {inspection.chosen}. {pointed}"
    steps = "".join(f'<span style="background:{suspicion_colour(step / 4)}">{step / 4:.2f}</span>' for step in range(5))
    return (
        "What the discriminator read, and how it judged",
        f'Background: its probability of "{inspection.positive}", <span class="scale">{steps}</span>; a dashed frame: above '
        f"0.5. Underlined tokens were {inspection.chosen}, the original stands raised where the sample differs. {pointed}",
    )


def judged_token(token: Token, inspection: Inspection) -> str:
    classes = "token" + " masked" * token.masked + " accused" * token.accused
    original = token.original_surface.strip() or token.original
    was = f'<span class="was">{escape(original)}</span>' if token.replaced else ""
    return with_space_outside(token.surface, classes, background(token), title_of(token, inspection)) + was


def special_token(token: Token, inspection: Inspection) -> str:
    line_end = "\n" if token.original == "</s>" else ""
    marks = attributes(background(token), title_of(token, inspection))
    return f'<span class="special"{marks}>{show(token.original)}</span>{line_end}'


def background(token: Token) -> str:
    return "" if token.flagged_probability is None else f"background:{suspicion_colour(token.flagged_probability)}"


def title_of(token: Token, inspection: Inspection) -> str:
    """What pointing at a token tells."""
    sampled = token.masked and inspection.is_corrupted
    facts = [printable(f"original {token.original}, sampled {token.read}" if sampled else token.original)]
    if token.flagged_probability is not None:
        facts.append(f"P({inspection.positive}) {token.flagged_probability:.3f}: {token.verdict}")
    if token.log_prob is not None:
        facts.append(f"log p {token.log_prob:.2f}")
    return escape("; ".join(facts))


def attributes(style: str, title: str) -> str:
    return "".join(f' {name}="{value}"' for name, value in (("style", style), ("title", title)) if value)


def with_space_outside(surface: str, classes: str, style: str = "", title: str = "") -> str:
    """A marked part of the text; the space before a word stays unmarked."""
    body = surface.lstrip(" ")
    return (
        f'{surface[: len(surface) - len(body)]}<span class="{classes}"{attributes(style, title)}>{escape(body)}</span>'
    )


def table_section(inspection: Inspection, colours: list[str]) -> str:
    """One row per masked token with every number."""
    heads = "".join(
        f'<th style="border-bottom-color:{colour}">depth {escape(name)}</th>'
        for name, colour in zip(inspection.depth_names, colours, strict=True)
    )
    heads += "<th>selection</th>" * inspection.has_candidates + "<th>sampled</th>" * inspection.is_corrupted
    heads += "<th>main network</th>" * inspection.tells_originals
    if inspection.positive:
        heads += f"<th class=number>P({inspection.positive})</th><th>discriminator</th>"
    heads += "<th class=number>log p</th>" * inspection.has_log_probs
    rows = "".join(table_row(inspection, masked, colours) for masked in inspection.masked)
    return (
        f"<h2>Every token {inspection.chosen}</h2><p class=note>{table_words(inspection)}</p><table><thead><tr>"
        f"<th class=number>position</th><th>original</th>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )


def table_words(inspection: Inspection) -> str:
    words = [
        "Probability of each proposal; the original is underlined, and stands last where it is not among the first. Special "
        "symbols are left out, but have their part of the probability."
    ]
    if inspection.mixes:
        words.append("The weight is that of the depth in the mixture from which the replacement is sampled.")
    if inspection.has_candidates:
        words.append("Selection: how the discriminator shares its probability among the original and its rivals.")
    words.append("Pieces are spelled as in the vocabulary (SentencePiece writes a space as \u2581).")
    return " ".join(words)


def table_row(inspection: Inspection, masked: MaskedToken, colours: list[str]) -> str:
    token = inspection.tokens[masked.position]
    cells = [f"<td class=number>{masked.position}</td><td><b class=piece>{show(token.original)}</b></td>"]
    cells += [f"<td>{depth_cell(inspection, masked, depth, colour)}</td>" for depth, colour in enumerate(colours)]
    if inspection.has_candidates:
        cells.append(f"<td>{selection_cell(masked)}</td>")
    if inspection.is_corrupted:
        cells.append(f"<td class=piece>{show(token.read)}</td>")
    if inspection.tells_originals:
        cells.append(f"<td>{'<br>'.join(map(escape, told_lines(masked)))}</td>")
    if inspection.positive:
        cells.append(f'<td class=number style="{background(token)}">{token.flagged_probability:.3f}</td>')
        cells.append(f"<td>{token.verdict}</td>")
    if inspection.has_log_probs:
        cells.append(f"<td class=number>{token.log_prob:.2f}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def selection_cell(masked: MaskedToken) -> str:
    """The original first, underlined; the likeliest is marked as chosen."""
    best = best_of(masked.candidates)
    return "".join(
        proposal_line(candidate.piece, candidate.probability, number == 0, "#999", " (chosen)" * (candidate is best))
        for number, candidate in enumerate(masked.candidates)
    )


def depth_cell(inspection: Inspection, masked: MaskedToken, depth: int, colour: str) -> str:
    original = inspection.tokens[masked.position].original
    shown = [(proposal.piece, proposal.probability) for proposal in masked.proposals[depth]]
    if all(piece != original for piece, _ in shown):
        shown.append((original, masked.original_probabilities[depth]))
    share = masked.weights[depth]
    weight = f'<div class="weight">weight {share:.3f} {bar(share, "#999")}</div>' if inspection.mixes else ""
    return weight + "".join(
        proposal_line(piece, probability, piece == original, colour) for piece, probability in shown
    )


def proposal_line(piece: str, probability: float, is_original: bool, colour: str, mark: str = "") -> str:
    return (
        f'<div class="proposal{" original" * is_original}"><span class="p">{probability:.3f}</span>'
        f'<span class="piece">{show(piece)}</span>{mark} {bar(probability, colour)}</div>'
    )


def bar(share: float, colour: str) -> str:
    return f'<span class="bar" style="width:{4 * share:.2f}em;background:{colour}"></span>'


def show(piece: str) -> str:
    return escape(printable(piece))
