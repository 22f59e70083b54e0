"""Conversion of a tokenizer to a ``tokenizer.json`` of the `tokenizers` library that gives exactly the same ids.

Inputs are ``<s> text </s>`` and ``<s> A </s> B </s>``. Our own tokenizers keep fairseq's ids (``<s>`` 0, ``<pad>`` 1, ``</s>``
2, ``<unk>`` 3, pieces from 4 on, ``<mask>`` last); a Hugging Face tokenizer keeps its own.

One difference is intended. In this package a text that spells ``<mask>`` or ``</s>`` is text; Hugging Face's clients need
``<mask>`` in a text to be the special token. Their option ``split_special_tokens=True`` makes it text.
"""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import tokenizers
import torch
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.special_tokens import MASK_SYMBOL
from amos_fairseq.tokenization.fastbpe_tokenizer import (
    END_OF_WORD,
    FastBPETokenizer,
    basic_rules,
    bpe_model,
    bpe_piece,
    read_merges,
)
from amos_fairseq.tokenization.hugging_face_tokenizer import HuggingFaceTokenizer, row_map
from amos_fairseq.tokenization.sentencepiece_charsmap import exact_normalizer
from amos_fairseq.tokenization.sentencepiece_tokenizer import SentencePieceTokenizer
from amos_fairseq.tokenization.tokenizer import (
    BOS,
    EOS,
    PAD,
    SPECIAL_SYMBOLS,
    UNK,
    Tokenizer,
    unspell_piece,
)

_SPACE = "▁"  # how SentencePiece writes a space in pieces
# Constants of sentencepiece_model.proto.
_BPE, _NORMAL, _USER_DEFINED = 2, 1, 4


class FastTokenizer(NamedTuple):
    """A tokenizer of the library, and how its ids relate to the rows of our embedding.

    Attributes:
        tokenizer: complete, with the template of ``<s> A </s> B </s>``.
        special_tokens: fairseq's symbol -> its token in this tokenizer.
        ids: [dictionary size] int64, the id of each of our rows, -1 where this tokenizer has no token for it.
    """

    tokenizer: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    ids: Tensor

    @property
    def num_rows(self) -> int:
        """Number of rows that an embedding needs: one more than the largest id."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def id_of(self, symbol: str) -> int | None:
        """Return the id of one of fairseq's symbols, or None if the tokenizer lacks the role."""
        return self.tokenizer.token_to_id(self.special_tokens[symbol]) if symbol in self.special_tokens else None


def fast_tokenizer(tokenizer: Tokenizer) -> FastTokenizer:
    """Convert a tokenizer of this package.

    Raises:
        UserError: a tokenizer of this kind, or with these settings, cannot be converted exactly.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        fast = _from_hugging_face(tokenizer)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        fast = _from_pieces(tokenizer, unspell_piece, _from_sentencepiece)
    elif isinstance(tokenizer, FastBPETokenizer):
        fast = _from_pieces(tokenizer, lambda symbol: bpe_piece(unspell_piece(symbol)), _from_fastbpe)
    else:
        raise UserError(
            f"a tokenizer of kind {tokenizer.kind} has steps that a tokenizer.json cannot express: it cannot be exported"
        )
    begin, end = fast.special_tokens[BOS], fast.special_tokens[EOS]
    fast.tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{begin}:0", "$A:0", f"{end}:0"],
        pair=[f"{begin}:0", "$A:0", f"{end}:0", "$B:1", f"{end}:1"],
        special_tokens=[(token, fast.tokenizer.token_to_id(token)) for token in (begin, end)],
    )
    return fast


def token_ids(pieces: list[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return token -> id in the order of our embedding, and fairseq's symbol -> its token.

    A symbol that is also a piece (a text about HTML makes ``<s>`` one) gets more brackets.
    """
    special_tokens = {}
    for symbol in SPECIAL_SYMBOLS:
        special_tokens[symbol] = symbol
        while special_tokens[symbol] in pieces:
            special_tokens[symbol] = f"<{special_tokens[symbol]}>"
    *first, mask = special_tokens.values()
    return {token: index for index, token in enumerate([*first, *pieces, mask])}, special_tokens


def _from_pieces(
    tokenizer: Tokenizer,
    piece_of: Callable[[str], str],
    convert: Callable[[Tokenizer, dict[str, int], str], tokenizers.Tokenizer],
) -> FastTokenizer:
    """Convert a tokenizer that was learned by this package; ``piece_of``: dictionary symbol -> piece of the library's model."""
    ids, special_tokens = token_ids([piece_of(symbol) for symbol in tokenizer.dictionary_symbols])
    fast = convert(tokenizer, ids, special_tokens[UNK])
    for symbol, token in special_tokens.items():
        # In SentencePiece a space belongs to the word after it, so <mask>, which replaces a word, includes the space.
        takes_space = symbol == MASK_SYMBOL and isinstance(tokenizer, SentencePieceTokenizer)
        fast.add_special_tokens([AddedToken(token, lstrip=takes_space, normalized=False, special=True)])
    return FastTokenizer(fast, special_tokens, torch.arange(len(ids)))


def _from_fastbpe(tokenizer: FastBPETokenizer, vocabulary: dict[str, int], unknown: str) -> tokenizers.Tokenizer:
    fast = tokenizers.Tokenizer(bpe_model(vocabulary, read_merges(tokenizer.model), unknown))
    fast.normalizer, fast.pre_tokenizer = basic_rules(tokenizer.cased)
    fast.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    return fast


def _from_sentencepiece(
    tokenizer: SentencePieceTokenizer, vocabulary: dict[str, int], unknown: str
) -> tokenizers.Tokenizer:
    """Convert normalizer, word splitting, merges and decoder; the caller adds the special tokens.

    ``<mask>`` may split a text: only the beginning of the text gets SentencePiece's first space, not the part after a mask.

    Raises:
        UserError: the model is of a kind, or has settings, that cannot be converted exactly.
    """
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(tokenizer.model)
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    alphabet = {piece for piece in scores if len(piece) == 1}
    _refuse_inexact(proto, scores, alphabet)
    # SentencePiece makes one piece of a run of unknown characters, hence fuse_unk.
    fast = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(scores), unk_token=unknown, fuse_unk=True))
    charsmap = proto.normalizer_spec.precompiled_charsmap
    single_spaces, no_space_at_end = normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r" +\z"), "")
    rules = exact_normalizer(charsmap, alphabet | {" "})
    fast.normalizer = normalizers.Sequence([*rules, single_spaces, no_space_at_end])
    # The library caches words. It must encode whole lines if a piece or a run of unknown characters may cross words.
    words = _SPACE in alphabet and all(_SPACE not in piece[1:] for piece in scores)
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=words)
    fast.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="first")
    return fast


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return every way to join two pieces to a third, best result first: the order in which SentencePiece merges."""
    from transformers.convert_slow_tokenizer import generate_merges

    return generate_merges({piece: index for index, piece in enumerate(scores)}, scores)


def _refuse_inexact(proto: sentencepiece_model_pb2.ModelProto, scores: Mapping[str, float], alphabet: set[str]) -> None:
    normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
    obstacles = {
        "is not a BPE model": trainer.model_type != _BPE,
        "falls back to bytes": trainer.byte_fallback,
        "has user-defined pieces": any(piece.type == _USER_DEFINED for piece in proto.pieces),
        "puts spaces at the end of words": trainer.treat_whitespace_as_suffix,
        "adds no space before the first word": not normalizer.add_dummy_prefix,
        "keeps runs of spaces": not normalizer.remove_extra_whitespaces,
        "does not mark spaces": not normalizer.escape_whitespaces,
        "has pieces of characters that are not pieces themselves": not set("".join(scores)) <= alphabet,
    }
    found = next((name for name, applies in obstacles.items() if applies), None)
    if found is not None:
        raise UserError(
            f"the SentencePiece model {found}: no tokenizer.json is known that gives the same ids; models that prepare.sh "
            "learns can be exported"
        )


def _from_hugging_face(tokenizer: HuggingFaceTokenizer) -> FastTokenizer:
    """Return the library's own file without truncation and padding; tokens that stand for our symbols become special."""
    fast = tokenizers.Tokenizer.from_str(tokenizer.model.decode("utf-8"))
    fast.no_truncation()
    fast.no_padding()
    present = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    for content in tokenizer.special_tokens.values():
        token = present.get(content) or AddedToken(content, normalized=False)
        token.special = True
        fast.add_special_tokens([token])
    return FastTokenizer(fast, tokenizer.special_tokens, row_map(tokenizer))


def with_padding_at_1(fast: FastTokenizer) -> FastTokenizer:
    """Exchange the ids of ``<pad>`` and of the token at 1: MPNet and RoBERTa compute positions for a padding id of 1.

    Returns ``fast`` itself if ``<pad>`` has the id 1 already, as in our own tokenizers.

    Raises:
        UserError: one of the two tokens is not in the model's own vocabulary.
    """
    pad = fast.id_of(PAD)
    if pad == 1:
        return fast
    exchanged = {pad: 1, 1: pad}
    content = json.loads(fast.tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, dict):
        content["model"]["vocab"] = {token: exchanged.get(index, index) for token, index in vocabulary.items()}
    else:  # unigram: the position is the id
        vocabulary[1], vocabulary[pad] = vocabulary[pad], vocabulary[1]
        content["model"]["unk_id"] = exchanged.get(content["model"]["unk_id"], content["model"]["unk_id"])
    for token in content["added_tokens"]:
        token["id"] = exchanged.get(token["id"], token["id"])
    content["added_tokens"].sort(key=lambda token: token["id"])
    for token in content["post_processor"]["special_tokens"].values():
        token["ids"] = [exchanged.get(index, index) for index in token["ids"]]
    ids = fast.ids.clone().apply_(lambda index: exchanged.get(index, index))
    result = FastTokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), fast.special_tokens, ids)
    if result.id_of(PAD) != 1:
        raise UserError(
            f"the tokenizer's padding token has the id {pad}, this class needs it at 1, and it cannot be moved because it "
            "was added to the vocabulary later"
        )
    return result
