"""The words of a raw text, and the text of words. Folders of Hugging Face have a copy: it imports nothing of this package."""

import itertools
import re
from collections.abc import Collection, Sequence

from tokenizers import Regex, pre_tokenizers

Ranges = list[tuple[int, int]]  # of characters, the end excluded
# A character of Thai, Lao, Burmese, Khmer, kana or Han: a text has no spaces between their words.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003ffff]"
)
INSIDE = re.compile(r"(?<=[^\W_])(?:[^\w\s]|_)(?=[^\W_])")  # a sign between letters
# Characters of which an editor shows nothing: spaces, controls, and what has no width or no ink.
_INVISIBLE = re.compile(
    r"[\s\x00-\x1f\x7f-\xa0\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]*"
)
# Spaces, punctuation as BERT's tokenizer has it, and characters of scripts without spaces; the last two are words of their own.
_UNSPACED_CHARACTERS = pre_tokenizers.Split(Regex(UNSPACED.pattern), "isolated")
_DIVIDED = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), _UNSPACED_CHARACTERS])


def is_blank(text: str) -> bool:
    """Return whether an editor shows nothing of a text, such as of a no-break space, U+3000, U+200B or U+FEFF."""
    return _INVISIBLE.fullmatch(text) is not None


def ranges_of_words(text: str, signs: str = "", whole: Collection[str] = ()) -> Ranges:
    """Return the characters of each word: what is between spaces, divided at punctuation, but for ``signs`` inside of words,
    and for words that are ``whole``."""
    joints = {place for sign in INSIDE.finditer(text) if sign[0] in signs for place in sign.span()}
    for part in re.finditer(r"\S+", text) if whole else ():
        joints.update(range(part.start(), part.end()) if part[0] in whole else ())
    ranges: Ranges = []
    for word, (start, end) in _DIVIDED.pre_tokenize_str(text):
        if ranges and ranges[-1][1] == start and start in joints:
            ranges[-1] = ranges[-1][0], end
        elif not is_blank(word):
            ranges.append((start, end))
    return ranges


def spaces_between(words: Sequence[str]) -> list[bool] | None:
    """Return whether a space follows each word of a sentence, and False for the last, if half of the words or more are in
    scripts without spaces; else None: a space follows each."""
    is_unspaced = [UNSPACED.search(word) is not None for word in words if any(map(str.isalpha, word))]
    if not any(is_unspaced) or 2 * sum(is_unspaced) < len(is_unspaced):
        return None
    return [*itertools.starmap(_needs_space, itertools.pairwise(words)), False]


def _needs_space(word: str, following: str) -> bool:
    """Return whether these are two words such as New York in a text without spaces, and not single characters of a word."""
    ends = word[-1] + following[0]
    return len(word + following) > 2 and ends.isalnum() and not UNSPACED.search(ends)


def join_words(words: Sequence[str], spaces: Sequence[bool] | None = None) -> str:
    """Return the text of words; ``spaces``: whether a space follows each of them, by default all but the last."""
    if spaces is None:
        return " ".join(words)
    return "".join(f"{word} " if space else word for word, space in zip(words, spaces, strict=True))
