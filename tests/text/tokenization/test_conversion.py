"""The tokenizer.json of a learned vocabulary against its learner, SentencePiece.

Thousands of random texts and difficult ones, on both ways that the file is used: our tokenizer, word by word, then fairseq's
own dictionary; and the library with whole texts, as Hugging Face's clients call it.
"""

import os
import random
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

import pytest
import sentencepiece
from fairseq.data import Dictionary
from tokenizer_text import ALPHABETS, HOSTILE, random_texts, train_bpe

from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer
from amos_fairseq.text.vocabulary import from_sentencepiece, learn_tokenizer, sentencepiece_rules, train_sentencepiece

# The standard is no wrong id in 3,000 texts of each alphabet.
TEXTS_PER_ALPHABET = int(os.environ.get("AMOS_RANDOM_TEXTS", "400"))


class Learned(NamedTuple):
    """A tokenizer, and text -> ids according to the program that learned it."""

    tokenizer: FastTokenizer
    expected: Callable[[str], list[int]]


@pytest.fixture(scope="module", params=["cased", "uncased"])
def learned(request, sample) -> Learned:
    """SentencePiece's ``<unk>`` is 0 and fairseq's is 3; its pieces follow from 2 on, as in our dictionary from 4 on."""
    cased = request.param == "cased"
    normalizer = sentencepiece_rules(cased)
    processor = sentencepiece.SentencePieceProcessor(model_proto=train_sentencepiece(sample, 300, normalizer))
    tokenizer = learn_tokenizer(sample, 300, cased)
    expected = lambda text: [max(3, index + 2) for index in processor.encode(normalizer.normalize_str(text))]  # noqa: E731
    return Learned(tokenizer, expected)


def assert_same_ids(tokenizer: FastTokenizer, expected: Callable[[str], list[int]], texts: list[str]) -> None:
    library = tokenizer.hugging_face_tokenizer()
    library.encode_special_tokens = True  # as on our side, spelled symbols are text
    dictionary = Dictionary()
    for symbol in [*tokenizer.dictionary_symbols, "<mask>"]:
        dictionary.add_symbol(symbol)
    assert (dictionary.bos(), dictionary.eos()) == (0, 2)
    for text, encoding in zip(texts, library.encode_batch(texts), strict=True):
        wanted = expected(text)
        assert [dictionary.index(piece) for piece in tokenizer.encode(text)] == wanted, ascii(text)
        assert encoding.ids == [0, *wanted, 2], ascii(text)


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_ids_are_those_of_the_learner(learned, alphabet):
    assert_same_ids(*learned, random_texts(ALPHABETS[alphabet], TEXTS_PER_ALPHABET))


def test_ids_of_hostile_and_long_texts(learned):
    words = random.Random(2).choices(["bakeli", "moTa", "é", "中", "\x07", "  ", "."], k=3000)
    assert_same_ids(*learned, [*HOSTILE, "x" * 10_000, " ".join(words), "".join(words), " ", "\x01", "\u2028 \x85"])


def test_special_tokens_have_the_ids_of_fairseq(learned):
    library, symbols = learned.tokenizer.hugging_face_tokenizer(), ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    assert [library.token_to_id(learned.tokenizer.special_tokens[symbol]) for symbol in symbols] == [0, 1, 2, 3, 304]
    assert library.get_vocab_size() == 305


def test_mask_in_the_text_is_the_mask_token(learned):
    """It replaces a word: the text to the left and right of it keeps the ids that it has in the whole text."""
    library = learned.tokenizer.hugging_face_tokenizer()
    whole = [0, *learned.expected("bake monu. Tali"), 2]
    masked = library.encode("bake <mask>. Tali").ids
    mask = masked.index(304)
    assert masked[:mask] == whole[:mask]
    after = len(masked) - mask - 1
    assert masked[mask + 1 :] == whole[-after:]


def test_piece_that_spells_a_symbol_keeps_its_id():
    """A vocabulary in which "<s>" is a word: the special token gets another spelling, and both have their own id."""
    lines = ["x<s>y a<s>b c<s>d <s>"] * 20
    tokenizer, expected = sentencepiece_of(lines, vocab_size=16, split_by_unicode_script=False)
    assert r"\x{3c}s>" in tokenizer.dictionary_symbols, "the piece is in the vocabulary"
    assert tokenizer.special_tokens["<s>"] == "<<s>>"
    assert tokenizer.special_tokens["</s>"] == "</s>"
    text = "ab<s>b <s>"
    assert 4 + tokenizer.dictionary_symbols.index(r"\x{3c}s>") in expected(text)
    assert_same_ids(tokenizer, expected, [text])
    assert tokenizer.hugging_face_tokenizer().encode(text).ids == [0, *expected(text), 2]


@pytest.mark.parametrize("alphabet", ["ab", "abc"])
def test_merges_are_in_the_order_of_sentencepiece(alphabet):
    """Words of few letters: every text has many overlapping merges, so their order matters."""
    draw = random.Random(1)
    lines = [" ".join("".join(draw.choices(alphabet, k=draw.randint(1, 14))) for _ in range(8)) for _ in range(200)]
    texts = ["".join(draw.choices(alphabet + " ", k=draw.randint(1, 60))) for _ in range(2000)]
    assert_same_ids(*sentencepiece_of(lines, vocab_size=120), texts)


@pytest.mark.parametrize("cased", [True, False])
def test_normalization_is_nfc_with_single_spaces(cased):
    """Against Python's Unicode database, for the characters of Unicode 3.2, which every version knows."""
    normalizer = sentencepiece_rules(cased)
    category = unicodedata.ucd_3_2_0.category
    known = [[c for c in alphabet if category(c[0]) != "Cn"] for alphabet in ALPHABETS.values()]
    for text in [*HOSTILE, *(text for alphabet in known if alphabet for text in random_texts(alphabet, 400))]:
        characters = ("" if unicodedata.category(c) == "Cc" and not c.isspace() else c for c in text.translate(_RULES))
        normalized = unicodedata.normalize("NFC", "".join(characters)).translate(_RULES)
        if not cased:
            normalized = "".join(map(str.lower, normalized))
        assert normalizer.normalize_str(text).strip(" ") == " ".join(normalized.split()), ascii(text)


# SentencePiece's spaces that are none in Unicode, and separators that Python counts as spaces.
_RULES = dict.fromkeys(map(ord, "\u200b\u200e\u200f\u2581\ufeff\ufffd"), " ") | dict.fromkeys(range(0x1C, 0x20))


def sentencepiece_of(lines: list[str], vocab_size: int, **settings) -> Learned:
    model = train_bpe(lines, vocab_size, normalization_rule_name="identity", **settings)
    normalizer = sentencepiece_rules(True)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    expected = lambda text: [index + 3 for index in processor.encode(normalizer.normalize_str(text))]  # noqa: E731
    return Learned(from_sentencepiece(model, normalizer), expected)
