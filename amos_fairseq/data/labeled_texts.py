"""Inputs of one or two texts for ``sentence_prediction``: ``<s> A </s>`` or ``<s> A </s> B </s>``, cut to the model's length.

With ``--separator-token 2`` a second ``</s>`` precedes B: ``<s> A </s> </s> B </s>``.
"""

from pathlib import Path

import numpy as np
import torch
from fairseq.data import BaseWrapperDataset, ConcatSentencesDataset, FairseqDataset, PrependTokenDataset
from torch import Tensor

from amos_fairseq.data.corpus import check_prepared, require_split
from amos_fairseq.errors import UserError
from amos_fairseq.tokenization.truncation import kept_lengths

TASK_FILE = "task.json"  # what amos prepare glue writes beside them


def check_texts(directory: Path, split: str) -> None:
    """Check the files of a split without decoding them; raise :class:`UserError` if one is damaged."""
    check_prepared(directory, TASK_FILE, split)
    for path in sorted(directory.glob("*/*.idx")):
        if path.stem == split:
            require_split(str(path.with_suffix("")))


def join_texts(texts: list[FairseqDataset], bos: int, separator: int | None) -> FairseqDataset:
    """Join the texts of each row as ``sentence_prediction`` does.

    Args:
        texts: one or two datasets of rows that end in ``</s>``.
        bos: value of ``--init-token``.
        separator: value of ``--separator-token``; None for no additional token before the second text.
    """
    first, *second = texts
    first = PrependTokenDataset(first, bos)
    if not second:
        return first
    return ConcatSentencesDataset(first, second[0] if separator is None else PrependTokenDataset(second[0], separator))


class ShortenedTexts(BaseWrapperDataset):
    """Rows of one or two texts, cut to ``max_tokens`` by :func:`kept_lengths`; all special tokens remain.

    Args:
        rows: as :func:`join_texts`, or the task itself, joins them.
        max_tokens: longest input of the model.

    Raises:
        UserError: ``max_tokens`` leaves no room for a token of each text.
    """

    def __init__(self, rows: FairseqDataset, max_tokens: int) -> None:
        super().__init__(rows)
        self._texts = rows.datasets if isinstance(rows, ConcatSentencesDataset) else [rows]
        self._starts = [int(isinstance(text, PrependTokenDataset)) for text in self._texts]
        self._room = max_tokens - sum(self._starts) - len(self._texts)
        if self._room < len(self._texts):
            raise UserError(f"--max-positions {max_tokens} leaves no room for text beside the special tokens: raise it")
        self.max_tokens = max_tokens

    @property
    def num_cut(self) -> int:
        """Number of rows that are longer than ``max_tokens``."""
        return int(np.count_nonzero(self.dataset.sizes > self.max_tokens))

    @property
    def sizes(self) -> np.ndarray:
        return np.minimum(self.dataset.sizes, self.max_tokens)

    def __getitem__(self, index: int) -> Tensor:
        """Return one row: [L] int64."""
        texts = [text[index] for text in self._texts]
        lengths = [len(text) - start - 1 for text, start in zip(texts, self._starts, strict=True)]
        kept = kept_lengths(lengths, self._room)
        parts = zip(texts, self._starts, kept, strict=True)
        return torch.cat([part for text, start, length in parts for part in (text[: start + length], text[-1:])])
