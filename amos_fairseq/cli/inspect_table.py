"""An inspection in the terminal: the judged text and one row per masked token. Without colours it says the same."""

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from amos_fairseq.cli.colours import suspicion_colour
from amos_fairseq.cli.inspection import Inspection, MaskedToken, Token, printable

VERDICT_STYLES = {
    "detected": Style(bold=True), "missed": Style(italic=True), "false alarm": Style(italic=True), "trusted": Style(),
}  # fmt: skip


def print_inspection(inspection: Inspection) -> None:
    console = Console(highlight=False, soft_wrap=False)
    console.print(masked_table(inspection))
    console.print(
        Text(
            "What the discriminator read, with its probability of replacement in percent after each token; "
            "[original>read] was masked.",
            style="bold",
        )
    )
    console.print(judged_text(inspection.tokens))
    console.print()
    for line in inspection.summary():
        console.print(Text(line))


def masked_table(inspection: Inspection) -> Table:
    """Position, original, a column per depth (its mixture weight, proposals, the original's share), sample, verdict."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, title="Masked tokens", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("original", no_wrap=True)
    for name in inspection.depth_names:
        table.add_column(f"depth {name}", no_wrap=True)
    table.add_column("sampled", no_wrap=True)
    table.add_column("replaced?")
    for masked in inspection.masked:
        token = inspection.tokens[masked.position]
        judgement = Text()  # appended, because a style of the whole text would fill the cell
        judgement.append(f" {token.replaced_probability:.3f} ", style=suspicion_style(token))
        judgement.append(f"\n{token.verdict}", style=VERDICT_STYLES[token.verdict])
        table.add_row(
            str(masked.position),
            Text(printable(token.original), style="bold"),
            *(depth_cell(masked, depth, token.original) for depth in range(len(inspection.depth_names))),
            Text(printable(token.read)),
            judgement,
        )
    return table


def depth_cell(masked: MaskedToken, depth: int, original: str) -> Text:
    """The depth's weight and proposals, a probability before each; a star marks the original."""
    cell = Text(f"weight {masked.weights[depth]:.3f}", style="dim")
    for proposal in masked.proposals[depth]:
        star, style = ("*", "bold not dim") if proposal.piece == original else (" ", "not dim")
        cell.append(f"\n{proposal.probability:.3f}{star}{printable(proposal.piece)}", style=style)
    if all(proposal.piece != original for proposal in masked.proposals[depth]):
        cell.append(f"\n{masked.original_probabilities[depth]:.3f}*{printable(original)}", style="not dim italic")
    return cell


def judged_text(tokens: list[Token]) -> Text:
    """The text in order; the background grows more orange the surer the discriminator is of a replacement."""
    text = Text()
    for token in tokens:
        piece = printable(token.read)
        if token.masked:
            piece = f"[{printable(token.original)}>{piece}]"
        text.append(piece, style=suspicion_style(token) + Style(bold=token.masked))
        text.append(f"{100 * token.replaced_probability:.0f} ", style="dim")
    return text


def suspicion_style(token: Token) -> Style:
    return Style(color="#000000", bgcolor=suspicion_colour(token.replaced_probability))
