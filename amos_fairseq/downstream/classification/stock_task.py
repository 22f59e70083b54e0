"""What fairseq's own ``sentence_prediction`` lacks: checks of its files, and a truncation that keeps both texts of a pair.

Damaged data would train another model in silence, or end in a traceback. ``--shorten-method truncate`` cuts the end of the
joined row: of a pair with a long first text nothing of the second remains, and the last ``</s>`` is lost. Here the longer text
is cut first and the special tokens remain, as in Hugging Face's tokenizers, in ``amos glue`` and in exported folders.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq.data import FairseqDataset
from fairseq.tasks import sentence_prediction

from amos_fairseq.compat.patching import Patch, apply_patches
from amos_fairseq.downstream.classification.dataset import ShortenedTexts, check_texts

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
    """Replace the method ``truncate``; ``rows`` are the joined texts, ``shortened_splits`` is empty for all splits."""
    if method != "truncate" or (shortened_splits and split not in shortened_splits.split(",")):
        return stock(rows, split, shortened_splits, method, max_tokens, seed)
    shortened = ShortenedTexts(rows, max_tokens)
    if shortened.num_cut:
        longer = f"{shortened.num_cut:,} of {len(rows):,} rows have more than {max_tokens} tokens"
        logger.info(f"{split}: {longer}; the longer text of a pair is cut first")
    return shortened


def check_labeled_texts(load_dataset: Callable[..., Any], task: Any, split: str, *args: Any, **kwargs: Any) -> Any:
    check_texts(Path(str(task.cfg.data)), split)
    return load_dataset(task, split, *args, **kwargs)


REPLACED = (
    Patch(sentence_prediction, "maybe_shorten_dataset", cut_longer_text_first),
    Patch(sentence_prediction.SentencePredictionTask, "load_dataset", check_labeled_texts),
)
apply_patches(REPLACED)
