"""Write ids in the format of ``fairseq-preprocess``, byte for byte, without text files of pieces between."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from amos_fairseq.text.processes import InOrder, use_threads
from amos_fairseq.text.tokenization import Tokenizer, load_tokenizer

# The ids of fairseq's own symbols: every dictionary begins with <s>, <pad>, </s>, <unk>.
END_ID, UNKNOWN_ID, NUM_FAIRSEQ_SYMBOLS = 2, 3, 4
# Maximum lengths of usual encoders. Fine-tuning cuts rows that are longer than the encoder's; here they are counted.
USUAL_MAX_POSITIONS = (64, 128, 256, 512)
_BATCH_ROWS = 1000


class SymbolIds(dict[str, int]):
    """Dictionary symbol -> id; a piece that is not in ``dict.txt`` is unknown."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__((symbol, i) for i, symbol in enumerate(tokenizer.dictionary_symbols, NUM_FAIRSEQ_SYMBOLS))

    def __missing__(self, symbol: str) -> int:
        return UNKNOWN_ID

    def of(self, pieces: Sequence[str]) -> list[int]:
        return list(map(self.__getitem__, pieces))


class BinarizedFile(contextlib.AbstractContextManager):
    """``PREFIX.bin`` and ``PREFIX.idx`` of lines of integers. As a context manager; without an error it completes both.

    ``num_symbols``: of the dictionary, without ``<mask>``; fairseq chooses the integer type by it. None: numbers that are no
    ids, of 32 bits.
    """

    def __init__(self, prefix: Path | str, num_symbols: int | None) -> None:
        from fairseq.data.indexed_dataset import best_fitting_int_dtype  # takes seconds to import

        self._prefix = prefix
        self._type = np.int32 if num_symbols is None else best_fitting_int_dtype(num_symbols)
        self._lengths: list[int] = []
        self._stream = open(f"{prefix}.bin", "wb")  # noqa: SIM115

    def add_lines(self, numbers: np.ndarray, lengths: Sequence[int]) -> None:
        """Append lines, which follow each other in ``numbers`` [sum of lengths]; a line of text ends with ``</s>``.

        Many at once: a single process writes what all others encode.
        """
        self._stream.write(numbers.astype(self._type).tobytes())
        self._lengths += lengths

    def add_line(self, numbers: Sequence[int] | np.ndarray) -> None:
        self.add_lines(np.asarray(numbers, dtype=np.int64), [len(numbers)])

    def __exit__(self, kind: object, *exception: object) -> None:
        self._stream.close()
        if kind is None:
            from fairseq.data.indexed_dataset import MMapIndexedDataset

            with MMapIndexedDataset.Index.writer(f"{self._prefix}.idx", self._type) as index:
                index.write(self._lengths)


_tokenizer: Tokenizer | None = None
_ids: SymbolIds | None = None


def start_encoding_process(tokenizer_directory: Path) -> None:
    """Initialize a process of the pool, with one tokenizer and one thread."""
    global _tokenizer, _ids
    use_threads(1)
    _tokenizer = load_tokenizer(tokenizer_directory)
    _ids = SymbolIds(_tokenizer)


def encode_lines(lines: list[str]) -> list[list[int]]:
    """Return the ids of each line, without ``</s>``, in a process that :func:`start_encoding_process` has initialized."""
    return [_ids.of(pieces) for pieces in _tokenizer.encode_lines(lines)]


def encode_rows(
    rows: Sequence[tuple[str, ...]],
    prefixes: Sequence[Path],
    tokenizer: Tokenizer,
    in_order: InOrder,
    on_done: Callable[[int], object],
) -> dict[str, Any]:
    """Binarize text k of every row into ``prefixes[k]``: a line for each row, ended by ``</s>``.

    ``on_done`` is called with the number of rows newly encoded.

    Returns:
        Counts for ``task.json``. ``longest`` and ``longer_than`` (rows longer than each of ``USUAL_MAX_POSITIONS``) count
        tokens as in fine-tuning: ``<s> A </s>`` or ``<s> A </s> B </s>``. Recipes with a second separator have one token
        more in a pair. ``unknown_share``: of the pieces, those that are not in ``dict.txt``.
    """
    tokens: list[int] = []  # of each row
    unknown = 0
    with contextlib.ExitStack() as stack:
        num_symbols = len(tokenizer) + NUM_FAIRSEQ_SYMBOLS
        files = [stack.enter_context(BinarizedFile(prefix, num_symbols)) for prefix in prefixes]
        for texts, num_unknown in in_order(encode_batch, _batches(rows)):
            for file, (ids, lengths) in zip(files, texts, strict=True):
                file.add_lines(ids, lengths)
            of_batch = [1 + sum(row) for row in zip(*(lengths for _, lengths in texts), strict=True)]
            tokens += of_batch
            unknown += num_unknown
            on_done(len(of_batch))
    pieces = sum(tokens) - (1 + len(prefixes)) * len(tokens)
    return {
        "longest": max(tokens),
        "longer_than": {str(most): sum(length > most for length in tokens) for most in USUAL_MAX_POSITIONS},
        "unknown_share": unknown / max(1, pieces),
    }


def encode_batch(batch: list[tuple[str, ...]]) -> tuple[list[tuple[np.ndarray, list[int]]], int]:
    """Return the ids and lengths of the lines of each text of the rows, and the number of unknown pieces."""
    texts, unknown = [], 0
    for column in zip(*batch, strict=True):
        lines = encode_lines(list(column))
        unknown += sum(line.count(UNKNOWN_ID) for line in lines)
        ids = np.array([index for line in lines for index in (*line, END_ID)], dtype=np.int32)
        texts.append((ids, [len(line) + 1 for line in lines]))
    return texts, unknown


def _batches(rows: Sequence[tuple[str, ...]]) -> Iterator[Sequence[tuple[str, ...]]]:
    for start in range(0, len(rows), _BATCH_ROWS):
        yield rows[start : start + _BATCH_ROWS]
