"""The tokenizer.json of a learned vocabulary against its learner, SentencePiece.

Thousands of random texts and difficult ones, on both ways that the file is used: our tokenizer, word by word, then fairseq's
own dictionary; and the library with whole texts, as Hugging Face's clients call it.
"""

import gzip
import itertools
import json
import lzma
import os
import random
import re
import unicodedata
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tiny_runs import ROOT
from tokenizer_text import ALPHABETS, HOSTILE, hugging_face_directory, random_texts, train_bpe, word_level_directory
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from amos_fairseq.checkpoints.read import dictionary_of
from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.conversion import check_on_text, convert
from amos_fairseq.text.tokenization.exported import exported_tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer
from amos_fairseq.text.tokenization.tokenizer import spell_piece
from amos_fairseq.text.tokenization.word_pieces import unspell_piece
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
    dictionary = dictionary_of(tokenizer)
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


WORDS = re.findall(
    r"\S+", "the quick brown fox jumps over lazy dogs and İstanbul señor años 中国 日本 fix 12 3.5 <sep> don't ½ ﬁn"
)
TEXTS = [
    *(" ".join(random.Random(seed).choices(WORDS, k=12)) for seed in range(400)),
    "Cafe\u0301 na\u00efve; Vie\u0323\u0302t Việt, العربية, עברית ﾊﾟ",
    "two  spaces\tand a tab \u3000 \u200b snow☃☃man ☃ \x07 control <sep>",
]
REAL = ROOT.parent / "shared" / "data"
MODELS = {
    "bpe": {"model_type": "bpe"},
    "bpe identity": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "bpe bytes": {"model_type": "bpe", "byte_fallback": True},
    "bpe user": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "1", "fox"], "control_symbols": ["[CLS]"]},
    "bpe nfkc": {"model_type": "bpe", "normalization_rule_name": "nfkc", "pad_id": 3, "bos_id": 1, "eos_id": 2},
    "bpe no prefix": {"model_type": "bpe", "add_dummy_prefix": False},
    "bpe spaces": {"model_type": "bpe", "remove_extra_whitespaces": False},
    "unigram": {"model_type": "unigram", "unk_piece": "??"},
    "unigram bytes": {"model_type": "unigram", "byte_fallback": True},
    "unigram user": {"model_type": "unigram", "user_defined_symbols": ["<sep>", "1", "fox"]},
}


def real_lines() -> list[str]:
    lines = []
    if REAL.is_dir():
        with gzip.open(REAL / "corpus" / "heldout.txt.gz", "rt", encoding="utf-8") as stream:
            lines += itertools.islice((line.strip() for line in stream if line.strip()), 300)
        for name in ("tr_imst-ud-dev", "zh_gsdsimp-ud-dev"):
            with lzma.open(REAL / "ud" / f"{name}.conllu.xz", "rt", encoding="utf-8") as stream:
                found = (line[9:].strip() for line in stream if line.startswith("# text = "))
                lines += itertools.islice(found, 200)
    return lines


def expected_pieces(model: bytes, lines: list[str]) -> list[list[str]]:
    """SentencePiece's own pieces; what it calls unknown is written as the text."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    known = {processor.id_to_piece(index) for index in range(len(processor)) if not processor.is_unknown(index)}
    encoded = processor.encode(lines, out_type=str)
    return [[spell_piece(piece) if piece in known else "<unk>" for piece in line] for line in encoded]


@pytest.mark.parametrize("name", MODELS)
def test_a_sentencepiece_model_keeps_its_pieces(name, tmp_path):
    """Also after saving and in the exported tokenizer, whose ids are those of dict.txt."""
    lines = [*TEXTS, *real_lines()]
    # Each letter is a piece, and the real lines have 1,350 (Chinese).
    settings = {"vocab_size": 2000 if real_lines() else 500, "hard_vocab_limit": False} | MODELS[name]
    model = train_bpe(lines, **settings)
    (tmp_path / "spm.model").write_bytes(model)
    tokenizer = convert(tmp_path / "spm.model", None, lines)
    check_on_text(tokenizer, real_lines() or lines)
    expected = expected_pieces(model, lines)
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    exported = exported_tokenizer(loaded)
    for line, pieces in zip(lines, expected, strict=True):
        assert tokenizer.encode(line) == pieces, ascii(line)
        assert loaded.encode(line) == pieces
        ids = [loaded.hugging_face_ids[piece] for piece in pieces]
        assert exported.encode(line).ids[1:-1] == ids
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ordinary = [
        processor.id_to_piece(index)
        for index in range(len(processor))
        if not processor.is_unknown(index) and not processor.is_control(index)
    ]
    assert list(map(unspell_piece, tokenizer.dictionary_symbols)) == ordinary


def test_ways_to_split_with_equal_scores(tmp_path):
    """SentencePiece's float32 sums choose another one than the library, which must not refuse the model; el is the user's."""
    scores = {
        "▁": -2.1,
        "0": -3.3,
        "00": -4.7,
        "▁a": -5.9,
        "b": -6.3,
        "▁love": -8.9,
        "▁lov": -10,
        "ly": -6.2,
        "y": -5.1,
        "el": 0,
    }
    proto = sentencepiece_model_pb2.ModelProto.FromString(
        train_bpe(TEXTS, 300, model_type="unigram", hard_vocab_limit=False)
    )
    del proto.pieces[1:]
    for piece, score in scores.items():
        proto.pieces.add(piece=piece, score=score, type=1 if score else 4)
    model = proto.SerializeToString()
    (tmp_path / "spm.model").write_bytes(model)
    lines = [f"{'a ' * first}{'b' * second}000" for first in range(20) for second in range(20)]
    tokenizer, expected = convert(tmp_path / "spm.model", None, lines), expected_pieces(model, lines)
    differing = [
        pair for pair in zip(tokenizer.encode_lines(lines), expected, strict=True) if len({*map(tuple, pair)}) > 1
    ]
    assert tokenizer.encode("lovely") == ["▁lov", "el", "y"] == expected_pieces(model, ["lovely"])[0]
    assert len(differing) > len(lines) / 200
    assert all(sorted(ours) == sorted(theirs) for ours, theirs in differing)


def fastbpe(line: str, codes: list[tuple[str, str]], vocabulary: Collection[str]) -> list[str]:
    """fastBPE's algorithm (process_bpe, limitVocab and decompose of fastBPE.hpp), naively."""
    pieces = []
    for word in filter(None, line.split(" ")):
        parts = [*word[:-1], word[-1] + "</w>"]
        while ranked := [codes.index(pair) for pair in itertools.pairwise(parts) if pair in codes]:
            first, second = codes[min(ranked)]
            merged: list[str] = []
            while parts:
                together = parts[:2] == [first, second]
                merged.append("".join(parts[:2]) if together else parts[0])
                parts = parts[2:] if together else parts[1:]
            parts = merged
        waiting = parts[::-1]
        while waiting:
            part = waiting.pop()
            piece = part.removesuffix("</w>") if part.endswith("</w>") else part + "@@"
            halves = next((pair for pair in codes if "".join(pair) == part), None)
            if piece in vocabulary or halves is None:
                pieces.append(piece if piece in vocabulary else "<unk>")
            else:
                waiting += [halves[1], halves[0]]
    return pieces


def learned_codes(folder: Path) -> tuple[list[tuple[str, str]], dict[str, None]]:
    """Write ``codes`` and ``vocab``; half of the merged pieces are not in the vocabulary, and are divided again."""
    library = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    library.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    trainer = trainers.BpeTrainer(vocab_size=150, end_of_word_suffix="</w>", show_progress=False)
    library.train_from_iterator(TEXTS, trainer)
    results: dict[str, tuple[str, str]] = {}
    for first, second in json.loads(library.to_str())["model"]["merges"]:
        results.setdefault(first + second, (first, second))
    codes = list(results.values())
    write = lambda name, lines: (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")  # noqa: E731
    write("codes", (f"{first} {second} 1" for first, second in codes))
    spelled = [part.removesuffix("</w>") if part.endswith("</w>") else part + "@@" for part in [*results][::2]]
    spelled += [f"{letter}{mark}" for letter in "abdefghijklmnopqrstuvwxz" for mark in ("", "@@")]
    vocabulary = dict.fromkeys(spelled)
    write("vocab", (f"{piece} 1" for piece in vocabulary))
    return codes, vocabulary


def test_fastbpe_codes_and_vocabulary(tmp_path):
    codes, vocabulary = learned_codes(tmp_path)
    convert(tmp_path / "codes", tmp_path / "vocab", []).save(tmp_path / "saved")
    tokenizer = load_tokenizer(tmp_path / "saved")
    assert tokenizer.dictionary_symbols == [*vocabulary]
    assert any(map(tokenizer.finds_special_token, TEXTS))
    for text in TEXTS:
        pieces = fastbpe(text, codes, vocabulary)
        assert tokenizer.encode(text) == pieces
        assert [piece for piece, _, _ in tokenizer.encode_with_offsets(text)] == pieces
    assert tokenizer.decode(tokenizer.encode("the fox jumps")) == "the fox jumps"


def test_the_naive_algorithm_is_fastbpes(tmp_path):
    """pip install --no-build-isolation 'amos_fairseq[fastbpe]'"""
    program = pytest.importorskip("fastBPE")
    codes, vocabulary = learned_codes(tmp_path)
    lines = [line for line in [*TEXTS, *real_lines()] if "  " not in line]
    applied = program.fastBPE(str(tmp_path / "codes"), str(tmp_path / "vocab")).apply(lines)
    expected = [[piece if piece in vocabulary else "<unk>" for piece in line.split(" ")] for line in applied]
    assert [fastbpe(line, codes, vocabulary) for line in lines] == expected
    assert convert(tmp_path / "codes", tmp_path / "vocab", []).encode_lines(lines) == expected


@pytest.mark.parametrize("kind", ["bytes", "wordpiece"])
def test_files_of_the_tutorials(kind, sample, tmp_path):
    """vocab.json with merges.txt, and vocab.txt, against the library that wrote them; a tokenizer.json of any name."""
    folder = hugging_face_directory(tmp_path / kind, kind, sample)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lone = (folder / "tokenizer.json").rename(tmp_path / "mine.json")
    library.model.save(str(folder))
    read, by_file = convert(folder, None, []), convert(lone, None, [])
    lines = sample.read_text(encoding="utf-8").splitlines()[:300]
    assert read.encode_lines(lines) == by_file.encode_lines(lines)
    assert read.dictionary_symbols == by_file.dictionary_symbols


def unigram_of_bpe() -> FastTokenizer:
    """A BPE model's pieces read as unigrams whose scores are the negative ids, as T5's class of transformers does."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(train_bpe(TEXTS, 300, hard_vocab_limit=False))
    library = Tokenizer(models.Unigram([(piece.piece, piece.score) for piece in proto.pieces], 0))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return FastTokenizer(library.to_str().encode(), {"<unk>": "<unk>"})


def library_of_nothing() -> FastTokenizer:
    library = Tokenizer(models.BPE({"q": 0, "<s>": 1}, []))
    library.normalizer = normalizers.Replace(Regex(r"[\s\S]"), "")
    return FastTokenizer(library.to_str().encode(), {"<s>": "<s>"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: unigram_of_bpe(), "pieces are divided again by it, the first: '▁"),
        (lambda path: load_tokenizer(word_level_directory(path / "a", ["the", "fox"])), "unknown pieces, the first: '"),
        (lambda _: library_of_nothing(), "lines have no piece"),
    ],
)
def test_a_wrong_tokenizer_is_refused_with_a_count(make, message, tmp_path):
    with pytest.raises(UserError, match=message):
        check_on_text(make(tmp_path), TEXTS)


@pytest.mark.parametrize(
    ("text", "is_equal"), [("Vie\u0323\u0302t", True), ("\u0634\u064e\u0651", True), ("a\u0344 \ufb01\u0301", False)]
)
def test_accents_that_the_library_would_drop(text, is_equal, tmp_path):
    """Decomposed Vietnamese needs them composed first, vocalized Arabic must not have them reordered."""
    lines = [text, *TEXTS[:100]]
    model = train_bpe([*lines, *"\u0301\u0308"], 300, hard_vocab_limit=False)
    (tmp_path / "spm.model").write_bytes(model)
    if is_equal:
        assert convert(tmp_path / "spm.model", None, lines).encode_lines(lines) == expected_pieces(model, lines)
    else:
        with pytest.raises(UserError, match=r"cannot be converted exactly: behind ' a.* SentencePiece makes \["):
            convert(tmp_path / "spm.model", None, lines)


def test_the_unknown_token_is_that_of_the_model(tmp_path):
    """Whatever the files beside it call so."""
    library = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -1.0), ("[UNK]", -9.0)], 0))
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "[UNK]"}')
    assert load_tokenizer(tmp_path).special_tokens["<unk>"] == "<unk>"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"spm.model": b"\x0a\xff\xff"}, "is not a SentencePiece model"),
        ({"spm.model": b"#version: 0.2\na b\n"}, "has the codes of subword-nmt, which are not read"),
        ({"spm.model": b""}, "models of the types bpe and unigram are read"),
        ({"spm.model": b"a b\n"}, "is not a Sent"),
        ({"codes": b"a b 1\n"}, "has the codes of fastBPE: give its vocabulary, too, by --vocabulary"),
        ({"vocab.json": b'{"a": 0}', "merges.txt": b"a b c\n"}, "the vocabulary files in .* cannot be read"),
        (
            {"vocab.json": b'{"a": 0, "t</w>": 1, "at</w>": 2}', "merges.txt": b"a t</w>\n"},
            r"cannot be read \(its BPE is not one of bytes: give its tokenizer.json\)",
        ),
    ],
)
def test_what_is_no_model_is_one_line(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        convert(tmp_path / next(iter(files)), None, [])


@pytest.mark.parametrize(
    ("pieces", "config", "expected"),
    [
        ("niño comió", None, ["niño", "comió"]),
        ("nino comio", None, ["nino", "comio"]),
        ("niño nino comió comio", '{"do_lower_case": true, "strip_accents": true}', ["nino", "comio"]),
    ],
)
def test_wordpiece_keeps_accents_that_its_pieces_have(pieces, config, expected, tmp_path):
    text = "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces.split()])
    (tmp_path / "vocab.txt").write_text(text + "\n", encoding="utf-8-sig")
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    assert convert(tmp_path / "vocab.txt", None, []).encode("Niño comió") == expected
