"""A SentencePiece BPE model as a model of the `tokenizers` library: the same merges in the same order."""

from typing import Dict, List, Mapping, Set, Tuple

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from amos_fairseq.errors import UserError
from amos_fairseq.interop.fast_tokenizer_charsmap import exact_normalizer
from amos_fairseq.interop.sentencepiece_tokenizer import SentencePieceTokenizer

SPACE = "▁"  # how a space is written in pieces
# Numbers of sentencepiece_model.proto.
_BPE, _NORMAL, _USER_DEFINED = 2, 1, 4


def sentencepiece_as_fast(
    tokenizer: SentencePieceTokenizer, vocabulary: Mapping[str, int], unknown: str
) -> tokenizers.Tokenizer:
    """Normaliser, words, merges and decoder; special tokens are the caller's.

    ``<mask>`` may cut a text: only what begins the text gets SentencePiece's first space, as the rest is its middle.

    Args:
        tokenizer: ours.
        vocabulary: ids of its ordinary pieces and of the special tokens.
        unknown: the special token of a run of unknown characters.

    Raises:
        UserError: the model is of a kind, or has settings, that would not come out exactly.
    """
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(tokenizer.model)
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == _NORMAL}
    alphabet = {piece for piece in scores if len(piece) == 1}
    _refuse_inexact(proto, scores, alphabet)
    # A run of unknown characters is one piece of SentencePiece's, hence fuse_unk.
    fast = tokenizers.Tokenizer(models.BPE(dict(vocabulary), _merges(scores), unk_token=unknown, fuse_unk=True))
    charsmap = proto.normalizer_spec.precompiled_charsmap
    one_space, none_at_the_end = normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r" +\z"), "")
    rules = exact_normalizer(charsmap, alphabet | {" "})
    fast.normalizer = normalizers.Sequence([*rules, one_space, none_at_the_end])
    # Words are what the library remembers; whole lines go through where a piece or a run of unknowns may cross words.
    words = SPACE in alphabet and all(SPACE not in piece[1:] for piece in scores)
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=words)
    fast.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="first")
    return fast


def _merges(scores: Dict[str, float]) -> List[Tuple[str, str]]:
    """Every way to make a piece of two, the best piece first: SentencePiece joins what makes the best one."""
    from transformers.convert_slow_tokenizer import generate_merges

    return generate_merges({piece: index for index, piece in enumerate(scores)}, scores)


def _refuse_inexact(proto: sentencepiece_model_pb2.ModelProto, scores: Dict[str, float], alphabet: Set[str]) -> None:
    normalizer, trainer = proto.normalizer_spec, proto.trainer_spec
    obstacles = {
        "is no BPE model": trainer.model_type != _BPE,
        "falls back to bytes": trainer.byte_fallback,
        "has user-defined pieces": any(piece.type == _USER_DEFINED for piece in proto.pieces),
        "puts spaces at the end of words": trainer.treat_whitespace_as_suffix,
        "adds no space before the first word": not normalizer.add_dummy_prefix,
        "keeps runs of spaces": not normalizer.remove_extra_whitespaces,
        "does not mark spaces": not normalizer.escape_whitespaces,
        "has pieces of characters that are no pieces themselves": not set("".join(scores)) <= alphabet,
    }
    found = next((name for name, is_so in obstacles.items() if is_so), None)
    if found is not None:
        raise UserError(
            f"the SentencePiece model {found}: no tokenizer.json is known that gives the same ids; models that prepare.sh "
            "learns can be exported"
        )
