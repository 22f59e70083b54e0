"""Which characters of the original line a piece stands for: one convention for the spans of every tokenizer."""

import unicodedata
from typing import Iterable, List, Tuple

# (piece, start, end): characters [start, end) of the line.
AlignedPiece = Tuple[str, int, int]

# Spaces without width: Unicode does not class them with the spaces, tokenizers treat them as such.
_ZERO_WIDTH_SPACES = "\u200b\ufeff"
# What a piece begins with where a space stood before it: SentencePiece's mark, and a space spelled as a byte.
_WORD_MARKS = "\u2581\u0120"


def tidy_spans(line: str, aligned: Iterable[AlignedPiece]) -> List[AlignedPiece]:
    """Spans as the libraries give them, brought to the convention of ``encode_with_offsets``.

    - No span begins or ends with spaces; one that holds nothing else becomes empty.
    - Where a normaliser makes several characters of one (a ligature, a fraction), a piece that the library gave only
      the beginning of that character, an empty span, gets the character whole, as pieces of a character's bytes do.
    - Combining marks that a normaliser drops belong to the piece before them, so that cut text keeps its accents.
    """
    pieces = [_tidy(line, *piece) for piece in aligned]
    covered = bytearray(len(line))
    for _, start, end in pieces:
        covered[start:end] = b"\x01" * (end - start)
    return [(piece, start, _past_marks(line, covered, start, end)) for piece, start, end in pieces]


def _tidy(line: str, piece: str, start: int, end: int) -> AlignedPiece:
    while start < end and _is_space(line[start]):
        start += 1
    while end > start and _is_space(line[end - 1]):
        end -= 1
    within_character = start == end < len(line) and not _is_space(line[start])
    if within_character and piece.strip(_WORD_MARKS):
        end = start + 1
    return piece, start, end


def _past_marks(line: str, covered: bytearray, start: int, end: int) -> int:
    if start < end:
        while end < len(line) and not covered[end] and unicodedata.category(line[end])[0] == "M":
            end += 1
    return end


def _is_space(character: str) -> bool:
    return character.isspace() or character in _ZERO_WIDTH_SPACES
