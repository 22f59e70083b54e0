"""Sizes of vocabularies that a text allows, and characters that get a piece."""

import random
import re

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.text.vocabulary import learn_tokenizer


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
    path.write_text(
        "\n".join(" ".join(texts[start : start + 8]) for start in range(0, len(texts), 8)), encoding="utf-8"
    )
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
    with pytest.raises(UserError, match="no vocabulary can be learned from the text: give text with letters"):
        learn_tokenizer(tmp_path / "sample.txt", 100, True)
