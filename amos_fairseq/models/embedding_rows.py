"""How a fairseq dictionary becomes the rows of an embedding."""

from dataclasses import dataclass

import torch
from fairseq.data import Dictionary
from torch import Tensor

from amos_fairseq.special_tokens import special_ids

# Matrix products like whole tiles; the rows beyond the dictionary are never read, targeted or sampled.
ROW_MULTIPLE = 64


@dataclass(frozen=True)
class EmbeddingRows:
    """The number of rows, and those with a special meaning: ``pad``, ``end`` (of a text), and all ``special`` ones.

    The padding rows live here, not in the dictionary, so that every task which loads dict.txt and adds ``<mask>`` builds
    the same shapes.
    """

    num_tokens: int
    pad: int
    end: int
    special: tuple[int, ...]

    @classmethod
    def of(cls, dictionary: Dictionary) -> "EmbeddingRows":
        """``dictionary`` holds ``<mask>`` already (the task adds it)."""
        return cls(len(dictionary), dictionary.pad(), dictionary.eos(), tuple(special_ids(dictionary)))

    @property
    def num_rows(self) -> int:
        return -(-self.num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE

    def never_sampled_mask(self) -> Tensor:
        """[num_rows] bool: special tokens and padding rows, which no generator may propose."""
        rows = torch.zeros(self.num_rows, dtype=torch.bool)
        rows[list(self.special)] = True
        rows[self.num_tokens :] = True
        return rows

    def never_sampled_indices(self) -> Tensor:
        """The same rows, int64."""
        return torch.tensor([*self.special, *range(self.num_tokens, self.num_rows)])
