"""Write ids in the format of ``fairseq-preprocess``, byte for byte, without text files of pieces between."""

import contextlib
from pathlib import Path
from typing import Dict, Sequence

import numpy as np
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder, best_fitting_int_dtype

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
        self._prefix = prefix
        self._builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=best_fitting_int_dtype(num_symbols))

    def add_lines(self, ids: np.ndarray, lengths: Sequence[int]) -> None:
        """Append lines, which follow each other in ``ids`` [sum of lengths], int32; each ends with ``</s>``."""
        for line in torch.from_numpy(ids).split(list(lengths)):
            self._builder.add_item(line)

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self._builder.finalize(f"{self._prefix}.idx")
