"""``amos score FILE``: the pseudo-log-likelihood of each line, PLL(x) = sum_t log p(x_t | all other tokens) (thesis, 5.4.5).

Lines are processed in windows of bounded work, so a file of any size needs the memory of one window.
"""

import contextlib
import itertools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import whole_file
from amos_fairseq.scoring.token_scorers import TokenScorer

STDIN = "-"
DECIMALS = 6  # about the precision of float32 for values around 10
LINES_ENCODED_AT_ONCE = 256  # tokenizers are faster with many lines
LINES_PER_WINDOW = 4096
# A window has the work of this many batches, enough to batch lines of similar length.
BATCHES_PER_WINDOW = 32


@dataclass(frozen=True)
class EncodedLine:
    """A line with its number, from 1 on, and its pieces as spelled in ``dict.txt``.

    Attributes:
        unknown: index of each piece that the vocabulary does not contain -> its number of characters.
    """

    number: int
    text: str
    pieces: list[str]
    tokens: Tensor  # [pieces + 2] int64: <s>, the pieces, </s>
    unknown: dict[int, int] = field(default_factory=dict)


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

    No objective trains the probability of ``<unk>``, which is never a target. Instead ``<unk>`` is one of the entries of the
    vocabulary with equal probability, and each of its characters one of Unicode's 1,114,112 code points:

        log p = -log V - n log 1,114,112     n characters, V entries of the dictionary

    With 32,768 entries one character scores -24.3, far below a uniform guess of a piece (-10.4), so a text does not improve by
    characters that the model cannot read.
    """
    return -math.log(vocabulary_size) - num_characters * math.log(sys.maxunicode + 1)


class LineScorer:
    """Scores lines with the model of a checkpoint, on the model's device.

    Args:
        place: number of a line -> what errors call it.
    """

    def __init__(
        self, loaded: LoadedCheckpoint, token_scorer: TokenScorer, place: Callable[[int], str] = "line {}".format
    ):
        self.loaded = loaded
        self.token_scorer = token_scorer
        self._place = place
        self.max_tokens: int = loaded.model.max_positions()

    def score(self, texts: Iterable[str], num_texts: int) -> Iterator[ScoredLine]:
        """Yield all texts scored, in their order, with a progress bar in a terminal."""
        lines = encoded_lines(self.loaded, texts)
        limit = BATCHES_PER_WINDOW * self.token_scorer.tokens_per_batch
        with tqdm(total=num_texts, desc="score", unit=" lines", disable=None, file=sys.stderr) as bar:
            for window in windows(lines, self._cost, limit):
                yield from self._score(window)
                bar.update(len(window))

    def _fits(self, line: EncodedLine) -> bool:
        return len(line.tokens) <= self.max_tokens

    def _cost(self, line: EncodedLine) -> int:
        """Return the number of tokens that the model processes for a line, over all passes."""
        return len(line.tokens) * self.token_scorer.num_passes(line.tokens) if self._fits(line) else 0

    @torch.inference_mode()
    def _score(self, window: list[EncodedLine]) -> list[ScoredLine]:
        values = iter(self.token_scorer.log_probs([line.tokens for line in window if self._fits(line)]))
        return [ScoredLine(line, self._of_pieces(line, next(values)) if self._fits(line) else None) for line in window]

    def _of_pieces(self, line: EncodedLine, values: Tensor) -> list[float]:
        """Convert [L] values, with ``<s>`` and ``</s>``, to one score per piece."""
        if not values.isfinite().all():
            piece = line.pieces[int((~values.isfinite()).nonzero()[0]) - 1]
            raise UserError(
                f"{self.loaded.file} has no finite score for {piece!r} in {self._place(line.number)}: its training diverged "
                "(use an earlier checkpoint), or its generator never predicts this piece"
            )
        return with_unknown_pieces(values.tolist()[1:-1], line, len(self.loaded.dictionary))


def with_unknown_pieces(scores: list[float], line: EncodedLine, vocabulary_size: int) -> list[float]:
    """Return one score per piece, those of unknown pieces replaced by :func:`unknown_log_prob`."""
    unknown = {index: unknown_log_prob(length, vocabulary_size) for index, length in line.unknown.items()}
    return [unknown.get(index, score) for index, score in enumerate(scores)]


def read_texts(file: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without their line ends."""
    with explain_os_errors(f"{file}: the text cannot be read"), file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{file}, line {number}: not UTF-8 at byte {error.start}; convert the file, for example with iconv"
                ) from error
            yield text.rstrip("\r\n")


def num_lines(file: Path) -> int:
    """Count the lines of a file, including a last one without a line end; raise :class:`UserError` if it is unreadable."""
    count, last = 0, b"\n"
    with explain_os_errors(f"{file}: the text cannot be read"), file.open("rb") as stream:
        while part := stream.read(1 << 20):
            count, last = count + part.count(b"\n"), part[-1:]
    return count + (last != b"\n")


def encoded_lines(loaded: LoadedCheckpoint, texts: Iterable[str]) -> Iterator[EncodedLine]:
    """Encode each text as ``<s> pieces </s>``; line numbers start at 1."""
    dictionary = loaded.dictionary
    texts, numbers = iter(texts), itertools.count(1)
    while chunk := list(itertools.islice(texts, LINES_ENCODED_AT_ONCE)):
        for text, pieces in zip(chunk, loaded.tokenizer.encode_lines(chunk), strict=True):
            ids = [dictionary.bos(), *map(dictionary.index, pieces), dictionary.eos()]
            unknown = {}
            if dictionary.unk() in ids:  # only then, because offsets are slower
                spans = zip(ids[1:-1], loaded.tokenizer.encode_with_offsets(text), strict=True)
                lengths = [(id_, max(1, end - start)) for id_, (_, start, end) in spans]
                unknown = {index: length for index, (id_, length) in enumerate(lengths) if id_ == dictionary.unk()}
            yield EncodedLine(next(numbers), text, pieces, torch.tensor(ids), unknown)


def windows(
    lines: Iterable[EncodedLine], cost: Callable[[EncodedLine], int], limit: int
) -> Iterator[list[EncodedLine]]:
    """Group consecutive lines until their ``cost`` reaches ``limit``; a window has 1 to 4,096 lines."""
    window: list[EncodedLine] = []
    spent = 0
    for line in lines:
        window.append(line)
        spent += cost(line)
        if spent >= limit or len(window) == LINES_PER_WINDOW:
            yield window
            window, spent = [], 0
    if window:
        yield window


def score_file(scorer: LineScorer, file: str, format_: str, out: Path | None) -> None:
    """Write a row for each line of ``file`` (``-``: the standard input), in its order, to ``out`` or the terminal."""
    notices = Notices(scorer.max_tokens)
    with stored_input(file) as path:
        scored = map(notices.note, scorer.score(read_texts(path), num_lines(path)))
        rows = map(json_row, scored) if format_ == "jsonl" else itertools.chain([TSV_HEADER], map(tsv_row, scored))
        if out is None:
            for row in rows:
                print(row, flush=True)
        else:
            with (
                explain_os_errors(f"{out} cannot be written", ": free some space, or give another --out"),
                whole_file(str(out)) as unfinished,
                open(unfinished, "x", encoding="utf-8") as target,
            ):
                target.writelines(f"{row}\n" for row in rows)
    notices.show()


@contextlib.contextmanager
def stored_input(file: str) -> Iterator[Path]:
    """Yield the path of a text that can be read twice, since its lines are counted first: ``file``, or a copy of a stream."""
    path = Path(file)
    is_stream = file == STDIN or (path.exists() and not path.is_file() and not path.is_dir())
    if not is_stream:
        yield path
        return
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "stdin"
        with (
            explain_os_errors(f"the input {file} cannot be copied to {directory}"),
            copy.open("wb") as target,
            contextlib.nullcontext(sys.stdin.buffer) if file == STDIN else path.open("rb") as source,
        ):
            shutil.copyfileobj(source, target)
        yield copy


class Notices:
    """What is unusual in the lines that were scored, printed after the last one."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_too_long = self.first_too_long = self.num_unknown = 0

    def note(self, scored: ScoredLine) -> ScoredLine:
        self.num_unknown += len(scored.line.unknown)
        if scored.pll is None:
            self.first_too_long = self.first_too_long or scored.line.number
            self.num_too_long += 1
        return scored

    def show(self) -> None:
        if self.num_too_long:
            print(
                f"lines without a score, longer than the model's limit of {self.max_tokens} tokens: {self.num_too_long}, "
                f"the first is line {self.first_too_long}",
                file=sys.stderr,
            )
        if self.num_unknown:
            print(f"pieces unknown to the vocabulary, scored as random characters: {self.num_unknown}", file=sys.stderr)


TSV_HEADER = "line\tpll\tnum_pieces\tnum_unknown\tpieces\tlog_probs"


def tsv_row(scored: ScoredLine) -> str:
    """Format number, PLL, number of pieces and of unknown pieces, the pieces, and the log-probability of each.

    Spaces separate pieces and values, since pieces contain no space. PLL and values of a line that is too long for the model
    are empty.
    """
    values = [f"{value:.{DECIMALS}f}" for value in scored.log_probs or []]
    pll = "" if scored.pll is None else f"{scored.pll:.{DECIMALS}f}"
    line = scored.line
    columns = (line.number, pll, len(line.pieces), len(line.unknown), " ".join(line.pieces), " ".join(values))
    return "\t".join(map(str, columns))


def json_row(scored: ScoredLine) -> str:
    """Format a JSON object that also holds the text; PLL and values of a line that is too long are null."""
    values = scored.log_probs
    record = {
        "line": scored.line.number,
        "text": scored.line.text,
        "pll": None if scored.pll is None else round(scored.pll, DECIMALS),
        "num_unknown": len(scored.line.unknown),
        "pieces": scored.line.pieces,
        "log_probs": None if values is None else [round(value, DECIMALS) for value in values],
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)
