"""A tokenizer.json of every kind of model, against the library that wrote it."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizer_text import HOSTILE, assert_survives_fairseq, write_sample
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.tokenizer import exported_tokenizer
from amos_fairseq.text.tokenization import Tokenizer, load_tokenizer
from amos_fairseq.text.tokenization.tokenizer import SPECIAL_SYMBOLS, spell_piece
from amos_fairseq.text.vocabulary import learn_tokenizer


def small_tokenizer_of_kind(directory: Path, kind: str) -> Tokenizer:
    """One that we learn, such as sentencepiece-cased, or one of Hugging Face's library."""
    sample = write_sample(directory)
    if "-" in kind:
        bpe, case = kind.split("-")
        return learn_tokenizer(sample, bpe, 300, case == "cased")
    return load_tokenizer(hugging_face_directory(directory / "tokenizer", kind, sample))


def hugging_face_directory(directory: Path, kind: str, sample: Path) -> Path:
    """A small tokenizer of the given model, as Hugging Face's library writes it."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    if kind in ("bytes", "unigram"):
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    settings = {"vocab_size": 300, "special_tokens": special, "show_progress": False}
    lines = sample.read_text(encoding="utf-8").split("\n")
    if kind == "wordpiece":
        learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        learner.normalizer, learner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        learner.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**settings)
    elif kind == "bytes":
        learner = tokenizers.Tokenizer(models.BPE())
        learner.pre_tokenizer, learner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        settings |= {"vocab_size": 500, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
        trainer = trainers.BpeTrainer(**settings)
    elif kind == "unigram":
        learner = tokenizers.Tokenizer(models.Unigram())
        learner.pre_tokenizer, learner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **settings)
    else:  # pieces with spaces inside, as a model without pre-tokenizer learns them
        learner = tokenizers.Tokenizer(models.BPE(unk_token="[UNK]"))
        trainer = trainers.BpeTrainer(**settings)
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


def test_hugging_face_pieces_survive_fairseq(hugging_face, tmp_path):
    assert_survives_fairseq(hugging_face[0], tmp_path)


def test_hugging_face_ids_are_those_of_the_library(hugging_face):
    """Ids map in both directions; a line gets exactly the library's own encoding, unless that contains a special id."""
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
    # Its characters are all in the text that the vocabulary was learned from, or the whole word is unknown.
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
    """Names in the configuration take precedence over the usual spellings."""
    directory = hugging_face_directory(tmp_path / "named", "wordpiece", sample)
    names = {"cls_token": "[SEP]", "sep_token": {"content": "[CLS]"}, "mask_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    special = load_tokenizer(directory).special_tokens
    assert special == {"<s>": "[SEP]", "<pad>": "[PAD]", "</s>": "[CLS]", "<unk>": "[UNK]", "<mask>": "[MASK]"}


def test_broken_hugging_face_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not a usable tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="is not a directory"):
        load_tokenizer(tmp_path / "absent")


def test_dropout_of_merges_is_switched_off(sample, tmp_path, caplog):
    """A text has one encoding, in the saved and the exported tokenizer too, and the ids remain."""
    directory = hugging_face_directory(tmp_path / "tokenizer", "bytes", sample)
    expected = load_tokenizer(directory)
    assert not caplog.records
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["dropout"] = 0.5
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(directory)
    assert "the dropout of its merges (0.5) is switched off" in caplog.text
    for _ in range(5):
        assert tokenizer.encode_lines(HOSTILE) == expected.encode_lines(HOSTILE)
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode_lines(HOSTILE) == expected.encode_lines(HOSTILE)
    assert exported_tokenizer(tokenizer).model.dropout is None
    assert tokenizer.hugging_face_ids == expected.hugging_face_ids


def test_added_tokens_remain_whole(sample, tmp_path):
    """Special or not: a marker of an entity is one piece, here and in the exported tokenizer; a spelled [MASK] is text."""
    directory = hugging_face_directory(tmp_path / "tokenizer", "wordpiece", sample)
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.add_special_tokens(["[E1]"])
    library.add_tokens(["covid nineteen"])
    library.save(str(directory / "tokenizer.json"))
    tokenizer = load_tokenizer(directory)
    text = "a [E1] covid nineteen [MASK]"
    exported = exported_tokenizer(tokenizer)
    pieces = tokenizer.encode(text)
    assert pieces[:3] == ["a", "[E1]", spell_piece("covid nineteen")]
    assert "<mask>" not in pieces
    assert [exported.encode(text).tokens[index] for index in (1, 2, 3, -2)] == ["a", "[E1]", "covid nineteen", "[MASK]"]
    exported.encode_special_tokens = True
    assert [tokenizer.hugging_face_ids[piece] for piece in pieces] == exported.encode(text).ids[1:-1]
    assert [text[start:end] for _, start, end in tokenizer.encode_with_offsets(text)][1:3] == ["[E1]", "covid nineteen"]


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "sentencepiece-cased", "fastbpe-uncased"])
def test_text_that_is_not_unicode_is_one_line(kind, tmp_path):
    """A lone surrogate, as Python reads a byte of the command line that is not UTF-8; the library raises a TypeError."""
    tokenizer = small_tokenizer_of_kind(tmp_path, kind)
    for call in (tokenizer.encode, tokenizer.encode_with_offsets, lambda text: tokenizer.encode_lines(["a", text])):
        with pytest.raises(UserError, match="the text is not Unicode"):
            call("the \udcff fox")
        assert call("the fox")
