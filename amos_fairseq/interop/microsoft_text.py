"""How the AMOS authors' tokenizer treats a text before SentencePiece reads it, and its pieces after
(huggingface/amos/tokenization_amos.py of their repository describes it; written anew here, so that every character
remembers where it stood).
"""

import re
import string
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

_WORD_MARK = "\u2581"
# Two characters that stand for one quotation mark, and typographic signs with their ASCII ones.
_DOUBLE_QUOTES = {"``": '"', "''": '"'}
_PLAIN = str.maketrans(
    "\u2018\u2019\u00b4\u201c\u201d\u2014\u2013", "'''\"\"--"
)  # quotes, acute accent, em dash, en dash
_QUOTES_OR_CHARACTER = re.compile(r"``|''|.", re.DOTALL)
# An apostrophe that was split off, and the end of the contraction that it belongs to.
_CONTRACTION = re.compile(r"' ((?:[smdSMDtT]|ll|re|ve|(?P<upper>LL|RE|VE))\b)")


class Character(NamedTuple):
    """One character of treated text; it stands for ``[start, end)`` of the line as it was given."""

    value: str
    start: int
    end: int


def is_punctuation(character: str) -> bool:
    """ASCII signs that are no letters or digits, and whatever Unicode calls punctuation."""
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def treat(line: str) -> list[Character]:
    """Words with one space between them: quotes and dashes plain, runs of punctuation at the ends of a word split off,
    contractions joined again (``don 't`` from ``don ' t``).
    """
    words = [part for word in _split_at_spaces(_plain_characters(line)) for part in _split_punctuation(word)]
    rejoined = _rejoin_contractions(_joined(words))
    return _joined(list(_split_at_spaces(rejoined)))


def text_of(characters: list[Character]) -> str:
    return "".join(character.value for character in characters)


def _plain_characters(line: str) -> list[Character]:
    found = _QUOTES_OR_CHARACTER.finditer(line)
    return [
        Character(_DOUBLE_QUOTES.get(match.group(), match.group().translate(_PLAIN)), match.start(), match.end())
        for match in found
    ]


def _split_at_spaces(characters: list[Character]) -> Iterator[list[Character]]:
    for match in re.finditer(r"\S+", text_of(characters)):
        yield characters[match.start() : match.end()]


def _split_punctuation(word: list[Character]) -> list[list[Character]]:
    """The run of punctuation before, the rest, the run behind; a word of nothing else stays whole."""
    marks = [is_punctuation(character.value) for character in word]
    if all(marks):
        return [word]
    first, behind = marks.index(False), len(word) - marks[::-1].index(False)
    return [part for part in (word[:first], word[first:behind], word[behind:]) if part]


def _joined(words: list[list[Character]]) -> list[Character]:
    """With a space of its own, which stands for no character, before every word but the first."""
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
        if match.group("upper"):  # the authors' rules put a space behind these
            rejoined.append(Character(" ", rejoined[-1].end, rejoined[-1].end))
    return rejoined + characters[done:]


def places_kept(pieces: list[str]) -> list[int]:
    """Places of SentencePiece's pieces that are not a lone mark of a word at the end or before punctuation."""
    following = [*pieces[1:], ""]
    return [
        place
        for place, piece in enumerate(pieces)
        if piece != _WORD_MARK or (following[place] and not is_punctuation(following[place][0]))
    ]
