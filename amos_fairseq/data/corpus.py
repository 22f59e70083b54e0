"""The binarized text of a corpus, broken into blocks."""

import logging
import os

import numpy as np
import torch
from fairseq.data import Dictionary, TokenBlockDataset, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset
from torch import Tensor

from amos_fairseq.errors import UserError

logger = logging.getLogger(__name__)


def require_split(path: str) -> None:
    """:class:`UserError` where ``path`` (DIR/train, DIR/valid) is no binarized text, or one without a token."""
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(path + suffix):
            raise UserError(f"{path}{suffix} is missing: give a directory that prepare.sh or fairseq-preprocess wrote")
    if os.path.getsize(path + ".bin") == 0:
        raise UserError(f"{path}.bin holds no tokens: binarize a text that is not empty")


class MappedBlocks(torch.utils.data.Dataset):
    """Blocks of a memory-mapped text, each one slice of the file.

    fairseq's ``TokenBlockDataset``, which says where they lie, reads a block paragraph by paragraph and joins the pieces: a
    third of what a loader process does.
    """

    def __init__(self, text: MMapIndexedDataset, blocks: TokenBlockDataset) -> None:
        self.text = text
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Tensor:
        """LongTensor [length], as the blocks' own."""
        start, end = (int(place) for place in self.blocks.slice_indices[index])
        dtype = np.dtype(self.text._index.dtype)
        ids = np.frombuffer(self.text._bin_buffer, dtype=dtype, count=end - start, offset=start * dtype.itemsize)
        return torch.from_numpy(ids.astype(np.int64))


def read_blocks(
    path: str, dictionary: Dictionary, tokens_per_block: int, break_mode: str, combine: bool = False
) -> MappedBlocks | TokenBlockDataset:
    """Blocks of up to ``tokens_per_block`` - 1 tokens, since ``<s>`` takes the first place; longer ones are still whole.

    Args:
        path: of the split, without its suffix.
        break_mode: none, complete or complete_doc, as fairseq has them.
        combine: with ``path``1, ``path``2, ... behind it.
    """
    size = tokens_per_block - 1
    tokens = data_utils.load_indexed_dataset(path, dictionary, combine=combine)
    blocks = TokenBlockDataset(
        tokens, tokens.sizes, size, pad=dictionary.pad(), eos=dictionary.eos(), break_mode=break_mode
    )
    cut = int((blocks.sizes > size).sum())
    logger.info(f"{path}: {len(blocks)} blocks of up to {tokens_per_block} tokens, {cut} of them cut to that length")
    return MappedBlocks(tokens, blocks) if isinstance(tokens, MMapIndexedDataset) else blocks
