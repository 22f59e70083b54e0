"""What all tokenizers have in common: spelling, files; limits of a learned vocabulary. Ids: test_conversion.py."""

import random

import pytest
from tokenizer_text import HOSTILE, assert_survives_fairseq

from amos_fairseq.errors import UserError
from amos_fairseq.files import directory_sha256
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import SPECIAL_SYMBOLS, spell_piece, unspell_piece
from amos_fairseq.text.vocabulary import cut_long_line, learn_tokenizer

NASTY_CHARACTERS = " \t\x0b\x1c\x85\xa0\u2028\u3000\\{}x<>/s@#▁Ġ#é中☃\u0301ab0"


def test_spelling_is_reversible_and_one_to_one():
    generator = random.Random(3)
    pieces = {"", *SPECIAL_SYMBOLS, "\\x{3c}s>", "\\\\x{20}"}
    pieces |= {"".join(generator.choices(NASTY_CHARACTERS, k=generator.randint(1, 7))) for _ in range(20000)}
    spellings = {spell_piece(piece) for piece in pieces}
    assert len(spellings) == len(pieces)
    for piece in pieces:
        spelling = spell_piece(piece)
        assert unspell_piece(spelling) == piece
        assert spelling.split() == [spelling]
        assert spelling not in SPECIAL_SYMBOLS


def test_pieces_survive_fairseq(tokenizer, tmp_path):
    assert len(tokenizer) == 300 or tokenizer.kind == "huggingface"
    assert_survives_fairseq(tokenizer, tmp_path)


def test_saved_tokenizer_is_the_same_one(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.cased == tokenizer.cased
    assert loaded.sha256 == tokenizer.sha256 == directory_sha256(tmp_path)
    assert loaded.hugging_face_ids == tokenizer.hugging_face_ids
    assert [loaded.encode(line) for line in HOSTILE] == tokenizer.encode_lines(HOSTILE)


def test_ties_are_broken_deterministically(tmp_path):
    """Words that occur once make every merge a tie, which a hash table would break differently each time."""
    generator = random.Random(1)
    words = ["".join(generator.choices("abcdefghij", k=8)) for _ in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(words) + "\n")
    learned = {learn_tokenizer(tmp_path / "text.txt", 400, True).sha256 for _ in range(4)}
    assert len(learned) == 1


def test_long_lines_are_cut_between_words_and_characters():
    line = " ".join(f"word{i}é" for i in range(3000))
    parts = list(cut_long_line(line, 100))
    assert max(len(part.encode()) for part in parts) <= 100
    assert " ".join(parts) == line
    solid = "é中☃" * 100
    assert "".join(cut_long_line(solid, 50)) == solid


def test_damaged_directory_is_refused(sample, tmp_path):
    learned = learn_tokenizer(sample, 300, True)
    learned.save(tmp_path / "whole")
    lines = (tmp_path / "whole" / "dict.txt").read_bytes().split(b"\n")
    lines[4], lines[5] = lines[5], lines[4]
    for number, (name, content, message) in enumerate(
        [
            ("tokenizer.settings.json", None, "holds no tokenizer"),
            ("tokenizer.settings.json", b"{", "is not JSON"),
            ("tokenizer.settings.json", b'{"kind": "words"}', "'kind' must be one of"),
            ("tokenizer.json", None, r"tokenizer\.json is missing"),
            ("tokenizer.json", b"", "is empty"),
            ("tokenizer.json", b"\xff\xfe", r"json is not a usable tokenizer\.json: "),
            ("dict.txt", None, "dict.txt is missing"),
            ("dict.txt", b"a b c\n", "expected 'piece count'"),
            ("dict.txt", b"\n".join(lines), "does not match"),
        ]
    ):
        directory = tmp_path / str(number)
        learned.save(directory)
        (directory / name).unlink()
        if content is not None:
            (directory / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_tokenizer(directory)
