"""The exported tokenizer against the input of our models: our tokenizer, then fairseq's own dictionary.

SentencePiece and the `tokenizers` library are the two sides, on thousands of random texts and on difficult ones.
"""

import io
import random
from pathlib import Path

import pytest
import sentencepiece
from fairseq.data import Dictionary
from hugging_face_folders import LINES, write_tokenizer
from tokenizer_text import HOSTILE, write_sample
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from amos_fairseq.errors import UserError
from amos_fairseq.tokenization import Tokenizer, load_tokenizer
from amos_fairseq.tokenization.fast_tokenizer import FastTokenizer, fast_tokenizer, with_padding_at_1
from amos_fairseq.tokenization.sentencepiece_tokenizer import SentencePieceTokenizer
from preprocess.pretraining.vocabulary import learn_tokenizer

TEXTS_PER_ALPHABET = 400
_MARKS = [*map(chr, range(0x300, 0x370)), "\u3099", "\u309a", "\uff9e", "\uff9f", "\u05bc", "\u093c"]
ALPHABETS = {
    "every plane": [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000],
    "the first planes": [chr(code) for code in range(0x3000)],
    "accents": [*"aeiouAEIOUcnsE ĲŉÅﬁωΑα𝚎ℜかｶ", *_MARKS],
    "control characters": [*map(chr, range(0x21)), *"\x7f\x85\xa0\xad\u200b\u200d\u2028\u3000\ufeff\ufffd▁ae\u0301 "],
    "Hangul": [*map(chr, range(0x1100, 0x1200)), *map(chr, range(0xAC00, 0xAC80)), " "],
    "scripts": [chr(code) for code in (*range(0x900, 0xE00), *range(0x113B0, 0x113D0), *range(0x16100, 0x16130))],
    "emoji": [*"👩\u200d🚀🏽❤\ufe0f🇩🇪1\u20e3e\u0301 "],
    "no characters": [*"\ufdd0\ufdd1\ufdd2\uffff ae\u0301é"],
    "two letters": [*"aab "],
    "the vocabulary's letters": [*"bakelimonuTaresíonng ."],
    "ASCII": [chr(code) for code in range(0x20, 0x7F)],
    "spelled symbols": ["<mask>", "<s>", "</s>", "<unk>", "[MASK]", "<pad>", "a", " ", "</w>", "@@", "▁", "\\x{3c}"],
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample"))


def learned(sample: Path, name: str) -> Tokenizer:
    bpe, case = name.split("-")
    return learn_tokenizer(sample, bpe, 300, case == "cased")


@pytest.fixture(
    scope="module", params=["sentencepiece-cased", "sentencepiece-uncased", "fastbpe-cased", "fastbpe-uncased"]
)
def ours(request, sample) -> Tokenizer:
    return learned(sample, request.param)


@pytest.fixture(scope="module")
def exported(ours) -> FastTokenizer:
    return fast_tokenizer(ours)


@pytest.fixture(autouse=True)
def spelled_symbols_are_special(request):
    """The library's default, which some tests change."""
    if "exported" in request.fixturenames:
        request.getfixturevalue("exported").tokenizer.encode_special_tokens = False


def expected_ids(tokenizer: Tokenizer, fast: FastTokenizer, *texts: str) -> list[int]:
    """``<s> A </s> B </s>`` by fairseq's dictionary, in the ids of the exported tokenizer."""
    dictionary = Dictionary()
    for symbol in [*tokenizer.dictionary_symbols, "<mask>"]:
        dictionary.add_symbol(symbol)
    rows = [dictionary.bos()]
    for text in texts:
        rows += [*(dictionary.index(piece) for piece in tokenizer.encode(text)), dictionary.eos()]
    return fast.ids[rows].tolist()


def random_texts(alphabet: list[str], seed: int = 5) -> list[str]:
    draw = random.Random(seed)
    return [
        "".join(draw.choices(alphabet, k=draw.choice([1, 2, 3, 5, 10, 30, 100]))) for _ in range(TEXTS_PER_ALPHABET)
    ]


def assert_same_ids(tokenizer: Tokenizer, fast: FastTokenizer, texts: list[str]) -> None:
    fast.tokenizer.encode_special_tokens = True  # as on our side, spelled symbols are text
    dictionary = Dictionary()
    for symbol in [*tokenizer.dictionary_symbols, "<mask>"]:
        dictionary.add_symbol(symbol)
    for text, encoding in zip(texts, fast.tokenizer.encode_batch(texts), strict=True):
        rows = [dictionary.index(piece) for piece in tokenizer.encode(text)]
        assert encoding.ids == fast.ids[[dictionary.bos(), *rows, dictionary.eos()]].tolist(), ascii(text)


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_ids_of_our_own_tokenizers(ours, exported, alphabet):
    assert_same_ids(ours, exported, random_texts(ALPHABETS[alphabet]))


def test_ids_of_hostile_and_long_texts(ours, exported):
    words = random.Random(2).choices(["bakeli", "moTa", "é", "中", "\x07", "  ", "."], k=3000)
    assert_same_ids(
        ours, exported, [*HOSTILE, "x" * 10_000, " ".join(words), "".join(words), " ", "\x01", "\u2028 \x85"]
    )


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_ids_of_hugging_face_tokenizers(family, tmp_path):
    """WordPiece and byte-level BPE keep their ids, which are also our models' input."""
    write_tokenizer(tmp_path / family, family)
    tokenizer = load_tokenizer(tmp_path / family)
    fast = fast_tokenizer(tokenizer)
    for alphabet in ALPHABETS.values():
        assert_same_ids(tokenizer, fast, random_texts(alphabet)[:100])
    library = Library.from_file(str(tmp_path / family / "tokenizer.json"))
    text = "the quick brown fox"
    assert fast.tokenizer.encode(text).ids[1:-1] == library.encode(text, add_special_tokens=False).ids


def test_our_ids_are_fairseqs(ours, exported):
    assert exported.ids.tolist() == list(range(len(ours) + 5))
    assert exported.num_rows == len(ours) + 5
    assert [exported.id_of(symbol) for symbol in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")] == [0, 1, 2, 3, 304]


def test_pairs_are_framed_with_one_separator(ours, exported):
    encoding = exported.tokenizer.encode("bake li", "monu")
    assert encoding.ids == expected_ids(ours, exported, "bake li", "monu")
    second = len(expected_ids(ours, exported, "bake li"))
    assert encoding.type_ids == [0] * second + [1] * (len(encoding.ids) - second)


def test_mask_in_the_text_is_the_mask_token(ours, exported):
    """It replaces a word: the text to the left and right of it keeps the ids that it has in the whole text."""
    whole = expected_ids(ours, exported, "bake monu. Tali")
    masked = exported.tokenizer.encode("bake <mask>. Tali").ids
    mask = masked.index(exported.id_of("<mask>"))
    assert masked[:mask] == whole[:mask]
    after = len(masked) - mask - 1
    assert masked[mask + 1 :] == whole[-after:]


def test_spelled_symbols_are_special_unless_asked(exported):
    fast = exported.tokenizer
    assert fast.encode("a</s>").ids.count(2) == 2
    fast.encode_special_tokens = True
    assert fast.encode("a</s>").ids.count(2) == 1


def test_piece_that_spells_a_symbol_keeps_its_id():
    """A vocabulary in which "<s>" is a word: the special token gets another spelling, and both have their own id."""
    tokenizer = sentencepiece_of(["x<s>y a<s>b c<s>d <s>"] * 20, vocab_size=16, split_by_unicode_script=False)
    symbols = [symbol for symbol in tokenizer.dictionary_symbols if "s>" in symbol]
    assert r"\x{3c}s>" in symbols, "the piece is in the vocabulary"
    fast = fast_tokenizer(tokenizer)
    assert fast.special_tokens["<s>"] == "<<s>>"
    assert fast.special_tokens["</s>"] == "</s>"
    text = "ab<s>b <s>"
    expected = expected_ids(tokenizer, fast, text)
    assert 4 + tokenizer.dictionary_symbols.index(r"\x{3c}s>") in expected
    assert fast.tokenizer.encode(text).ids == expected


@pytest.mark.parametrize("alphabet", ["ab", "abc"])
def test_merges_are_in_the_order_of_sentencepiece(alphabet):
    """Words of few letters: every text has many overlapping merges, so their order matters."""
    draw = random.Random(1)
    lines = [" ".join("".join(draw.choices(alphabet, k=draw.randint(1, 14))) for _ in range(8)) for _ in range(200)]
    tokenizer = sentencepiece_of(lines, vocab_size=120)
    texts = ["".join(draw.choices(alphabet + " ", k=draw.randint(1, 60))) for _ in range(2000)]
    assert_same_ids(tokenizer, fast_tokenizer(tokenizer), texts)


def test_decoding_gives_the_normalized_text(ours, exported):
    fast = exported.tokenizer
    text = "bake limo Tare."
    ids = fast.encode(text).ids
    assert fast.decode(ids).replace(" ", "") == ours.decode(ours.encode(text)).replace(" ", "")
    assert "<s>" in fast.decode(ids, skip_special_tokens=False)


def unigram_folder(folder: Path) -> None:
    """A model whose vocabulary is a list, in which the position is the id."""
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="[UNK]", show_progress=False)
    library.train_from_iterator(LINES, trainer)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("write", [lambda folder: write_tokenizer(folder, "bert"), unigram_folder])
def test_padding_moves_to_id_1_and_nothing_else_changes(write, tmp_path):
    write(tmp_path / "folder")
    before = fast_tokenizer(load_tokenizer(tmp_path / "folder"))
    after = with_padding_at_1(before)
    assert (before.id_of("<pad>"), after.id_of("<pad>")) == (0, 1)
    exchanged = {0: 1, 1: 0}
    assert after.ids.tolist() == [exchanged.get(index, index) for index in before.ids.tolist()]
    for text in [*HOSTILE, "the \u4e2d fox"]:
        ids = before.tokenizer.encode(text, "dogs").ids
        assert after.tokenizer.encode(text, "dogs").ids == [exchanged.get(index, index) for index in ids]
    assert with_padding_at_1(after) is after


def sentencepiece_of(lines: list[str], vocab_size: int, **settings) -> SentencePieceTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, unk_id=0, minloglevel=2,
        **({"model_type": "bpe", "bos_id": -1, "eos_id": -1, "pad_id": -1} | settings),
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue(), cased=True)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "unigram", "vocab_size": 30}, "is not a BPE model"),
        ({"byte_fallback": True, "vocab_size": 300}, "falls back to bytes"),
        ({"user_defined_symbols": ["@user"]}, "has user-defined pieces"),
        ({"treat_whitespace_as_suffix": True}, "puts spaces at the end of words"),
        ({"add_dummy_prefix": False}, "adds no space before the first word"),
        ({"remove_extra_whitespaces": False}, "keeps runs of spaces"),
    ],
)
def test_models_that_cannot_be_converted_exactly_are_refused(settings, reason):
    lines = ["the quick brown fox jumps over the lazy dog", "a lazy fox and a quick dog"] * 20
    tokenizer = sentencepiece_of(lines, **({"vocab_size": 40} | settings))
    with pytest.raises(UserError, match=f"the SentencePiece model {reason}"):
        fast_tokenizer(tokenizer)
