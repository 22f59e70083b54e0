"""How a tokenizer's piece is written in ``dict.txt`` and in encoded text.

fairseq splits encoded lines at whitespace and looks words up by their spelling, so two kinds of pieces cannot stand
there as they are: those that hold whitespace, and those that look like one of fairseq's own symbols (a text about
HTML makes ``<s>`` a frequent word). Their characters are written as ``\\x{hexadecimal code}``, which can be undone.
"""

import re
from typing import Dict, List

from amos_fairseq.special_tokens import MASK_SYMBOL

BOS, PAD, EOS, UNK = "<s>", "<pad>", "</s>", "<unk>"
SPECIAL_SYMBOLS = (BOS, PAD, EOS, UNK, MASK_SYMBOL)

_ESCAPED = re.compile(r"\\x\{([0-9a-f]*)\}")
# A backslash that already begins an escape must itself be escaped, or two pieces would share one spelling.
_MUST_ESCAPE = re.compile(r"\s|\\(?=x\{)")


def spell_piece(piece: str) -> str:
    """The spelling of a piece in fairseq's files: no whitespace, not empty, never one of ``SPECIAL_SYMBOLS``.

    Different pieces have different spellings; :func:`unspell_piece` gives the piece back.
    """
    if not piece:
        return r"\x{}"
    if piece in SPECIAL_SYMBOLS:
        return _escape(piece[0]) + piece[1:]
    return _MUST_ESCAPE.sub(lambda match: _escape(match.group()), piece)


def unspell_piece(spelling: str) -> str:
    """The piece that :func:`spell_piece` wrote as ``spelling``."""
    if "\\" not in spelling:
        return spelling
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)) if match.group(1) else "", spelling)


class Spellings(Dict[str, str]):
    """``spellings[piece]``: :func:`spell_piece`, remembered for the pieces of the vocabulary, not for foreign ones."""

    def __init__(self, vocabulary: List[str]) -> None:
        super().__init__((piece, spell_piece(piece)) for piece in vocabulary)

    def __missing__(self, piece: str) -> str:
        return spell_piece(piece)


def _escape(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
