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
    what: str = "rows",
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
        what: the rows are called.
    """
    say(f"{path}: {_kind(kind, columns)}: {_counts(num_rows, what, left_out)}", command)
    say(f"{path}: the first: {_shown(first)}", command)


def print_first(path: Path, kind: str, columns: Sequence[str], first: str, command: str = "prepare") -> None:
    """Print these lines without the counts, where counting takes long."""
    say(f"{path}: {_kind(kind, columns)}", command)
    say(f"{path}: the first: {_shown(first)}", command)


def print_counts(path: Path, number: int, what: str, left_out: Mapping[str, int], command: str = "prepare") -> None:
    """Print what :func:`print_first` leaves out."""
    say(f"{path}: {_counts(number, what, left_out)}", command)


def _kind(kind: str, columns: Sequence[str]) -> str:
    return f"{kind}, column{'s' * (len(columns) > 1)} {', '.join(columns)}" if columns else kind


def _counts(number: int, what: str, left_out: Mapping[str, int]) -> str:
    reasons = [f"{count:,} {why}" for why, count in left_out.items() if count]
    return f"{number:,} {what}" + (f"; left out: {', '.join(reasons)}" if reasons else "")


def _shown(first: str) -> str:
    return first if len(first) <= SHOWN_CHARACTERS else f"{first[:SHOWN_CHARACTERS]} ..."
