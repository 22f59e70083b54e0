"""Write ids in the format of ``fairseq-preprocess``, byte for byte, without text files of pieces between."""

import contextlib
from pathlib import Path
from typing import Dict, List

import numpy as np

from amos_fairseq.tokenization.tokenizer import Tokenizer

# The ids of fairseq's own symbols: every dictionary begins with <s>, <pad>, </s>, <unk>.
END_ID, UNKNOWN_ID, NUM_FAIRSEQ_SYMBOLS = 2, 3, 4


class SymbolIds(Dict[str, int]):
    """Dictionary symbol -> id; a piece that is not in ``dict.txt`` is unknown."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__((symbol, i) for i, symbol in enumerate(tokenizer.dictionary_symbols, NUM_FAIRSEQ_SYMBOLS))

    def __missing__(self, symbol: str) -> int:
        return UNKNOWN_ID


class BinarizedFile(contextlib.AbstractContextManager):
    """``PREFIX.bin`` and ``PREFIX.idx`` of lines of ids. As a context manager; without an error it completes both.

    ``num_symbols``: of the dictionary, without ``<mask>``; fairseq chooses the integer type by it.
    """

    def __init__(self, prefix: Path, num_symbols: int) -> None:
        from fairseq.data.indexed_dataset import best_fitting_int_dtype  # takes seconds to import

        self._prefix, self._type = prefix, best_fitting_int_dtype(num_symbols)
        self._lengths: List[int] = []
        self._stream = open(f"{prefix}.bin", "wb")  # noqa: SIM115

    def add_lines(self, ids: np.ndarray, lengths: List[int]) -> None:
        """Append lines, which follow each other in ``ids`` [sum of lengths]; each ends with ``</s>``.

        Many at once: a single process writes what all others encode.
        """
        self._stream.write(ids.astype(self._type).tobytes())
        self._lengths += lengths

    def __exit__(self, kind: object, *exception: object) -> None:
        self._stream.close()
        if kind is None:
            from fairseq.data.indexed_dataset import MMapIndexedDataset

            with MMapIndexedDataset.Index.writer(f"{self._prefix}.idx", self._type) as index:
                index.write(self._lengths)
