"""Which pieces a word has, and windows of words. Folders of Hugging Face have a copy: it imports nothing of this package."""

import bisect
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

Ranges = list[tuple[int, int]]  # ends excluded
# (piece, start, end): the piece covers the characters [start, end) of the line.
AlignedPiece = tuple[str, int, int]

_ESCAPED = re.compile(r"\\x\{([0-9a-f]*)\}")
# Zero-width spaces: Unicode does not class them as spaces, tokenizers treat them as such.
_ZERO_WIDTH_SPACES = "\u200b\ufeff"
# The first character of a piece that follows a space: SentencePiece's mark, a space spelled as a byte, and what amos export
# writes.
_WORD_MARKS = "\u2581\u0120 "


def unspell_piece(spelling: str) -> str:
    """Return the piece that ``spell_piece`` wrote as ``spelling``."""
    if "\\" not in spelling:
        return spelling
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)) if match.group(1) else "", spelling)


def tidy_spans(line: str, aligned: Iterable[AlignedPiece]) -> list[AlignedPiece]:
    """Convert the spans of a tokenizer library to those of ``Tokenizer.encode_with_offsets``: without spaces at the ends,
    a lone word mark empty, a character that a normalizer expands (a ligature) whole for each of its pieces, and with the
    combining marks behind a piece that a normalizer removes."""
    pieces = [_tidy(line, *piece) for piece in aligned]
    covered = _covered(line, pieces)
    return [(piece, start, _past_marks(line, covered, start, end)) for piece, start, end in pieces]


def _tidy(line: str, piece: str, start: int, end: int) -> AlignedPiece:
    is_mark = not unspell_piece(piece).strip(_WORD_MARKS)
    while start < end and _is_space(line[start]):
        start += 1
    while end > start and _is_space(line[end - 1]):
        end -= 1
    if is_mark and line[start:end].strip(_WORD_MARKS):
        return piece, start, start
    within_character = start == end < len(line) and not _is_space(line[start])
    if within_character and not is_mark:
        end = start + 1
    return piece, start, end


def _covered(line: str, aligned: list[AlignedPiece]) -> bytearray:
    """Return 1 for each character of the line that is in a piece, else 0."""
    covered = bytearray(len(line))
    for _, start, end in aligned:
        covered[start:end] = b"\x01" * (end - start)
    return covered


def _past_marks(line: str, covered: bytearray, start: int, end: int) -> int:
    if start < end:
        while end < len(line) and not covered[end] and unicodedata.category(line[end])[0] == "M":
            end += 1
    return end


def _is_space(character: str) -> bool:
    return character.isspace() or character in _ZERO_WIDTH_SPACES


def pieces_of_words(
    words: Sequence[str], spaces: Sequence[bool] | None, pieces: Sequence[Sequence[int]]
) -> tuple[Ranges, list[int]]:
    """Return the range of the pieces of each word, and where pieces are to be inserted, one after the other, for words without
    one; see ``Tokenizer.encode_words``.

    Args:
        spaces: see ``join_words``.
        pieces: the characters that each covers in the text of ``join_words``, as ``tidy_spans`` has them.
    """
    starts = [start for start, _ in pieces]
    covering = [(index, start, end) for index, (start, end) in enumerate(pieces) if start < end]
    ranges, absent = [], []
    place = begin = 0
    for word, space in zip(words, spaces or [True] * len(words), strict=True):
        end = begin + len(word)
        while place < len(covering) and covering[place][2] <= begin:
            place += 1
        stop = place
        while stop < len(covering) and covering[stop][1] < end:
            stop += 1
        if place < stop:
            first = place + (covering[place][1] < begin and place + 1 < stop)
            ranges.append((covering[first][0] + len(absent), covering[stop - 1][0] + 1 + len(absent)))
        else:
            absent.append(bisect.bisect_left(starts, end) + len(absent))
            ranges.append((absent[-1], absent[-1] + 1))
        begin = end + space
    return ranges, absent


def windows_of(ranges: Sequence[tuple[int, int]], num_pieces: int, room: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield first word, word behind the last, first piece and piece behind the last of each window of a sentence.

    A sentence of up to ``room`` pieces is one window. Those of a longer one begin half a window after each other, or later
    where the next word is long. Of a word with more pieces than a window the first ones are read.
    """
    first = last = 0
    while last < len(ranges):
        begin = ranges[first][0] if first else 0
        behind = max(first + 1, bisect.bisect_right(ranges, begin + room, first, key=itemgetter(1)))
        if behind > last:  # else it would only be shorter than the one before it
            last = behind
            # Pieces of no word may follow the last word.
            end = ranges[last - 1][1] if last < len(ranges) else num_pieces
            yield first, last, begin, min(end, begin + room)
        first += max(1, (last - first) // 2)


def merge_windows(windows: Iterable[tuple[int, Sequence[Any]]]) -> list[Any]:
    """Return one item for each word, of the window in which it is farther from the ends.

    Args:
        windows: the first word of each, and an item for each of its words.
    """
    merged: list[Any] = []
    for first, items in windows:
        middle = (first + len(merged)) // 2  # of the words that both windows have
        merged[middle:] = items[middle - first :]
    return merged
