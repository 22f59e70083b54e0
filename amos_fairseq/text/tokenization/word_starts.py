"""Which pieces of a vocabulary begin a word, by the marks that the tokenizer itself writes."""

import json
import re

import numpy as np
from tokenizers import decoders

from amos_fairseq.errors import UserError
from amos_fairseq.text import UNSPACED
from amos_fairseq.text.tokenization.conversion import SPACE
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer
from amos_fairseq.text.tokenization.tokenizer import Tokenizer, embedding_symbols, unspell_piece

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's pieces for characters that have none
# Behind a piece that ends within a character: the rest of one of the same script.
_LAST_BYTES, _SPELLED_LAST_BYTES = b"\x80\x80\x80", "Ģ" * 3


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Return True for each row of the embedding that begins a word: [dictionary size] bool.

    A piece begins a word if it has the mark of one (SentencePiece's U+2581, a space of byte-level BPE), if it lacks the mark of
    a continued word (## of WordPiece), or if its first character belongs to a script without spaces. Where no piece continues a
    word (whole words, single characters), each one begins a word.
    """
    pieces = [unspell_piece(symbol) for symbol in embedding_symbols(tokenizer.dictionary_symbols)]
    content = json.loads(tokenizer.model) if isinstance(tokenizer, FastTokenizer) else {}
    model = content.get("model", {})
    steps = json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    if continuation := model.get("continuing_subword_prefix"):
        texts = [piece.removeprefix(continuation) for piece in pieces]
        has_mark = [not piece.startswith(continuation) for piece in pieces]
    elif '"ByteLevel"' in steps:
        decoder = decoders.ByteLevel()
        texts = [decoder.decode([piece + _SPELLED_LAST_BYTES]) for piece in pieces]
        has_mark = [text[0].isspace() for text in texts]
    elif model.get("type") != "WordLevel" and any(piece.startswith(SPACE) for piece in pieces):
        texts = list(map(_text_of_bytes, pieces))
        has_mark = [piece.startswith(SPACE) for piece in pieces]
    else:
        added = {token["content"] for token in content["added_tokens"]}
        ordinary = set(map(unspell_piece, tokenizer.dictionary_symbols)) - added
        if model["type"] != "WordLevel" and any(len(piece) > 1 for piece in ordinary):
            raise UserError("--whole-words: the tokenizer marks neither a new nor a continued word: leave it out")
        return np.ones(len(pieces), dtype=bool)
    is_unspaced = [UNSPACED.match(text) is not None for text in texts]
    return np.array(has_mark) | np.array(is_unspaced)


def _text_of_bytes(piece: str) -> str:
    byte = _BYTE.fullmatch(piece)
    return piece if byte is None else (bytes.fromhex(byte[1]) + _LAST_BYTES).decode("utf-8", "replace")
