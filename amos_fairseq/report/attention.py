"""The attention of single heads for one text, as a picture (thesis, Figure 2.8)."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError, printable
from amos_fairseq.files import explain_write_errors
from amos_fairseq.output.pictures import RC_PARAMS, figure_of_panels, run_colour, save
from amos_fairseq.probing.attention import check_finite, recorded_attention
from amos_fairseq.probing.features import parts_of

MOST_TOKENS, MOST_COLUMNS = 100, 3


@torch.no_grad()
def attention_of_heads(
    loaded: LoadedCheckpoint, text: str, heads: Sequence[tuple[int, int]]
) -> tuple[list[str], list[Tensor]]:
    """Return the pieces of a text, and how much each token attends to each: [T,T] for each head; the sum of a row is 1.

    ``heads``: layer and number, from 1 on, of attention heads of the main network.
    """
    *_, part = parts_of(loaded.model).values()
    encoder, _ = part.layers[0]
    num_layers, num_heads = len(encoder.layers), encoder.shape.num_heads
    for layer, head in heads:
        if not (1 <= layer <= num_layers and 1 <= head <= num_heads):
            known = f"{loaded.file} has the layers 1 to {num_layers} with the heads 1 to {num_heads}"
            raise UserError(f"--attention {layer}-{head}: {known}: give LAYER-HEAD")
    tokens, most = loaded.tokens(text), min(MOST_TOKENS, loaded.model.max_positions())
    if len(tokens) > most:
        raise UserError(
            f"--attention: the text has {len(tokens)} tokens, a picture {most} at most: give a shorter text"
        )
    with recorded_attention(encoder) as weights:
        encoder(part.embed_tokens(tokens[None]), tokens[None].eq(loaded.dictionary.pad()))
    pieces = [loaded.dictionary[token] for token in tokens.tolist()]
    of_heads = [weights[layer - 1][0, head - 1] for layer, head in heads]
    check_finite(part, torch.stack(of_heads))
    return pieces, of_heads


def attention_figure(pieces: Sequence[str], panels: dict[str, Tensor]) -> Figure:
    """Draw heads by title: a line from each token, on the left, to each that it attends to [T,T], the more the darker."""
    figure, axes = figure_of_panels(len(panels), MOST_COLUMNS)
    columns, rows = min(len(panels), MOST_COLUMNS), -(-len(panels) // MOST_COLUMNS)
    figure.set_size_inches(3.6 * columns, rows * (0.6 + 0.19 * len(pieces)))
    places = range(len(pieces))
    lines = [[(0, token), (1, other)] for token in places for other in places]
    for (title, weights), ax in zip(panels.items(), axes, strict=True):
        ax.add_collection(LineCollection(lines, colors=run_colour(0), alpha=weights.flatten().numpy(), linewidths=1.5))
        for place, piece in enumerate(pieces):
            for side, alignment in ((-0.04, "right"), (1.04, "left")):
                ax.text(side, place, printable(piece), ha=alignment, va="center", parse_math=False)
        ax.set(title=title, xlim=(-0.7, 1.7), ylim=(len(pieces) - 0.5, -0.5))
        ax.set_axis_off()
    return figure


@matplotlib.rc_context(RC_PARAMS)
def draw_attention(loaded: LoadedCheckpoint, text: str, heads: Sequence[tuple[int, int]], out: Path) -> list[str]:
    """Write ``attention.png`` and ``.svg`` into ``out``, and return their paths."""
    pieces, weights = attention_of_heads(loaded, text, heads)
    titles = [f"layer {layer}, head {head}" for layer, head in heads]
    with explain_write_errors(out, "permit writing, or give another --out"):
        out.mkdir(parents=True, exist_ok=True)
        return save(attention_figure(pieces, dict(zip(titles, weights, strict=True))), out, "attention")
