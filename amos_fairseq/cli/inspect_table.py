"""An inspection in the terminal: the judged text and one row per masked token. Without colours it says the same."""

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from amos_fairseq.cli.colours import suspicion_colour
from amos_fairseq.cli.inspected import Inspection, MaskedToken, Token, best_of, printable, told_lines

VERDICT_STYLES = {
    "detected": Style(bold=True), "missed": Style(italic=True), "false alarm": Style(italic=True), "trusted": Style(),
}  # fmt: skip


def print_inspection(inspection: Inspection) -> None:
    console = Console(highlight=False, soft_wrap=False)
    console.print(masked_table(inspection))
    if inspection.positive or inspection.has_log_probs:
        console.print(Text(text_heading(inspection), style="bold"))
        console.print(read_text(inspection.tokens))
        console.print()
    for line in inspection.summary():
        console.print(Text(line))


def text_heading(inspection: Inspection) -> str:
    """What :func:`read_text` shows."""
    if not inspection.positive:
        return f"The text, with log p(token | the rest) in nats after each token; [] was {inspection.chosen}."
    flag = "replacement" if inspection.positive == "replaced" else inspection.positive
    return (
        f"What the discriminator read, with its probability of {flag} in percent after each token; [original>read] was "
        f"{inspection.chosen}."
    )


def masked_table(inspection: Inspection) -> Table:
    """Position, original, a column per depth (its mixture weight, proposals, the original's share), and what the main
    network read and made of it."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, title=f"Tokens {inspection.chosen}", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("original", no_wrap=True)
    for name in inspection.depth_names:
        table.add_column(f"depth {name}", no_wrap=True)
    if inspection.has_candidates:
        table.add_column("selection", no_wrap=True)
    if inspection.is_corrupted:
        table.add_column("sampled", no_wrap=True)
    if inspection.tells_originals:
        table.add_column("main network", no_wrap=True)
    if inspection.positive:
        table.add_column(f"{inspection.positive}?")
    if inspection.has_log_probs:
        table.add_column("log p", justify="right")
    for masked in inspection.masked:
        token = inspection.tokens[masked.position]
        row = [str(masked.position), Text(printable(token.original), style="bold")]
        row += [depth_cell(inspection, masked, depth) for depth in range(len(inspection.depth_names))]
        row += [selection_cell(masked)] if inspection.has_candidates else []
        row += [Text(printable(token.read))] if inspection.is_corrupted else []
        row += ["\n".join(told_lines(masked))] if inspection.tells_originals else []
        row += [judgement_cell(token)] if inspection.positive else []
        row += [f"{token.log_prob:.2f}"] if inspection.has_log_probs else []
        table.add_row(*row)
    return table


def judgement_cell(token: Token) -> Text:
    judgement = Text()  # appended, because a style of the whole text would fill the cell
    judgement.append(f" {token.flagged_probability:.3f} ", style=suspicion_style(token))
    judgement.append(f"\n{token.verdict}", style=VERDICT_STYLES[token.verdict])
    return judgement


def selection_cell(masked: MaskedToken) -> Text:
    """The candidates with their probabilities, the likeliest in bold; a star marks the original, which stands first."""
    cell, best = Text(), best_of(masked.candidates)
    for number, candidate in enumerate(masked.candidates):
        star = " " if number else "*"
        line = f"{candidate.probability:.3f}{star}{printable(candidate.piece)}"
        cell.append(line if not number else f"\n{line}", style="bold" if candidate is best else "")
    return cell


def depth_cell(inspection: Inspection, masked: MaskedToken, depth: int) -> Text:
    """The depth's weight, where depths are mixed, and its proposals, a probability before each; a star marks the original."""
    original = inspection.tokens[masked.position].original
    lines = [(f"weight {masked.weights[depth]:.3f}", "dim")] if inspection.mixes else []
    for proposal in masked.proposals[depth]:
        star, style = ("*", "bold") if proposal.piece == original else (" ", "")
        lines.append((f"{proposal.probability:.3f}{star}{printable(proposal.piece)}", style))
    if all(proposal.piece != original for proposal in masked.proposals[depth]):
        lines.append((f"{masked.original_probabilities[depth]:.3f}*{printable(original)}", "italic"))
    return Text("\n").join(Text(line, style=style) for line, style in lines)


def read_text(tokens: list[Token]) -> Text:
    """The text in order; the background grows more orange the surer the discriminator is of its positive class."""
    text = Text()
    for token in tokens:
        judged, piece = token.flagged_probability is not None, printable(token.read)
        if token.masked:
            piece = f"[{printable(token.original)}>{piece}]" if judged else f"[{piece}]"
        text.append(piece, style=suspicion_style(token) + Style(bold=token.masked))
        text.append(number_of(token), style="dim")
    return text


def number_of(token: Token) -> str:
    """What stands after a token: its suspicion in percent, else its log-probability, else nothing."""
    if token.flagged_probability is not None:
        return f"{100 * token.flagged_probability:.0f} "
    return " " if token.log_prob is None else f" {token.log_prob:.1f} "


def suspicion_style(token: Token) -> Style:
    if token.flagged_probability is None:
        return Style()
    return Style(color="#000000", bgcolor=suspicion_colour(token.flagged_probability))
