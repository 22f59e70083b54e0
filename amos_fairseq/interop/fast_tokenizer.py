"""``tokenizer.json``: a tokenizer of the `tokenizers` library that gives the very ids that our models read.

``<s> text </s>`` and ``<s> A </s> B </s>``; our own tokenizers keep fairseq's ids (``<s>`` 0, ``<pad>`` 1, ``</s>`` 2,
``<unk>`` 3, pieces from 4 on, ``<mask>`` last), a Hugging Face tokenizer its own.

One difference is meant. Here a text that spells ``<mask>`` or ``</s>`` is text; Hugging Face's clients need ``<mask>`` in a
text to be the special token. Their ``split_special_tokens=True`` makes it text again.
"""

import json
from typing import Callable, Collection, Dict, NamedTuple

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, processors
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.interop.fast_tokenizer_sentencepiece import sentencepiece_as_fast
from amos_fairseq.interop.fastbpe_tokenizer import END_OF_WORD, FastBPETokenizer, basic_rules, bpe_piece
from amos_fairseq.interop.hugging_face_rows import embedding_symbols, row_map
from amos_fairseq.interop.hugging_face_tokenizer import HuggingFaceTokenizer
from amos_fairseq.interop.piece_spelling import BOS, EOS, PAD, SPECIAL_SYMBOLS, UNK, unspell_piece
from amos_fairseq.interop.sentencepiece_tokenizer import SentencePieceTokenizer
from amos_fairseq.interop.tokenizer_base import Tokenizer
from amos_fairseq.special_tokens import MASK_SYMBOL


class FastTokenizer(NamedTuple):
    """A complete tokenizer, and how its ids relate to our rows.

    ``special_tokens``: fairseq's symbol to the token that stands for it here. ``ids``: [dictionary size] int64, the id of
    each of our rows, -1 where this tokenizer has no token for it.
    """

    tokenizer: tokenizers.Tokenizer
    special_tokens: Dict[str, str]
    ids: Tensor

    @property
    def num_rows(self) -> int:
        """Rows that an embedding needs: one more than the largest id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def id_of(self, symbol: str) -> int | None:
        """The id that stands for one of fairseq's symbols, None where the tokenizer lacks the role."""
        return self.tokenizer.token_to_id(self.special_tokens[symbol]) if symbol in self.special_tokens else None


def fast_tokenizer(tokenizer: Tokenizer) -> FastTokenizer:
    """The fast tokenizer of a tokenizer of ours.

    Raises:
        UserError: a tokenizer of this kind, or with these settings, has no exact counterpart.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        fast = _of_hugging_face(tokenizer)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        fast = _of_pieces(tokenizer, unspell_piece)
    elif isinstance(tokenizer, FastBPETokenizer):
        fast = _of_pieces(tokenizer, lambda symbol: bpe_piece(unspell_piece(symbol)))
    else:
        raise UserError(
            f"a tokenizer of kind {tokenizer.kind} treats text in ways that a tokenizer.json cannot: it cannot be exported"
        )
    begin, end = fast.special_tokens[BOS], fast.special_tokens[EOS]
    fast.tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{begin}:0", "$A:0", f"{end}:0"],
        pair=[f"{begin}:0", "$A:0", f"{end}:0", "$B:1", f"{end}:1"],
        special_tokens=[(token, fast.tokenizer.token_to_id(token)) for token in (begin, end)],
    )
    return fast


def with_padding_at_1(fast: FastTokenizer) -> FastTokenizer:
    """Exchange the ids of ``<pad>`` and of the token at 1: MPNet and RoBERTa count positions around a padding id of 1.

    Nothing changes where it is there already, as with our own tokenizers.

    Raises:
        UserError: one of the two tokens is not in the model's own vocabulary.
    """
    pad = fast.id_of(PAD)
    if pad == 1:
        return fast
    other = {pad: 1, 1: pad}
    content = json.loads(fast.tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {token: other.get(index, index) for token, index in vocabulary.items()}
    else:  # unigram: the place is the id
        vocabulary[1], vocabulary[pad] = vocabulary[pad], vocabulary[1]
        content["model"]["unk_id"] = other.get(content["model"]["unk_id"], content["model"]["unk_id"])
    for token in content["added_tokens"]:
        token["id"] = other.get(token["id"], token["id"])
    content["added_tokens"].sort(key=lambda token: token["id"])
    for token in content["post_processor"]["special_tokens"].values():
        token["ids"] = [other.get(index, index) for index in token["ids"]]
    exchanged = tokenizers.Tokenizer.from_str(json.dumps(content))
    ids = fast.ids.clone().apply_(lambda index: other.get(index, index))
    result = FastTokenizer(exchanged, fast.special_tokens, ids)
    if result.id_of(PAD) != 1:
        raise UserError(
            f"the tokenizer's padding token has the id {pad}, this class needs it at 1, and it cannot be moved as it was "
            "added to the vocabulary later"
        )
    return result


def _of_pieces(tokenizer: Tokenizer, piece_of: Callable[[str], str]) -> FastTokenizer:
    pieces = [piece_of(symbol) for symbol in tokenizer.dictionary_symbols]
    special_tokens = free_spellings(set(pieces))
    order = [special_tokens.get(symbol, symbol) for symbol in embedding_symbols([])]
    order[-1:-1] = pieces  # <mask> stays last
    vocabulary = {token: index for index, token in enumerate(order)}
    build = sentencepiece_as_fast if tokenizer.kind == SentencePieceTokenizer.kind else _fastbpe_as_fast
    fast = build(tokenizer, vocabulary, special_tokens[UNK])
    for symbol, token in special_tokens.items():
        # In SentencePiece's vocabulary a space belongs to the word after it, so a masked word has taken it.
        takes_space = symbol == MASK_SYMBOL and tokenizer.kind == SentencePieceTokenizer.kind
        fast.add_special_tokens([AddedToken(token, lstrip=takes_space, normalized=False, special=True)])
    return FastTokenizer(fast, special_tokens, torch.arange(len(order)))


def free_spellings(pieces: Collection[str]) -> Dict[str, str]:
    """fairseq's symbols as they are; in another pair of brackets where a text about HTML has made ``<s>`` a piece."""
    spellings = {}
    for symbol in SPECIAL_SYMBOLS:
        spellings[symbol] = symbol
        while spellings[symbol] in pieces:
            spellings[symbol] = f"<{spellings[symbol]}>"
    return spellings


def _fastbpe_as_fast(tokenizer: FastBPETokenizer, vocabulary: Dict[str, int], unknown: str) -> tokenizers.Tokenizer:
    merges = [tuple(line.split(" ")[:2]) for line in tokenizer.model.decode("utf-8").split("\n") if line]
    # Without fuse_unk each unknown character is a token of its own, as in fastBPE.
    model = models.BPE(vocabulary, merges, unk_token=unknown, end_of_word_suffix=END_OF_WORD, fuse_unk=False)
    fast = tokenizers.Tokenizer(model)
    fast.normalizer, fast.pre_tokenizer = basic_rules(tokenizer.cased)
    fast.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    return fast


def _of_hugging_face(tokenizer: HuggingFaceTokenizer) -> FastTokenizer:
    """The library's own file, without its lengths; tokens that stand for our symbols are special if they were not."""
    fast = tokenizers.Tokenizer.from_str(tokenizer.model.decode("utf-8"))
    fast.no_truncation()
    fast.no_padding()
    present = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    for content in tokenizer.special_tokens.values():
        token = present.get(content) or AddedToken(content, normalized=False)
        token.special = True
        fast.add_special_tokens([token])
    return FastTokenizer(fast, tokenizer.special_tokens, row_map(tokenizer))
