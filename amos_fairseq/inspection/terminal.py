"""An inspection in the terminal: a table of the masked tokens, and the text. Nothing depends on color alone."""

from rich import box
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from amos_fairseq.inspection.results import Inspection, MaskedToken, Token, percent, printable, probability_colour

VERDICT_STYLES = {
    "detected": Style(bold=True), "missed": Style(italic=True), "false alarm": Style(italic=True), "trusted": Style(),
}  # fmt: skip


def print_inspection(inspection: Inspection) -> None:
    """Print the table of masked tokens, the text with its probabilities, and the summary."""
    console = Console(highlight=False, soft_wrap=False)
    console.print(_masked_table(inspection))
    if inspection.positive_class or inspection.has_log_probs:
        console.print(Text(_text_heading(inspection), style="bold"))
        console.print(_annotated_text(inspection.tokens))
        console.print()
    for line in inspection.summary():
        console.print(Text(line))


def _masked_table(inspection: Inspection) -> Table:
    """One row per masked token; columns depend on what the objective has."""
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, title=f"Tokens {inspection.selected}", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("original", no_wrap=True)
    for name in inspection.depth_names:
        table.add_column(f"depth {name}", no_wrap=True)
    if inspection.has_candidates:
        table.add_column("selection", no_wrap=True)
    if inspection.is_corrupted:
        table.add_column("sampled", no_wrap=True)
    if inspection.predicts_tokens:
        table.add_column("main network", no_wrap=True)
    if inspection.positive_class:
        table.add_column(f"{inspection.positive_class}?")
    if inspection.has_log_probs:
        table.add_column("log p", justify="right")
    for masked in inspection.masked:
        token = inspection.tokens[masked.position]
        row = [str(masked.position), Text(printable(token.original), style="bold")]
        row += [_depth_cell(inspection, masked, depth) for depth in range(len(inspection.depth_names))]
        row += [_selection_cell(masked)] if inspection.has_candidates else []
        row += [Text(printable(token.input))] if inspection.is_corrupted else []
        row += ["\n".join(masked.discriminator_lines())] if inspection.predicts_tokens else []
        row += [_detection_cell(token)] if inspection.positive_class else []
        row += [f"{token.log_prob:.2f}"] if inspection.has_log_probs else []
        table.add_row(*row)
    return table


def _depth_cell(inspection: Inspection, masked: MaskedToken, depth: int) -> Text:
    """The mixture weight, where depths are mixed, and the predictions; a star marks the original."""
    original = inspection.tokens[masked.position].original
    lines = [(f"weight {percent(masked.mixture_weights[depth])}", "dim")] if inspection.has_mixture else []
    for prediction in masked.predictions[depth]:
        star, style = ("*", "bold") if prediction.piece == original else (" ", "")
        lines.append((f"{percent(prediction.probability):>7}{star}{printable(prediction.piece)}", style))
    if all(prediction.piece != original for prediction in masked.predictions[depth]):
        lines.append((f"{percent(masked.original_probabilities[depth]):>7}*{printable(original)}", "italic"))
    return Text("\n").join(Text(line, style=style) for line, style in lines)


def _selection_cell(masked: MaskedToken) -> Text:
    """The candidates with their probabilities: the original first and marked by a star, the most probable in bold."""
    lines = []
    for number, candidate in enumerate(masked.candidates):
        line = f"{percent(candidate.probability):>7}{' ' if number else '*'}{printable(candidate.piece)}"
        lines.append(Text(line, style="bold" if candidate is masked.best_candidate else ""))
    return Text("\n").join(lines)


def _detection_cell(token: Token) -> Text:
    cell = Text()  # appended to, because a style of the whole text would fill the cell
    cell.append(f" {percent(token.positive_probability)} ", style=_probability_style(token))
    cell.append(f"\n{token.verdict}", style=VERDICT_STYLES[token.verdict])
    return cell


def _text_heading(inspection: Inspection) -> str:
    """The explanation of :func:`_annotated_text`."""
    if not inspection.positive_class:
        return f"The text, with log p(token | the rest) in nats after each token; [] was {inspection.selected}."
    name = "replacement" if inspection.positive_class == "replaced" else inspection.positive_class
    return (
        f"Input of the discriminator, with its probability of {name} in percent after each token; [original>input] was "
        f"{inspection.selected}."
    )


def _annotated_text(tokens: list[Token]) -> Text:
    """The text in order; the more probable the positive class, the more orange the background."""
    text = Text()
    for token in tokens:
        piece = printable(token.input)
        if token.masked:
            detected = token.positive_probability is not None
            piece = f"[{printable(token.original)}>{piece}]" if detected else f"[{piece}]"
        text.append(piece, style=_probability_style(token) + Style(bold=token.masked))
        if token.positive_probability is not None:
            text.append(f"{100 * token.positive_probability:.0f} ", style="dim")
        else:
            text.append(" " if token.log_prob is None else f" {token.log_prob:.1f} ", style="dim")
    return text


def _probability_style(token: Token) -> Style:
    if token.positive_probability is None:
        return Style()
    return Style(color="#000000", bgcolor=probability_colour(token.positive_probability))
