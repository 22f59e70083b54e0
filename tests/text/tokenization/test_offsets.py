"""Spans of pieces in the original line: the same properties for tokenizers of every kind."""

import pytest
from tokenizer_text import HOSTILE

from amos_fairseq.text.tokenization.tokenizer import tidy_spans

# A line, and where its words begin and end, counted by hand. Brackets occur in no word of the sample: unknown pieces.
WORDS = {
    "ba ke": [(0, 2), (3, 5)],
    "  tabs\t\tand   runs ": [(2, 6), (8, 11), (14, 18)],
    "cafe\u0301s cafe\u0301": [(0, 6), (7, 12)],
    "nai\u0308ve İstanbul ŒUVRE": [(0, 6), (7, 15), (16, 21)],
    "ﬁne oﬃce ½ ⅓": [(0, 3), (4, 8), (9, 10), (11, 12)],
    "\uff21\uff22\u3000\uff43\xa0d": [(0, 2), (3, 4), (5, 6)],
    "中国 and 日本": [(0, 2), (3, 6), (7, 9)],
    "🎉🎉 snow☃man": [(0, 2), (3, 11)],
    "\u200ba \ufeffb": [(1, 2), (4, 5)],
    "<mask> [MASK] x</s>y": [(0, 6), (7, 13), (14, 20)],
}
_ZERO_WIDTH = "\u200b\ufeff"


def test_pieces_are_those_of_encode_with_ordered_spans_without_spaces(tokenizer):
    for line in [*HOSTILE, *WORDS]:
        aligned = tokenizer.encode_with_offsets(line)
        assert [piece for piece, _, _ in aligned] == tokenizer.encode(line)
        spans = [(start, end) for _, start, end in aligned]
        assert [start for start, _ in spans] == sorted(start for start, _ in spans)
        assert all(0 <= start <= end <= len(line) for start, end in spans)
        assert all(line[start:end].strip() == line[start:end] for start, end in spans)


def test_every_character_outside_spans_can_be_removed(tokenizer):
    """Removing a character that no span covers leaves the pieces unchanged."""
    for line in [*HOSTILE, *WORDS]:
        covered = {place for _, start, end in tokenizer.encode_with_offsets(line) for place in range(start, end)}
        visible = {place for place, c in enumerate(line) if not c.isspace() and c not in _ZERO_WIDTH}
        for place in visible - covered:
            assert tokenizer.encode(line[:place] + line[place + 1 :]) == tokenizer.encode(line), (line, place)


@pytest.mark.parametrize(("line", "words"), WORDS.items())
def test_words_begin_and_end_where_pieces_do(tokenizer, line, words):
    if tokenizer.kind == "huggingface" and tokenizer.encode("a\xa0b") == tokenizer.encode("a#b"):
        line = line.replace("\u3000", " ").replace("\xa0", " ")  # this model makes one unknown piece of both
    aligned = [(start, end) for _, start, end in tokenizer.encode_with_offsets(line) if start < end]
    for word in words:
        inside = [(start, end) for start, end in aligned if word[0] <= start < word[1]]
        assert (inside[0][0], max(end for _, end in inside)) == word, (line[slice(*word)], aligned)


def test_spans_of_the_libraries_are_converted_to_one_convention():
    """By hand: spaces removed, an expanded character belongs to its first piece too, removed marks stay with their letter."""
    line = " \u00bd e\u0301 \u200b"
    given = [("\u25811", 0, 1), ("\u2044", 1, 1), ("2", 1, 2), ("\u2581", 2, 3), ("e", 3, 4), ("\u2581", 5, 7)]
    expected = [("\u25811", 1, 2), ("\u2044", 1, 2), ("2", 1, 2), ("\u2581", 3, 3), ("e", 3, 5), ("\u2581", 7, 7)]
    assert tidy_spans(line, given) == expected
