"""Scoring from files to files: rows in the order of the texts, kept as they come, so that a stopped run continues."""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from amos_fairseq.data.fingerprint import file_sha256
from amos_fairseq.errors import UserError
from amos_fairseq.files import whole_file
from amos_fairseq.scoring.pseudo_likelihood import ScoredLine, Scorer
from amos_fairseq.scoring.unfinished import UnfinishedRows

Row = Callable[[ScoredLine], str]


@dataclass
class Tally:
    """What of the lines just read has no score."""

    max_tokens: int
    num_too_long: int = 0
    first_too_long: int = 0
    num_unknown: int = 0

    def add(self, scored: ScoredLine) -> None:
        self.num_unknown += scored.num_unknown
        if scored.pll is None:
            self.first_too_long = self.first_too_long or scored.line.number
            self.num_too_long += 1

    def notices(self) -> list[str]:
        found = []
        if self.num_too_long:
            found.append(
                f"lines without a score, longer than the {self.max_tokens} tokens that the model reads: {self.num_too_long}, "
                f"the first is line {self.first_too_long}"
            )
        if self.num_unknown:
            found.append(f"pieces without a score, unknown to the vocabulary: {self.num_unknown}")
        return found


def scored_rows(scorer: Scorer, texts: Iterable[str], row: Row, num_texts: int, first: int = 1) -> Iterator[list[str]]:
    """Rows of a window of texts at a time, with a bar of progress where somebody sees it; notices at the end.

    ``texts`` begin with number ``first`` of ``num_texts``.
    """
    tally = Tally(scorer.max_tokens)
    with tqdm(total=num_texts, initial=first - 1, desc="score", unit=" lines", disable=None, file=sys.stderr) as bar:
        for window in scorer.windows(texts, first):
            for scored in window:
                tally.add(scored)
            yield [row(scored) for scored in window]
            bar.update(len(window))
    for notice in tally.notices():
        print(notice, file=sys.stderr)


def kept_rows(scorer: Scorer, texts: Iterable[str], row: Row, num_texts: int, rows: UnfinishedRows) -> Iterator[str]:
    """All rows, of which earlier runs have kept some."""
    if rows.was_of_another:
        print(f"{rows.path} was of another text, checkpoint or format: begun anew", file=sys.stderr)
    elif rows.num_rows:
        print(f"{rows.path}: {rows.num_rows} of {num_texts} lines are scored already", file=sys.stderr)
    rest = itertools.islice(texts, rows.num_rows, None)
    for some in scored_rows(scorer, rest, row, num_texts, rows.num_rows + 1):
        rows.append(some)
    return rows.rows()


def identity(scorer: Scorer, sources: Sequence[Path], row: str) -> dict[str, object]:
    """What decides about the rows: all but device and batch, which change digits after the sixth.

    Raises:
        UserError: a source cannot be read.
    """
    try:
        texts = [file_sha256(source) for source in sources]
    except OSError as error:
        raise UserError(f"{error.filename}: the text cannot be read ({error.strerror})") from error
    return {
        "checkpoint": file_sha256(scorer.pretrained.file),
        "tokenizer": scorer.pretrained.tokenizer.sha256,
        "texts": texts,
        "row": row,
        "electra_formula": scorer.electra_formula,
    }


def write_whole(out: Path, lines: Iterable[str]) -> None:
    """:class:`UserError` where the file cannot be written; then the old one, if there was one, is still there."""
    try:
        with whole_file(str(out)) as unfinished, open(unfinished, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise UserError(
            f"{out} cannot be written ({error.strerror}): make room, or choose another place with --out"
        ) from error
