"""Encode rows to lines of pieces with all processes, and count their lengths."""

from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from amos_fairseq.tokenization import Tokenizer, load_tokenizer
from preprocess.common.processes import ordered_results, use_threads
from preprocess.glue.tables import Row

# The maximum length of most pretrained encoders, and the default of --max-positions in fine-tuning.
USUAL_MAX_POSITIONS = 512
_BATCH_ROWS = 1000

_tokenizer: Optional[Tokenizer] = None
_symbols: frozenset = frozenset()


@dataclass
class Counts:
    """``pieces[k]``: pieces of text k, without ``</s>``; ``unknown``: those of them that are not in ``dict.txt``.

    ``longest`` and ``longer`` (rows longer than ``USUAL_MAX_POSITIONS``) count tokens as in fine-tuning:
    ``<s> A </s>`` or ``<s> A </s> B </s>``.
    """

    pieces: List[int]
    rows: int = 0
    unknown: int = 0
    longest: int = 0
    longer: int = 0

    def add(self, pieces_of_texts: List[List[str]]) -> None:
        lengths = [len(pieces) for pieces in pieces_of_texts]
        self.pieces = [total + length for total, length in zip(self.pieces, lengths, strict=True)]
        tokens = 1 + sum(length + 1 for length in lengths)
        self.rows += 1
        self.longest = max(self.longest, tokens)
        self.longer += tokens > USUAL_MAX_POSITIONS
        self.unknown += sum(piece not in _symbols for pieces in pieces_of_texts for piece in pieces)

    def merge(self, other: "Counts") -> None:
        self.pieces = [a + b for a, b in zip(self.pieces, other.pieces, strict=True)]
        self.rows += other.rows
        self.unknown += other.unknown
        self.longest = max(self.longest, other.longest)
        self.longer += other.longer

    def describe(self) -> Dict[str, Any]:
        """Return the counts for ``task.json``."""
        return {
            "longest": self.longest,
            f"longer_than_{USUAL_MAX_POSITIONS}": self.longer,
            "unknown_share": self.unknown / max(1, sum(self.pieces)),
        }


def start_encoding_process(tokenizer_directory: str) -> None:
    """Initialize a process of the pool, with one tokenizer and one thread."""
    global _tokenizer, _symbols
    use_threads(1)
    _tokenizer = load_tokenizer(tokenizer_directory)
    _symbols = frozenset(_tokenizer.dictionary_symbols)


def encode_rows(
    rows: List[Row], targets: List[Path], pool: Executor, processes: int, on_done: Callable[[int], object]
) -> Counts:
    """Write text k of every row to ``targets[k]``: one row per line, pieces separated by spaces.

    An empty text becomes an empty line. ``on_done`` is called with the number of rows newly encoded.
    """
    total = Counts([0] * len(targets))
    streams = [open(target, "w", encoding="utf-8", newline="\n") for target in targets]  # noqa: SIM115
    try:
        for texts, counts in ordered_results(pool, processes, encode_batch, _batches(rows)):
            for stream, text in zip(streams, texts, strict=True):
                stream.write(text)
            total.merge(counts)
            on_done(counts.rows)
    finally:
        for stream in streams:
            stream.close()
    return total


def encode_batch(batch: List[Tuple[str, ...]]) -> Tuple[List[str], Counts]:
    """Return the encoded lines of each text of the rows, and the counts of the batch."""
    columns = [_tokenizer.encode_lines(list(column)) for column in zip(*batch, strict=True)]
    counts = Counts([0] * len(columns))
    for row in zip(*columns, strict=True):
        counts.add(list(row))
    return ["".join(" ".join(pieces) + "\n" for pieces in column) for column in columns], counts


def _batches(rows: List[Row]) -> Iterator[List[Tuple[str, ...]]]:
    for start in range(0, len(rows), _BATCH_ROWS):
        yield [row.texts for row in rows[start : start + _BATCH_ROWS]]
