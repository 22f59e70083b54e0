"""What the exported tokenizer of the released AMOS checkpoint contains a copy of: this file imports nothing of the package.

The text normalization of the AMOS authors' tokenizer, before and after SentencePiece, follows the description in
huggingface/amos/tokenization_amos.py of their repository; an independent implementation that records the position of every
character in the original line. :func:`kept_lengths` shortens texts, for all tokenizers.
"""

import re
import string
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_WORD_MARK = "\u2581"
# Two ASCII characters that stand for one quotation mark, and typographic signs with their ASCII replacement.
_DOUBLE_QUOTES = {"``": '"', "''": '"'}
# Quotes, acute accent, em dash, en dash.
_PLAIN = str.maketrans("\u2018\u2019\u00b4\u201c\u201d\u2014\u2013", "'''\"\"--")
_QUOTES_OR_CHARACTER = re.compile(r"``|''|.", re.DOTALL)
# An apostrophe that was split off, and the end of its contraction.
_CONTRACTION = re.compile(r"' ((?:[smdSMDtT]|ll|re|ve|(?P<upper>LL|RE|VE))\b)")


class Character(NamedTuple):
    """One character of normalized text; it replaces ``[start, end)`` of the original line."""

    value: str
    start: int
    end: int


def is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def normalize(line: str) -> list[Character]:
    """Return the words of a line with one space between them.

    Quotes and dashes become ASCII, runs of punctuation at the ends of words are split off, and contractions are joined again
    (``don 't`` from ``don ' t``).
    """
    words = [part for word in _split_at_spaces(_plain_characters(line)) for part in _split_punctuation(word)]
    return _joined(list(_split_at_spaces(_rejoin_contractions(_joined(words)))))


def text_of(characters: list[Character]) -> str:
    return "".join(character.value for character in characters)


def _plain_characters(line: str) -> list[Character]:
    return [
        Character(_DOUBLE_QUOTES.get(match.group(), match.group().translate(_PLAIN)), match.start(), match.end())
        for match in _QUOTES_OR_CHARACTER.finditer(line)
    ]


def _split_at_spaces(characters: list[Character]) -> Iterator[list[Character]]:
    for match in re.finditer(r"\S+", text_of(characters)):
        yield characters[match.start() : match.end()]


def _split_punctuation(word: list[Character]) -> list[list[Character]]:
    """Split into leading punctuation, the rest, and trailing punctuation; a word of punctuation only stays whole."""
    marks = [is_punctuation(character.value) for character in word]
    if all(marks):
        return [word]
    first, last = marks.index(False), len(word) - marks[::-1].index(False)
    return [part for part in (word[:first], word[first:last], word[last:]) if part]


def _joined(words: list[list[Character]]) -> list[Character]:
    """Join words with a space, which replaces no character of the line."""
    characters: list[Character] = []
    for word in words:
        if characters:
            characters.append(Character(" ", word[0].start, word[0].start))
        characters += word
    return characters


def _rejoin_contractions(characters: list[Character]) -> list[Character]:
    rejoined: list[Character] = []
    done = 0
    for match in _CONTRACTION.finditer(text_of(characters)):
        rejoined += characters[done : match.start() + 1] + characters[match.start(1) : match.end()]
        done = match.end()
        if match.group("upper"):  # the authors' rules put a space after these
            rejoined.append(Character(" ", rejoined[-1].end, rejoined[-1].end))
    return rejoined + characters[done:]


def without_lone_marks(pieces: list[str]) -> list[int]:
    """Return the indices of SentencePiece's pieces, except word marks alone at the end or before punctuation."""
    following = [*pieces[1:], ""]
    return [
        index
        for index, piece in enumerate(pieces)
        if piece != _WORD_MARK or (following[index] and not is_punctuation(following[index][0]))
    ]


def kept_lengths(lengths: Sequence[int], limit: int) -> list[int]:
    """Return how many tokens of one or two texts remain if together they may have ``limit``: the longer text is cut first.

    If both must be cut, each keeps half. Of an odd limit the longer text keeps the larger half, of equal texts the second.
    This is ``longest_first`` of Hugging Face's fast tokenizers; their slow ones leave the larger half to the first text.

    Args:
        lengths: number of tokens of each text, without special tokens.
        limit: number of tokens, at least 0, without special tokens.
    """
    if sum(lengths) <= limit:
        return list(lengths)
    if len(lengths) == 1:
        return [limit]
    first, second = lengths
    kept = min(first, second, limit // 2)
    return [kept, limit - kept] if first <= second else [limit - kept, kept]
