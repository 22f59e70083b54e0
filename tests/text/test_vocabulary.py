"""Sizes of vocabularies that a text allows, and characters that get a piece."""

import random
import re
import string

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.text.vocabulary import choose_characters, learn_tokenizer

PRINTABLE = string.ascii_letters + string.digits + string.punctuation


def words(alphabet, number, longest, seed):
    draw = random.Random(seed)
    return ["".join(draw.choice(alphabet) for _ in range(draw.randint(1, longest))) for _ in range(number)]


CHINESE = [chr(0x4E00 + number) for number in range(3000)]
TEXTS = {
    "few Chinese characters": words(CHINESE[:150], 60, 9, 1),
    "many Chinese characters": words(CHINESE, 700, 9, 2),
    "Chinese and Latin": words(CHINESE[:1500], 500, 9, 3) + words("abcdefghij", 300, 7, 4),
    "long words of amino acids": words("ACDEFGHIKLMNPQRSTVWY", 20, 400, 5),
    "Thai": words("กขคงจฉชซญฎฏะาิีุู", 200, 30, 6),
    "three words": ["one", "two", "three"],
    # A larger vocabulary has room for the rare letters, and thereby more pieces.
    "two letters and rare ones": ["a", "b"] * 20_000 + ["c", "d", "e"],
}


def write(path, texts):
    lines = [" ".join(texts[start : start + 8]) for start in range(0, len(texts), 8)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", TEXTS)
def test_the_size_that_a_refusal_names_is_possible(name, tmp_path):
    """Both bounds, for texts whose characters need more than they have merges: no bound excludes the other."""
    sample, limits = write(tmp_path / "sample.txt", TEXTS[name]), []
    for size in (1, 50_000):
        with pytest.raises(UserError, match=r"give at (least|most) \d+") as refusal:
            learn_tokenizer(sample, size, False)
        limits.append(int(re.search(r"give at (?:least|most) (\d+)", str(refusal.value))[1]))
        assert len(learn_tokenizer(sample, limits[-1], False)) == limits[-1]
    assert limits[0] <= limits[1]


def test_a_text_of_control_characters_is_one_line(tmp_path):
    (tmp_path / "sample.txt").write_text("\x01\x02\n\x03\n", encoding="utf-8")
    with pytest.raises(UserError, match="can be learned from the text: give text with letters"):
        learn_tokenizer(tmp_path / "sample.txt", 100, True)


# 10,000 characters: the last ten of "rare" make up less than 0.01 % only one by one.
COUNTS = {"a": 5000, "é": 4970, "ü": 10, "¿": 5, "q": 4, "¡": 3, "ñ": 3, "í": 3, "中": 1, "國": 1}


@pytest.mark.parametrize(
    ("size", "characters"),
    [
        (4000, "abéü¿q¡ñí中國"),  # a twentieth has room for all
        (20, "abéü¿q¡ñí中"),  # 99.99 %: all but one occurrence
        (10, "abéü¿q"),  # half of the pieces that "a" and "b" leave
        (2, "ab"),
    ],
)
def test_chosen_characters(size, characters):
    """By hand; "a" and "b" stand for ASCII."""
    assert choose_characters(COUNTS, size, "ab") == set(characters)


def test_many_rare_characters_and_few_frequent_ones():
    """Beyond the share, what occurs five times has a piece, and what occurs four times has none unless there is room."""
    counts = {"a": 10_000_000} | {character: 5 if character in CHINESE[:20] else 4 for character in CHINESE[:40]}
    assert choose_characters(counts, 100, "a") == {"a", *CHINESE[:20]}


@pytest.mark.parametrize("cased", [True, False])
def test_ordinary_characters_come_back(cased, tmp_path):
    """Characters that occur five times in a long text, and all of ASCII, which does not occur; the rules are not NFKC.
    SentencePiece's reserved character and a rare one have no piece, and no piece crosses them."""
    lines = ["el agua en la casa"] * 6000 + ["¿qué? ½ ① \uff0c"] * 5 + ["el▅agua 中國"] * 4 + CHINESE[:400]
    tokenizer = learn_tokenizer(write(tmp_path / "sample.txt", lines), 300, cased)
    for text in (PRINTABLE, "¿qué pingo? ½ ① \uff0c"):
        expected = text if cased else text.lower()
        assert tokenizer.decode(tokenizer.encode(text)) == expected
    assert set(PRINTABLE) - set(tokenizer.dictionary_symbols) == (set() if cased else set(string.ascii_uppercase))
    assert "<unk>" in tokenizer.encode("▅")
    assert "<unk>" in tokenizer.encode(CHINESE[399])
    assert not any(mark in piece for piece in tokenizer.dictionary_symbols for mark in "▅\t")
