"""Tokenizers against the libraries that they stand for, on text that is meant to hurt."""

import json
import random
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from fairseq.data import Dictionary
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from amos_fairseq.data.fingerprint import directory_sha256
from amos_fairseq.errors import UserError
from amos_fairseq.interop.piece_spelling import SPECIAL_SYMBOLS, spell_piece, unspell_piece
from amos_fairseq.interop.tokenizer import load_tokenizer
from preprocess.pretraining.vocabulary import cut_long_line, learn_tokenizer

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
NASTY_CHARACTERS = " \t\x0b\x1c\x85\xa0\u2028\u3000\\{}x<>/s@#▁Ġ#é中☃\u0301ab0"


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    """Made-up words with a long tail, and text that makes special spellings frequent."""
    generator = random.Random(7)
    syllables = ["ba", "ke", "li", "mo", "nu", "Ta", "re", "sí", "on", "ing"]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(500)]
    lines = [" ".join(generator.choices(words, k=12)) + "." for _ in range(1500)]
    lines += ["<s>text</s> <s> </s> x<mask>y <mask> <unk> <pad> can't \\x{3c}"] * 300
    path = tmp_path_factory.mktemp("sample") / "sample.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(
    scope="module", params=["sentencepiece-cased", "sentencepiece-uncased", "fastbpe-uncased", "fastbpe-cased"]
)
def learned(request, sample):
    bpe, case = request.param.split("-")
    return learn_tokenizer(sample, bpe, 300, case == "cased")


def hugging_face_directory(directory: Path, kind: str, sample: Path) -> Path:
    """A small tokenizer of the given model, as Hugging Face's library would leave it."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if kind in ("bytes", "unigram") else None
    special = special or ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    lines = sample.read_text(encoding="utf-8").split("\n")
    if kind == "wordpiece":
        learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        learner.normalizer, learner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        learner.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    elif kind == "bytes":
        learner = tokenizers.Tokenizer(models.BPE())
        learner.pre_tokenizer, learner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "unigram":
        learner = tokenizers.Tokenizer(models.Unigram())
        learner.pre_tokenizer, learner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:  # pieces with spaces inside, as a model without pre-tokenizer learns them
        learner = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    learner.train_from_iterator(lines, trainer)
    learner.enable_truncation(8)
    learner.enable_padding(length=8)
    directory.mkdir()
    learner.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module", params=["wordpiece", "bytes", "unigram", "spaces"])
def hugging_face(request, sample, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "tokenizer"
    return load_tokenizer(hugging_face_directory(directory, request.param, sample)), directory


def dictionary_of(tokenizer, directory: Path) -> Dictionary:
    tokenizer.save(directory)
    return Dictionary.load(str(directory / "dict.txt"))


def assert_survives_fairseq(tokenizer, directory: Path) -> None:
    """Through fairseq's own dictionary and line splitting, each piece stays itself and none becomes a symbol."""
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


def test_learned_pieces_survive_fairseq(learned, tmp_path):
    assert len(learned) == 300
    assert_survives_fairseq(learned, tmp_path)


def test_saved_tokenizer_is_the_same_one(learned, tmp_path):
    learned.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.cased == learned.cased
    assert loaded.sha256 == learned.sha256 == directory_sha256(tmp_path)
    assert [loaded.encode(line) for line in HOSTILE] == learned.encode_lines(HOSTILE)


def test_learning_is_deterministic(learned, sample):
    again = learn_tokenizer(sample, learned.kind, len(learned), learned.cased)
    assert again.sha256 == learned.sha256


@pytest.mark.parametrize("bpe", ["sentencepiece", "fastbpe"])
def test_ties_are_broken_alike(tmp_path, bpe):
    """Words that occur once make every merge a tie, which a hash table would break differently each time."""
    generator = random.Random(1)
    words = ["".join(generator.choices("abcdefghij", k=8)) for _ in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(words) + "\n")
    learned = {learn_tokenizer(tmp_path / "text.txt", bpe, 400, True).sha256 for _ in range(4)}
    assert len(learned) == 1


@pytest.mark.parametrize("cased", [True, False])
def test_sentencepiece_parity(sample, cased):
    """Pieces are the library's own; decoded text is what its normaliser, called apart, makes of the line."""
    tokenizer = learn_tokenizer(sample, "sentencepiece", 300, cased)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer._model)
    rule = "nmt_nfkc" if cased else "nmt_nfkc_cf"
    normalizer = sentencepiece.SentencePieceNormalizer(rule_name=rule, remove_extra_whitespaces=True)
    for line in HOSTILE:
        pieces = tokenizer.encode(line)
        assert [unspell_piece(piece) for piece in pieces] == processor.encode(line, out_type=str)
        assert tokenizer.decode(pieces) == normalizer.normalize(line).replace("▁", " ").strip(" ")


@pytest.mark.parametrize("cased", [True, False])
def test_fastbpe_parity(sample, cased, tmp_path):
    """The real fastBPE package, given our codes and the words of BERT's rules, writes the same pieces."""
    fastBPE = pytest.importorskip("fastBPE", reason="the fastBPE package needs a compiler to install")
    tokenizer = learn_tokenizer(sample, "fastbpe", 300, cased)
    tokenizer.save(tmp_path)
    reference = fastBPE.fastBPE(str(tmp_path / "bpe.codes"))
    normalizer = normalizers.BertNormalizer(lowercase=not cased, strip_accents=not cased)
    lines = [*HOSTILE[:-2], "x" * 300, *sample.read_text(encoding="utf-8").split("\n")[::40]]
    for line in lines:
        words = pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(line))
        treated = " ".join(word for word, _ in words)
        pieces = tokenizer.encode(line)
        expected = reference.apply([treated])[0] if treated else ""
        assert " ".join(unspell_piece(piece) for piece in pieces) == expected.strip(" ")
        assert tokenizer.decode(pieces) == treated


def test_every_piece_of_fastbpe_can_occur_in_its_text(sample, tmp_path):
    """The vocabulary is closed: on the text that it was learned from nothing is unknown."""
    tokenizer = learn_tokenizer(sample, "fastbpe", 300, False)
    symbols = set(tokenizer.dictionary_symbols)
    assert {piece for line in sample.read_text().split("\n") for piece in tokenizer.encode(line)} <= symbols


def test_hugging_face_pieces_survive_fairseq(hugging_face, tmp_path):
    assert_survives_fairseq(hugging_face[0], tmp_path)


def test_hugging_face_ids_are_those_of_the_library(hugging_face):
    """Ids go there and back; a line gets the library's own encoding, whole, unless that holds a special id."""
    tokenizer, directory = hugging_face
    reference = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    reference.no_truncation()
    reference.no_padding()
    reference.encode_special_tokens = True
    ids = tokenizer.hugging_face_ids
    assert sorted(ids.values()) == sorted(reference.get_vocab().values())
    assert set(tokenizer.special_tokens) == set(SPECIAL_SYMBOLS)
    for symbol, token in tokenizer.special_tokens.items():
        assert ids[symbol] == reference.token_to_id(token)
    special = {ids[symbol] for symbol in SPECIAL_SYMBOLS} - {ids["<unk>"]}
    compared = 0
    for line in HOSTILE:
        expected = reference.encode(line, add_special_tokens=False).ids
        if not special & set(expected) and tokenizer.special_tokens["<unk>"] not in line:
            compared += 1
            assert [ids[piece] for piece in tokenizer.encode(line)] == expected
    # Only a model that finds its special tokens as pieces of text (unigram) has lines that cannot be compared.
    assert compared >= len(HOSTILE) - 3


def test_hugging_face_special_spelling_stays_text(hugging_face, tmp_path):
    tokenizer, _ = hugging_face
    mask = tokenizer.special_tokens["<mask>"]
    pieces = tokenizer.encode(f"ba{mask}ke {mask}")
    assert not set(pieces) & {"<mask>", "<s>", "</s>", "<pad>"}
    # All its characters are in the text that the vocabulary was learned from, or the word is unknown as a whole.
    assert "mask" in tokenizer.decode(pieces).lower().replace(" ", "") or "<unk>" in pieces


def test_hugging_face_byte_level_round_trip(sample, tmp_path):
    tokenizer = load_tokenizer(hugging_face_directory(tmp_path / "bytes", "bytes", sample))
    for line in HOSTILE:
        assert tokenizer.decode(tokenizer.encode(line)) == line


def test_hugging_face_saved_tokenizer_is_the_same_one(hugging_face, tmp_path):
    tokenizer, _ = hugging_face
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.hugging_face_ids == tokenizer.hugging_face_ids
    assert loaded.encode_lines(HOSTILE) == [tokenizer.encode(line) for line in HOSTILE]


def test_configuration_names_the_special_tokens(sample, tmp_path):
    """Names in the configuration go before the usual spellings."""
    directory = hugging_face_directory(tmp_path / "named", "wordpiece", sample)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"cls_token": "[SEP]", "sep_token": {"content": "[CLS]"}, "mask_token": None})
    )
    special = load_tokenizer(directory).special_tokens
    assert special == {"<s>": "[SEP]", "<pad>": "[PAD]", "</s>": "[CLS]", "<unk>": "[UNK]", "<mask>": "[MASK]"}


def test_long_lines_are_cut_between_words_and_characters():
    line = " ".join(f"word{i}é" for i in range(3000))
    parts = list(cut_long_line(line, 100))
    assert max(len(part.encode()) for part in parts) <= 100
    assert " ".join(parts) == line
    solid = "é中☃" * 100
    assert "".join(cut_long_line(solid, 50)) == solid


def break_dictionary(directory: Path) -> None:
    path = directory / "dict.txt"
    lines = path.read_text(encoding="utf-8").split("\n")
    lines[4], lines[5] = lines[5], lines[4]
    path.write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "tokenizer.settings.json").unlink(), "holds no tokenizer"),
        (lambda d: (d / "tokenizer.settings.json").write_text("{"), "is not JSON"),
        (lambda d: (d / "tokenizer.settings.json").write_text('{"kind": "words"}'), "'kind' must be one of"),
        (lambda d: (d / "tokenizer.settings.json").write_text('{"kind": "fastbpe"}'), "'cased' must be"),
        (lambda d: next(d.glob("[bs]*.[cm]o*")).unlink(), "is missing"),
        (lambda d: next(d.glob("[bs]*.[cm]o*")).write_bytes(b""), "is empty"),
        (lambda d: (d / "dict.txt").unlink(), "dict.txt is missing"),
        (lambda d: (d / "dict.txt").write_text("a b c\n"), "expected 'piece count'"),
        (break_dictionary, "does not match"),
        (lambda d: (d / "dict.txt").write_text("x 1\n"), "does not match"),
    ],
)
def test_damaged_directory_is_refused(learned, tmp_path, damage, message):
    learned.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"no model", b"\xff\xfe"])
def test_broken_model_is_refused(learned, tmp_path, content):
    learned.save(tmp_path)
    (tmp_path / learned.model_file).write_bytes(content)
    with pytest.raises(UserError, match=r"is not (a SentencePiece model|UTF-8 text)|does not match"):
        load_tokenizer(tmp_path)


def test_broken_hugging_face_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a usable Hugging Face tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="is not a directory"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("bpe", ["sentencepiece", "fastbpe"])
def test_impossible_vocabulary_sizes_name_the_possible(sample, bpe):
    """The size that the message names is possible, one more is not."""
    with pytest.raises(UserError, match=r"at most \d+") as refusal:
        learn_tokenizer(sample, bpe, 100_000, True)
    largest = int(str(refusal.value).split("at most ")[1].split(",")[0])
    assert len(learn_tokenizer(sample, bpe, largest, True)) == largest
    with pytest.raises(UserError, match="larger than the text allows"):
        learn_tokenizer(sample, bpe, largest + 1, True)
    with pytest.raises(UserError, match=r"at least \d+") as refusal:
        learn_tokenizer(sample, bpe, 5, True)
    smallest = int(str(refusal.value).split("at least ")[1])
    assert len(learn_tokenizer(sample, bpe, smallest, True)) == smallest
