"""``amos score FILE``: the pseudo-log-likelihood of each line, PLL(x) = sum_t log p(x_t | all other tokens) (thesis, 5.4.5).

Lines are processed in windows of bounded work, so a file of any size needs the memory of one window.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_lines
from amos_fairseq.inputs.files import decoded_lines, read_lines
from amos_fairseq.output.terminal import progress_bar, say
from amos_fairseq.scoring.token_scorers import TokenScorer

STDIN = "-"
DECIMALS = 6  # about the precision of float32 for values around 10
LINES_ENCODED_AT_ONCE = 256  # tokenizers are faster with many lines
LINES_PER_WINDOW = 4096
# A window has the work of this many batches, enough to batch lines of similar length.
BATCHES_PER_WINDOW = 32
TSV_HEADER = "line\tpll\tnum_pieces\tnum_unknown\tpieces\tlog_probs"


@dataclass(frozen=True)
class EncodedLine:
    """A line with its number, from 1 on, and its pieces as spelled in ``dict.txt``."""

    number: int
    text: str
    pieces: list[str]
    tokens: Tensor  # [pieces + 2] int64: <s>, the pieces, </s>
    unknown: dict[int, int]  # index of each piece that the vocabulary does not contain -> its number of characters

    @property
    def reading(self) -> tuple[bytes, tuple[tuple[int, int], ...]]:
        """All that the score depends on; equal for texts that the tokenizer reads alike, for example without case."""
        return self.tokens.numpy().tobytes(), tuple(self.unknown.items())


@dataclass(frozen=True)
class ScoredLine:
    """A line and the score of each piece in nats, None for a line that is longer than the model's limit."""

    line: EncodedLine
    log_probs: list[float] | None

    @property
    def pll(self) -> float | None:
        """Sum over the pieces, 0 for an empty line; None for a line that is too long."""
        return None if self.log_probs is None else math.fsum(self.log_probs)


def unknown_log_prob(num_characters: int, vocabulary_size: int) -> float:
    """Return the score of a piece that the vocabulary does not contain, in nats.

    No objective trains the probability of ``<unk>``, which is never a target. Instead ``<unk>`` is one of the V entries of the
    vocabulary with equal probability, and each of its n characters one of Unicode's 1,114,112: log p = -log V - n log
    1,114,112. With 32,768 entries one character scores -24.3, far below a uniform guess of a piece (-10.4), so a text does not
    improve by characters that the model cannot read.
    """
    return -math.log(vocabulary_size) - num_characters * math.log(sys.maxunicode + 1)


def score_lines(
    loaded: LoadedCheckpoint,
    scorer: TokenScorer,
    lines: Iterable[EncodedLine],
    place: Callable[[int], str] = "line {}".format,
    num_lines: int | None = None,
) -> Iterator[ScoredLine]:
    """Yield all lines scored, in order. ``place``: number of a line -> what errors call it; ``num_lines``: for progress."""
    longest, most_work = loaded.model.max_positions(), BATCHES_PER_WINDOW * scorer.tokens_per_batch

    def work(line: EncodedLine) -> int:
        """The number of tokens that the model processes for a line, over all passes."""
        return len(line.tokens) * scorer.num_passes(line.tokens) if len(line.tokens) <= longest else 0

    with progress_bar(num_lines, "score", "line", delay=2) as bar:
        for window in windows(lines, work, most_work):
            with torch.inference_mode():
                values = iter(scorer.log_probs([line.tokens for line in window if len(line.tokens) <= longest]))
            for line in window:
                if len(line.tokens) > longest:
                    yield ScoredLine(line, None)
                    continue
                piece_scores = next(values)[1:-1]  # without <s> and </s>
                if not piece_scores.isfinite().all():
                    piece = line.pieces[int((~piece_scores.isfinite()).nonzero()[0])]
                    raise UserError(
                        f"{loaded.file} has no finite score for {piece!r} in {place(line.number)}: its training diverged "
                        "(use an earlier checkpoint), or its generator never predicts this piece"
                    )
                unknown = {i: unknown_log_prob(length, len(loaded.dictionary)) for i, length in line.unknown.items()}
                yield ScoredLine(line, [unknown.get(i, score) for i, score in enumerate(piece_scores.tolist())])
            bar.update(len(window))


def encoded_lines(loaded: LoadedCheckpoint, texts: Iterable[str]) -> Iterator[EncodedLine]:
    """Encode each text as ``<s> pieces </s>``; line numbers start at 1."""
    dictionary = loaded.dictionary
    texts, numbers = iter(texts), itertools.count(1)
    while chunk := list(itertools.islice(texts, LINES_ENCODED_AT_ONCE)):
        for text, pieces in zip(chunk, loaded.tokenizer.encode_lines(chunk), strict=True):
            ids = [dictionary.bos(), *map(dictionary.index, pieces), dictionary.eos()]
            unknown = {}
            if dictionary.unk() in ids:  # only then, because offsets are slower
                for index, (_, start, end) in enumerate(loaded.tokenizer.encode_with_offsets(text)):
                    if ids[1 + index] == dictionary.unk():
                        unknown[index] = max(1, end - start)
            yield EncodedLine(next(numbers), text, pieces, torch.tensor(ids), unknown)


def windows(
    lines: Iterable[EncodedLine], work: Callable[[EncodedLine], int], most_work: int
) -> Iterator[list[EncodedLine]]:
    """Group consecutive lines until their ``work`` reaches ``most_work``; a window has 1 to 4,096 lines."""
    window: list[EncodedLine] = []
    total = 0
    for line in lines:
        window.append(line)
        total += work(line)
        if total >= most_work or len(window) == LINES_PER_WINDOW:
            yield window
            window, total = [], 0
    if window:
        yield window


def read_texts(file: str) -> Iterator[str]:
    """Yield the lines, without their ends, of a UTF-8 file, which may be compressed, or of the standard input (``-``)."""
    lines = decoded_lines(sys.stdin.buffer, file) if file == STDIN else read_lines(Path(file))
    for number, line in lines:
        if number == 1:
            say(f"{file}: text, one sequence a line; the first: {line.strip()!r:.200}", "score")
        yield " ".join(line.splitlines())  # other line ends within it are spaces, as in the corpus


def score_file(loaded: LoadedCheckpoint, scorer: TokenScorer, file: str, out: Path | None) -> None:
    """Write a row for each line of ``file`` (``-``: the standard input), in its order, to ``out`` or the terminal."""
    too_long: list[int] = []  # numbers of lines
    num_unknown = 0

    def rows() -> Iterator[str]:
        nonlocal num_unknown
        yield f"{TSV_HEADER}\n"
        for scored in score_lines(loaded, scorer, encoded_lines(loaded, read_texts(file))):
            yield f"{tsv_row(scored)}\n"
            num_unknown += len(scored.line.unknown)
            too_long.extend([scored.line.number] * (scored.log_probs is None))

    if out is None:
        for row in rows():
            print(row, end="", flush=True)
    else:
        write_lines(out, rows())
    if too_long:
        print(
            f"lines without a score, longer than the model's limit of {loaded.model.max_positions()} tokens: "
            f"{len(too_long)}, the first is line {too_long[0]}",
            file=sys.stderr,
        )
    if num_unknown:
        print(f"pieces unknown to the vocabulary, scored as random characters: {num_unknown}", file=sys.stderr)


def tsv_row(scored: ScoredLine) -> str:
    """Format the columns of :data:`TSV_HEADER`, pieces and values with spaces between; a line that is too long has no PLL."""
    values = [f"{value:.{DECIMALS}f}" for value in scored.log_probs or []]
    pll = "" if scored.pll is None else f"{scored.pll:.{DECIMALS}f}"
    line = scored.line
    columns = (line.number, pll, len(line.pieces), len(line.unknown), " ".join(line.pieces), " ".join(values))
    return "\t".join(map(str, columns))
