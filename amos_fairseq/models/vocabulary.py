"""What a model needs to know of a fairseq dictionary."""

from dataclasses import dataclass

import torch
from fairseq.data import Dictionary
from torch import Tensor

# Matrix products like whole tiles; the rows beyond the dictionary are never read, targeted or sampled.
ROW_MULTIPLE = 64
MASK = "<mask>"


@dataclass(frozen=True)
class Vocabulary:
    """Ids of the special tokens and the number of embedding rows.

    The padding rows live here, not in the dictionary, so that every task which loads dict.txt and adds ``<mask>`` builds
    the same shapes.
    """

    num_tokens: int
    pad: int
    mask: int
    special: tuple[int, ...]

    @classmethod
    def of(cls, dictionary: Dictionary) -> "Vocabulary":
        """Raises ValueError if the dictionary has no ``<mask>`` (the task adds it)."""
        mask = dictionary.index(MASK)
        if mask == dictionary.unk():
            raise ValueError("the dictionary has no <mask>; the task must add it after loading dict.txt")
        special = (dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk(), mask)
        return cls(len(dictionary), dictionary.pad(), mask, tuple(sorted(special)))

    @property
    def num_rows(self) -> int:
        return -(-self.num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE

    def unsampled_rows(self) -> Tensor:
        """[num_rows] bool: special tokens and padding rows, which no generator may propose."""
        rows = torch.zeros(self.num_rows, dtype=torch.bool)
        rows[list(self.special)] = True
        rows[self.num_tokens :] = True
        return rows
