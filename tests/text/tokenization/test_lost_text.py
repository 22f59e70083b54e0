"""How much of a text no piece contains, compared with counts of characters by Unicode's categories or by hand."""

import unicodedata

import pytest
import tokenizers
from tokenizer_text import hugging_face_directory, small_tokenizer_of_kind, word_level_directory, write_sample
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import MEASURED
from amos_fairseq.text.vocabulary import learn_tokenizer

SPECIAL = ["<s>", "<pad>", "</s>", "<mask>"]
THAI = "ภิผัปุ มัฅาฑฺ ษะฑฺสืฑฺ คุสืฑฺ"
DEVANAGARI = "हिन्दी में लिखा"
NFD = "cafe\u0301 re\u0301sume\u0301 Tie\u0302\u0301ng"


def share_of_marks(text: str) -> tuple[int, int]:
    letters = text.replace(" ", "")
    return len(letters), sum(unicodedata.category(character) == "Mn" for character in letters)


@pytest.mark.parametrize("text", [THAI, DEVANAGARI])
def test_vowel_signs_that_normalization_removes_are_counted(text, tmp_path):
    """By BERT's uncased rules, also between the characters of a piece, whose offsets include them; SentencePiece keeps them."""
    number, marks = share_of_marks(text)
    assert marks > number / 8
    sample = write_sample(tmp_path)
    with sample.open("a", encoding="utf-8") as stream:
        stream.write(f"{text}\n" * 200)
    by_bert = load_tokenizer(hugging_face_directory(tmp_path / "tokenizer", "wordpiece", sample))
    assert by_bert.count_dropped([text]) == (number, marks)
    for cased in (True, False):
        assert learn_tokenizer(sample, 300, cased).count_dropped([text]) == (number, 0)


def test_removed_accents_and_control_characters_do_not_count(tmp_path):
    """Of an accent the letter remains, however the text spells it; the heart has a variation selector."""
    tokenizer = load_tokenizer(hugging_face_directory(tmp_path / "tokenizer", "wordpiece", write_sample(tmp_path)))
    for text in (NFD, unicodedata.normalize("NFC", NFD), "soft\xadhyphen \u200b joined\u200d \ufeff", "❤\ufe0f"):
        assert tokenizer.count_dropped([text])[1] == 0, ascii(text)
    assert tokenizer.count_dropped(["damaged \ufffd\ufffd"]) == (9, 2)


def bpe_of(directory, normalizer=None, pre_tokenizer=None):
    """BPE without an unknown token, of a text with 10 letters."""
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer, library.pre_tokenizer = normalizer, pre_tokenizer or pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=SPECIAL, show_progress=False)
    library.train_from_iterator(["abcde fghij abc fgh"] * 20, trainer)
    directory.mkdir()
    library.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory)


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({}, "abc xyz axb", (9, 4)),
        ({}, "中文 abc", (5, 2)),
        ({"normalizer": normalizers.Replace(Regex("[^a-j ]"), "")}, "abc xyz axb", (9, 4)),
        ({"normalizer": normalizers.Lowercase()}, "ABC Xab", (6, 1)),
        ({"pre_tokenizer": pre_tokenizers.Punctuation("removed")}, "abc,de.", (7, 2)),
        ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False)}, "abc é fz", (6, 2)),
        ({"pre_tokenizer": pre_tokenizers.Metaspace()}, "abc x z fgh", (8, 2)),
    ],
)
def test_a_tokenizer_without_unknown_token_drops_what_it_lacks(settings, text, expected, tmp_path):
    """There is no unknown piece; expected are counts by hand."""
    tokenizer = bpe_of(tmp_path / "tokenizer", **settings)
    assert tokenizer.count_dropped([text]) == expected
    assert tokenizer.embedding_rows["<unk>"] not in tokenizer.ids_of(tokenizer.encode(text))


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram", "spaces"])
def test_other_tokenizers_drop_nothing(kind, tmp_path):
    tokenizer = load_tokenizer(hugging_face_directory(tmp_path / "tokenizer", kind, write_sample(tmp_path)))
    for text in ("bake limo nu", "xyz 中文 🎉", "Ünïcödé"):
        assert tokenizer.count_dropped([text]) == (len(text.replace(" ", "")), 0)


def test_long_texts_are_measured_in_parts(tmp_path):
    """About as many characters as are asked for, from all of the text: a second half of other letters is seen."""
    tokenizer = bpe_of(tmp_path / "tokenizer")
    lines = ["abc " * 20] * 2000 + ["xyz " * 20] * 2000
    number, dropped = tokenizer.count_dropped(lines)
    assert MEASURED / 2 < number <= 2 * MEASURED
    assert dropped == pytest.approx(number / 2, rel=0.1)
    assert tokenizer.count_dropped(["abcxyz" * MEASURED])[0] == MEASURED
    assert tokenizer.count_dropped([]) == (0, 0)


def test_a_text_that_the_library_refuses_is_one_line(tmp_path):
    """A model of words whose unknown token is not in its vocabulary raises a bare Exception."""
    tokenizer = load_tokenizer(word_level_directory(tmp_path / "words", ["one", "two"], absent=["[UNK]"]))
    assert tokenizer.encode("one two") == ["one", "two"]
    for call in (tokenizer.encode, tokenizer.encode_with_offsets, lambda text: tokenizer.count_dropped([text])):
        with pytest.raises(UserError, match=r"cannot encode all text .*: give one with a token for what"):
            call("one three")


@pytest.mark.parametrize("kind", ["cased", "wordpiece", "unigram", "spaces"])
def test_characters_without_a_piece_are_counted(kind, tmp_path):
    """By hand; WordPiece makes an unknown piece of a whole word, the others of a run of such characters."""
    tokenizer = small_tokenizer_of_kind(tmp_path, kind)
    counts = tokenizer.count_unknown(["bake 中国中 limo", "", "ba中ke ☃ nu", "bake limo"])
    assert counts == {"中": 3, "国": 1, "☃": 1}


def test_words_without_a_piece_are_counted(tmp_path):
    tokenizer = load_tokenizer(word_level_directory(tmp_path / "words", ["one", "two"]))
    assert tokenizer.count_unknown(["one three two", "four three"]) == {"three": 2, "four": 1}
