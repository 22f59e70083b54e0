"""Conversion of a SentencePiece BPE model to a ``tokenizer.json`` that splits every text into the same pieces.

SentencePiece only learns. What it learns is converted once, and all later steps use the ``tokenizer.json``. Its ids are the
rows of our embedding: ``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3, pieces from 4 on,
``<mask>`` last.

It splits a text at its spaces before it looks for pieces, so words can be encoded separately.
"""

from collections.abc import Mapping, Sequence

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from amos_fairseq.text import MASK_SYMBOL
from amos_fairseq.text.tokenization.fast_tokenizer import SENTENCEPIECE, FastTokenizer, frame_inputs
from amos_fairseq.text.tokenization.tokenizer import SPECIAL_SYMBOLS, UNK

SPACE = "▁"  # how SentencePiece writes a space in pieces
_NORMAL = 1  # the type of a piece in sentencepiece_model.proto
# Sets of SentencePiece's nmt rules, completed: all control characters, and every kind of space. The zero-width non-joiner, a
# space in these rules, is kept: words of Persian contain it.
_CONTROL = r"[\x00-\x08\x0e-\x1f\x7f\x{80}-\x{84}\x{86}-\x{9f}]"
_OTHER_SPACE = r"[\s\x{200b}\x{200e}\x{200f}\x{2581}\x{feff}\x{fffd}&&[^ ]]"


def sentencepiece_rules(cased: bool) -> normalizers.Normalizer:
    """The normalization of the text that SentencePiece learns from: NFC, no control characters, single spaces.

    Not SentencePiece's NFKC, which changes what a text says: "½" to "1⁄2", "①" to "1", "²" to "2", and Chinese punctuation.
    """
    return normalizers.Sequence(
        [
            # The pre-tokenizer recognizes the beginning of a text by its first character, which must not be removed.
            normalizers.Replace(Regex(rf"\A{_CONTROL}+"), " "),
            normalizers.Replace(Regex(_CONTROL), ""),
            normalizers.NFC(),
            *([] if cased else [normalizers.Lowercase()]),
            normalizers.Replace(Regex(_OTHER_SPACE), " "),
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex(r" +\z"), ""),  # one at the beginning is SentencePiece's own
        ]
    )


def from_sentencepiece(
    model: bytes, normalizer: normalizers.Normalizer, protected: Sequence[str] = ()
) -> FastTokenizer:
    """Convert a serialized SentencePiece BPE model, which was learned from text with this normalization and has none itself.

    ``protected``: tokens that come behind its pieces.
    """
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model)
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    ids, special_tokens = token_ids(list(dict.fromkeys([*scores, *protected])))
    # SentencePiece makes one piece of a run of unknown characters, hence fuse_unk.
    library = tokenizers.Tokenizer(models.BPE(ids, _merges(scores), unk_token=special_tokens[UNK], fuse_unk=True))
    library.normalizer = normalizer
    # Only the beginning of the text gets SentencePiece's first space, not the part after a <mask>.
    library.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=True)
    library.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="first")
    for symbol, token in special_tokens.items():
        # A space belongs to the word after it, so <mask>, which replaces a word, includes the space.
        added = AddedToken(token, lstrip=symbol == MASK_SYMBOL, normalized=False, special=True)
        library.add_special_tokens([added])
    frame_inputs(library, special_tokens)
    tokenizer = FastTokenizer(library.to_str(pretty=True).encode("utf-8"), special_tokens, SENTENCEPIECE)
    return tokenizer.with_protected(protected) if protected else tokenizer


def token_ids(pieces: list[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return token -> id, and fairseq's symbol -> its token: with more brackets if it is also a piece (of a text on HTML)."""
    special_tokens = {}
    for symbol in SPECIAL_SYMBOLS:
        special_tokens[symbol] = symbol
        while special_tokens[symbol] in pieces:
            special_tokens[symbol] = f"<{special_tokens[symbol]}>"
    *first, mask = special_tokens.values()
    return {token: index for index, token in enumerate([*first, *pieces, mask])}, special_tokens


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return every way to join two pieces to a third in SentencePiece's order: best result, then longer first part, first."""
    ways = [
        (score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    ways.sort(key=lambda way: (way[0], len(way[1])), reverse=True)
    return [(first, second) for _, first, second in ways]
