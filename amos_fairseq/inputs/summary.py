"""What a reader understood of a file, printed before anything long, so that a mistake is seen at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from amos_fairseq.output.terminal import say

SHOWN_CHARACTERS = 300  # of the first item


def print_what_was_read(
    path: Path,
    kind: str,
    columns: Sequence[str],
    num_rows: int,
    left_out: Mapping[str, int],
    first: str,
    command: str = "prepare",
) -> None:
    """Print two lines: what was taken of a file, and its first item as the model will see it.

    ::

        prepare: reviews.tsv: TSV, columns text, label: 1,200 rows; left out: 3 without label
        prepare: reviews.tsv: the first: good film -> pos

    Args:
        kind: what the file was read as.
        columns: those that were taken, in this order; none of plain text.
        left_out: why rows were left out -> how many; zeros are not printed.
        first: the first row that was not left out.
    """
    taken = f", column{'s' * (len(columns) > 1)} {', '.join(columns)}" if columns else ""
    reasons = [f"{count:,} {why}" for why, count in left_out.items() if count]
    without = f"; left out: {', '.join(reasons)}" if reasons else ""
    say(f"{path}: {kind}{taken}: {num_rows:,} rows{without}", command)
    shown = first if len(first) <= SHOWN_CHARACTERS else f"{first[:SHOWN_CHARACTERS]} ..."
    say(f"{path}: the first: {shown}", command)
