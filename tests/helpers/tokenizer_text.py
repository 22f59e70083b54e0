"""Difficult text for tokenizers, a small tokenizer of each kind, and the check that fairseq reads their pieces unchanged."""

import io
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from fairseq.data import Dictionary
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from amos_fairseq.text.tokenization import Tokenizer, load_tokenizer
from amos_fairseq.text.vocabulary import learn_tokenizer

HOSTILE = [
    "",
    " ",
    "a plain line of words",
    "Ünïcödé ﬁne — “quotes” … ½ \uff21\uff22\uff23 İstanbul ŒUVRE",
    "中国 and 日本 mixed with text",
    "snow☃man 🎉🎉 \U0001f9d1\u200d\U0001f33e",
    "<mask> <pad> <s> </s> <unk> x<mask>y <s></s>",
    "[MASK] [CLS] [SEP] [PAD] [UNK]",
    "the [MASK] of x[SEP]y",
    "the <mask> of x</s>y",
    "\\x{3c}mask> \\x{} \\x{20",
    "under_score snake@@ case@@and@@ </w> a</w>b ## ##ing",
    "tabs\tand\x0bother\x0cspaces\x85next\xa0line\u2028para\u3000end\x1cfield",
    "nul\x00 and control\x07 and \ufeff mark and soft\xadhyphen",
    "e\u0301 combining \u0301 alone",
    "aaaa aaaaaaaaa aaa " * 5,
    "x" * 5000,
    "the cat sat on the mat " * 500,
]
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


def random_texts(alphabet: list[str], number: int, seed: int = 5) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(alphabet, k=draw.choice([1, 2, 3, 5, 10, 30, 100]))) for _ in range(number)]


def write_sample(directory: Path) -> Path:
    """Synthetic words with a long tail, and text that makes special spellings frequent."""
    generator = random.Random(7)
    syllables = ["ba", "ke", "li", "mo", "nu", "Ta", "re", "sí", "on", "ing"]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(500)]
    lines = [" ".join(generator.choices(words, k=12)) + "." for _ in range(1500)]
    lines += ["<s>text</s> <s> </s> x<mask>y <mask> <unk> <pad> can't \\x{3c}"] * 300
    path = directory / "sample.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


# Text that the tokenizer of the released AMOS checkpoint has split.
SPLIT_LINES = ["the quick brown fox jumps over the lazy dog .", "it 's a ( small ) corpus , isn't it ? yes !"] * 20


def train_bpe(lines: Iterable[str], vocab_size: int, **settings: Any) -> bytes:
    """A SentencePiece model, BPE without control symbols unless ``settings`` of the trainer say otherwise."""
    model, defaults = io.BytesIO(), {"model_type": "bpe", "bos_id": -1, "eos_id": -1, "pad_id": -1, "minloglevel": 2}
    settings = defaults | {"sentence_iterator": iter(lines), "model_writer": model} | settings
    sentencepiece.SentencePieceTrainer.train(vocab_size=vocab_size, **settings)
    return model.getvalue()


def dictionary_of(tokenizer: Tokenizer, directory: Path) -> Dictionary:
    tokenizer.save(directory)
    return Dictionary.load(str(directory / "dict.txt"))


def assert_survives_fairseq(tokenizer: Tokenizer, directory: Path) -> None:
    """fairseq's own dictionary and line splitting keep each piece unchanged, and none becomes a symbol."""
    dictionary = dictionary_of(tokenizer, directory)
    assert dictionary.symbols[4:] == tokenizer.dictionary_symbols
    for line in HOSTILE:
        pieces = tokenizer.encode(line)
        ids = dictionary.encode_line(" ".join(pieces), add_if_not_exist=False, append_eos=False).tolist()
        assert len(ids) == len(pieces), line
        expected = [dictionary.indices.get(piece, dictionary.unk()) for piece in pieces]
        assert ids == expected
        assert not {dictionary.bos(), dictionary.pad(), dictionary.eos()} & set(ids), line
        assert "<mask>" not in pieces


def small_tokenizer_of_kind(directory: Path, kind: str) -> Tokenizer:
    """One that we learn, cased or uncased, or one of Hugging Face's library."""
    sample = write_sample(directory)
    if kind in ("cased", "uncased"):
        return learn_tokenizer(sample, 300, kind == "cased")
    return load_tokenizer(hugging_face_directory(directory / "tokenizer", kind, sample))


def learn(kind: str, special: Sequence[str], size: int, lines: Iterable[str]) -> tokenizers.Tokenizer:
    """A tokenizer of Hugging Face's library: WordPiece of BERT's kind, BPE of bytes, unigrams, or BPE of any characters."""
    unknown = next(token for token in special if "unk" in token.lower())
    settings: dict[str, Any] = {"vocab_size": size, "special_tokens": list(special), "show_progress": False}
    trainer: Any
    if kind == "wordpiece":
        library, trainer = (
            tokenizers.Tokenizer(models.WordPiece(unk_token=unknown)),
            trainers.WordPieceTrainer(**settings),
        )
        library.normalizer, library.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    elif kind.endswith("bytes"):
        library, alphabet = tokenizers.Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefixed bytes")
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **settings)
    elif kind.startswith("unigram"):
        library, trainer = (
            tokenizers.Tokenizer(models.Unigram()),
            trainers.UnigramTrainer(unk_token=unknown, **settings),
        )
        library.pre_tokenizer = pre_tokenizers.Metaspace()
        if kind == "unigram of words":
            library.normalizer = normalizers.NFKC()
            parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
            library.pre_tokenizer = pre_tokenizers.Sequence(parts)
    else:  # pieces with spaces inside, as a model without pre-tokenizer learns them
        library, trainer = tokenizers.Tokenizer(models.BPE(unk_token=unknown)), trainers.BpeTrainer(**settings)
    library.train_from_iterator(lines, trainer)
    return library


def hugging_face_directory(directory: Path, kind: str, sample: Path) -> Path:
    """A small tokenizer of the given model, as Hugging Face's library writes it."""
    special, size = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], 500 if kind.endswith("bytes") else 300
    if kind in ("bytes", "prefixed bytes", "unigram"):
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    library = learn(kind, special, size, sample.read_text(encoding="utf-8").split("\n"))
    kinds = {"wordpiece": decoders.WordPiece, "unigram": decoders.Metaspace}
    kinds |= dict.fromkeys(("bytes", "prefixed bytes"), decoders.ByteLevel)
    if kind in kinds:
        library.decoder = kinds[kind]()
    library.enable_truncation(8)
    library.enable_padding(length=8)
    directory.mkdir()
    library.save(str(directory / "tokenizer.json"))
    return directory


def word_level_directory(
    directory: Path, words: Iterable[str], absent: Iterable[str] = (), added: Iterable[str] = ()
) -> Path:
    """A tokenizer of whole words: with the special tokens but for ``absent``; those ``added`` got their ids after the words."""
    added = list(added)
    special = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if token not in (*absent, *added)]
    vocabulary = {token: index for index, token in enumerate([*special, *words])}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([*special, *added])
    directory.mkdir(parents=True)
    library.save(str(directory / "tokenizer.json"))
    return directory
