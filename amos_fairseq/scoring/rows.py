"""Scored lines as text: tab-separated values with a head, or one JSON object a line."""

import json
from collections.abc import Callable

from amos_fairseq.scoring.pseudo_likelihood import ScoredLine

TSV_HEAD = "line\tpll\tnum_pieces\tnum_unknown\tpieces\tlog_probs"
DECIMALS = 6  # about what float32 holds of numbers around 10


def tsv_row(scored: ScoredLine) -> str:
    """Number, PLL, number of pieces and of unknown ones, the pieces, and the log-probability of each.

    Pieces and numbers are separated by spaces, which no piece holds; ``-`` is the number of an unknown piece. PLL and numbers
    of a line that is too long for the model are empty.
    """
    numbers = ["-" if value is None else f"{value:.{DECIMALS}f}" for value in scored.log_probs or []]
    pll = "" if scored.pll is None else f"{scored.pll:.{DECIMALS}f}"
    pieces = scored.line.pieces
    columns = (scored.line.number, pll, len(pieces), scored.num_unknown, " ".join(pieces), " ".join(numbers))
    return "\t".join(map(str, columns))


def json_row(scored: ScoredLine) -> str:
    """An object with the text as well; null where a number is missing."""
    values = scored.log_probs
    record = {
        "line": scored.line.number,
        "text": scored.line.text,
        "pll": None if scored.pll is None else round(scored.pll, DECIMALS),
        "num_unknown": scored.num_unknown,
        "pieces": scored.line.pieces,
        "log_probs": None if values is None else [None if v is None else round(v, DECIMALS) for v in values],
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


# By --format: the first line of a file, if it has one, and the row of a line.
FORMATS: dict[str, tuple[str | None, Callable[[ScoredLine], str]]] = {
    "tsv": (TSV_HEAD, tsv_row),
    "jsonl": (None, json_row),
}
