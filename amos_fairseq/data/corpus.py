"""The binarized text of a corpus, broken into blocks."""

import logging
import os

from fairseq.data import Dictionary, TokenBlockDataset, data_utils

from amos_fairseq.errors import UserError

logger = logging.getLogger(__name__)


def require_split(path: str) -> None:
    """:class:`UserError` where ``path`` (DIR/train, DIR/valid) is no binarized text, or one without a token."""
    for suffix in (".bin", ".idx"):
        if not os.path.isfile(path + suffix):
            raise UserError(f"{path}{suffix} is missing: give a directory that prepare.sh or fairseq-preprocess wrote")
    if os.path.getsize(path + ".bin") == 0:
        raise UserError(f"{path}.bin holds no tokens: binarize a text that is not empty")


def read_blocks(
    path: str, dictionary: Dictionary, tokens_per_block: int, break_mode: str, combine: bool = False
) -> TokenBlockDataset:
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
    return blocks
