"""Rows of the vocabulary: fairseq's order ``<s> <pad> </s> <unk>``, pieces, ``<mask>``, then padding | Hugging Face's ids.

The map is that of the tokenizer (:attr:`HuggingFaceTokenizer.hugging_face_ids`), so it lies wherever the tokenizer does.
"""

from typing import Sequence

import torch
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.interop.hugging_face_tokenizer import HuggingFaceTokenizer
from amos_fairseq.interop.piece_spelling import BOS, EOS, PAD, UNK
from amos_fairseq.special_tokens import MASK_SYMBOL

# No input can be formed without these: every text is <s> text </s>, padded.
_NEEDED = (BOS, PAD, EOS)
ABSENT = -1


def embedding_symbols(tokenizer_symbols: Sequence[str]) -> list[str]:
    """The dictionary of every task of this package, in the order of the embedding."""
    return [BOS, PAD, EOS, UNK, *tokenizer_symbols, MASK_SYMBOL]


def row_map(tokenizer: HuggingFaceTokenizer) -> Tensor:
    """[dictionary size] int64: Hugging Face's id of each of our rows, ``ABSENT`` where its tokenizer lacks the role.

    Raises:
        UserError: it has no token for ``<s>``, ``<pad>`` or ``</s>``.
    """
    ids = tokenizer.hugging_face_ids
    absent = [symbol for symbol in _NEEDED if symbol not in ids]
    if absent:
        raise UserError(
            f"the tokenizer has no token in the role of {', '.join(absent)}: name it in special_tokens_map.json "
            "(cls_token or bos_token, pad_token, sep_token or eos_token)"
        )
    return torch.tensor([ids.get(symbol, ABSENT) for symbol in embedding_symbols(tokenizer.dictionary_symbols)])


def to_our_rows(theirs: Tensor, ids: Tensor, fresh: Tensor) -> Tensor:
    """``theirs`` [their rows, ...] in our order, over ``fresh`` [our rows, ...], which fills what they do not have.

    Raises:
        UserError: the tokenizer has an id that the model has no row for, or the rows are of another width.
    """
    if theirs.shape[1:] != fresh.shape[1:]:
        raise UserError(
            f"the vocabulary's rows are {list(theirs.shape[1:])}, the configuration says {list(fresh.shape[1:])}; take "
            "both files from the same model"
        )
    if int(ids.max()) >= len(theirs):
        raise UserError(
            f"the tokenizer has the id {int(ids.max())}, the model only {len(theirs)} rows of vocabulary: "
            "they do not belong together, or the model was not resized after tokens were added"
        )
    ours = fresh.clone()
    known = (ids != ABSENT).nonzero().squeeze(1)
    ours[known] = theirs[ids[known]].to(ours.dtype)
    return ours


def to_hugging_face_rows(ours: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """``ours`` [our rows, ...] in the order of Hugging Face's ids: [num_rows, ...], zeros where an id has no token."""
    theirs = ours.new_zeros(num_rows, *ours.shape[1:])
    known = (ids != ABSENT).nonzero().squeeze(1)
    theirs[ids[known]] = ours[known]
    return theirs


def rows_without_token(num_rows: int, ids: Tensor) -> list[int]:
    """Ids below ``num_rows`` that no token has: a vocabulary that was rounded up."""
    return sorted(set(range(num_rows)) - set(ids.tolist()))
