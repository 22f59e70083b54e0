"""Which part of a labeled row is cut if the model cannot read all of it.

``--shorten-method truncate`` cuts the end of the joined row: of a pair with a long first text nothing of the second remains,
and the last ``</s>`` is lost. Here the longer text is cut first and the special tokens remain, as in Hugging Face's
tokenizers, in ``amos glue`` and in exported folders. The number of cut rows is logged.
"""

import logging
from collections.abc import Callable

from fairseq.data import FairseqDataset

logger = logging.getLogger(__name__)


def cut_longer_text_first(
    stock: Callable[..., FairseqDataset],
    rows: FairseqDataset,
    split: str,
    shortened_splits: str,
    method: str,
    max_tokens: int,
    seed: int,
) -> FairseqDataset:
    """Replace fairseq's truncation in ``sentence_prediction``; other methods are unchanged.

    Args:
        rows: the joined texts.
        shortened_splits: value of ``--shorten-data-split-list``; empty for all splits.
        method: value of ``--shorten-method``.
        max_tokens: value of ``--max-positions``.
    """
    from amos_fairseq.data.labeled_texts import ShortenedTexts  # it imports what the patches must precede

    if method != "truncate" or (shortened_splits and split not in shortened_splits.split(",")):
        return stock(rows, split, shortened_splits, method, max_tokens, seed)
    shortened = ShortenedTexts(rows, max_tokens)
    if shortened.num_cut:
        logger.info(
            f"{split}: {shortened.num_cut:,} of {len(rows):,} rows have more than {max_tokens} tokens; the longer text of a "
            "pair is cut first"
        )
    return shortened
