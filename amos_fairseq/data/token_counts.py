"""How often each token of the vocabulary stands in a binarized text."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

# Lines that are counted at once: enough that counting, not the loop, takes the time; a few MB.
LINES_AT_ONCE = 10_000


def count_tokens(texts: Iterable[Any], num_tokens: int) -> Tensor:
    """Counts of all ids below ``num_tokens``: int64 [num_tokens]; a progress bar appears where it takes long.

    Ids beyond, of another dictionary, are refused where blocks are read.

    Args:
        texts: fairseq's indexed datasets; what each gives by index are one-dimensional integer tensors, its lines.
        num_tokens: of the dictionary that binarized them.
    """
    counts = torch.zeros(num_tokens, dtype=torch.int64)
    for text in texts:
        lines = (text[index] for index in tqdm(range(len(text)), "counting tokens", unit="line", delay=5, leave=False))
        while batch := list(islice(lines, LINES_AT_ONCE)):
            counts += torch.bincount(torch.cat(batch).long(), minlength=num_tokens)[:num_tokens]
    return counts
