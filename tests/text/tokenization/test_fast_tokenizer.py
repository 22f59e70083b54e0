"""A tokenizer.json of every kind of model, against the library that wrote it."""

import itertools
import json

import pytest
import tokenizers
from tokenizer_text import HOSTILE, hugging_face_directory, random_texts, small_tokenizer_of_kind, word_level_directory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.exported import export_obstacle, exported_tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer, word_starts
from amos_fairseq.text.tokenization.tokenizer import SPECIAL_SYMBOLS, embedding_symbols, spell_piece
from amos_fairseq.text.vocabulary import learn_tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram", "spaces"])
def test_hugging_face_ids_are_those_of_the_library(kind, tmp_path):
    """Ids map in both directions; a line gets exactly the library's own encoding, unless that contains a special id."""
    tokenizer = small_tokenizer_of_kind(tmp_path, kind)
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
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
        assert kind != "bytes" or tokenizer.decode(tokenizer.encode(line)) == line
        if not special & set(expected) and tokenizer.special_tokens["<unk>"] not in line:
            compared += 1
            assert [ids[piece] for piece in tokenizer.encode(line)] == expected
    # Only a model that finds its special tokens as pieces of text (unigram) has lines that cannot be compared.
    assert compared >= len(HOSTILE) - 3


def test_configuration_names_the_special_tokens(sample, tmp_path):
    """Names in the configuration take precedence over the usual spellings."""
    directory = hugging_face_directory(tmp_path / "named", "wordpiece", sample)
    names = {"cls_token": "[SEP]", "sep_token": {"content": "[CLS]"}, "mask_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    special = load_tokenizer(directory).special_tokens
    assert special == {"<s>": "[SEP]", "<pad>": "[PAD]", "</s>": "[CLS]", "<unk>": "[UNK]", "<mask>": "[MASK]"}


def test_special_tokens_of_mpnet_without_names(sample, tmp_path):
    """Its vocabulary also has BERT's bracketed tokens, as ordinary pieces."""
    directory = hugging_face_directory(tmp_path / "mpnet", "wordpiece", sample)
    content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, own = content["model"]["vocab"], ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary |= {token: len(vocabulary) + number for number, token in enumerate(own)}
    like = next(token for token in content["added_tokens"] if token["content"] == "[MASK]")
    content["added_tokens"] = [like | {"id": vocabulary[token], "content": token} for token in own]
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    special = load_tokenizer(directory).special_tokens
    assert special == {symbol: symbol for symbol in own if symbol != "<unk>"} | {"<unk>": "[UNK]"}


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
    assert exported_tokenizer(tokenizer).model.dropout is None
    assert tokenizer.hugging_face_ids == expected.hugging_face_ids


def test_added_tokens_remain_whole(sample, tmp_path):
    """A marker of an entity is one piece, here and in the exported tokenizer, and protected if tokenizer.json calls it special;
    a spelled [MASK] is text."""
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
    special = {token.content for token in exported.get_added_tokens_decoder().values() if token.special}
    assert special == {"[E1]", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    assert export_obstacle(tokenizer) is None
    assert [text[start:end] for _, start, end in tokenizer.encode_with_offsets(text)][1:3] == ["[E1]", "covid nineteen"]
    tokenizer.save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert tokenizer.protected == saved.protected == ["[E1]"]
    assert saved.encode(text) == pieces


@pytest.mark.parametrize("cased", [True, False])
def test_protected_tokens_of_a_learned_vocabulary(cased, sample, tmp_path):
    """The other pieces are learned from the text without them, and the text between them is encoded by itself."""
    lines = sample.read_text(encoding="utf-8").splitlines()
    (tmp_path / "marked").write_text("\n".join(f"[E1]{line}[/E1]" for line in lines), encoding="utf-8")
    plain = learn_tokenizer(sample, 300, cased)
    marked = learn_tokenizer(tmp_path / "marked", 300, cased, ["[E1]", "[/E1]"])
    assert marked.dictionary_symbols == [*plain.dictionary_symbols, "[E1]", "[/E1]"]
    for text in HOSTILE:
        pieces = plain.encode(text)
        assert marked.encode_lines([text, f"[E1] {text} [/E1]"]) == [pieces, ["[E1]", *pieces, "[/E1]"]]
    glued = "ba[E1]ke[/E1] limo"
    assert [piece for piece, _, _ in marked.encode_with_offsets(glued)] == marked.encode(glued)
    assert marked.decode(marked.encode(glued)) == glued
    assert export_obstacle(marked) is None
    assert export_obstacle(FastTokenizer(marked.model, marked.special_tokens, marked.kind)) is None  # markers as text


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("wordpiece", "the \udcff fox", "give text in Unicode"),
        ("cased", "the \udcff fox", "give text in Unicode"),
        ("words", "the fix", r"cannot encode the text .*: give one with a token for what"),
    ],
)
def test_a_text_that_the_library_refuses_is_one_line(kind, text, message, tmp_path):
    """A lone surrogate, as Python reads a byte of the command line that is not UTF-8, is a TypeError of the library; a model of
    words whose unknown token is not in its vocabulary raises a bare Exception."""
    if kind == "words":
        tokenizer = load_tokenizer(word_level_directory(tmp_path / "words", ["the", "fox"], absent=["[UNK]"]))
    else:
        tokenizer = small_tokenizer_of_kind(tmp_path, kind)
    for call in (tokenizer.encode, tokenizer.encode_with_offsets, lambda text: tokenizer.encode_lines(["the", text])):
        with pytest.raises(UserError, match=message):
            call(text)
        assert call("the fox")


# Parts of a tokenizer.json of words at which the library's Rust code panics, when it reads it or at each text.
PANICS = {
    "Cannot parse precompiled_charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "chunk size must be non-zero": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
}


@pytest.mark.parametrize("reason", PANICS)
def test_a_panic_of_the_library_is_a_refusal(reason, tmp_path):
    """It is no Exception."""
    file = word_level_directory(tmp_path / "words", ["one"]) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | PANICS[reason]), encoding="utf-8")
    with pytest.raises(UserError, match=f"is not a usable tokenizer.json: .*{reason}"):
        load_tokenizer(file.parent)


def starts_by_piece(tokenizer) -> dict[str, bool]:
    return dict(zip(embedding_symbols(tokenizer.dictionary_symbols), word_starts(tokenizer).tolist(), strict=True))


@pytest.mark.parametrize("kind", ["cased", "wordpiece", "bytes", "unigram"])
def test_pieces_behind_a_space_begin_a_word(kind, tmp_path):
    """On words of letters; a lone mark begins the word of the piece behind it."""
    tokenizer = small_tokenizer_of_kind(tmp_path, kind)
    starts, compared = starts_by_piece(tokenizer), set()
    for text in random_texts([*"bakelimonure  "], 100):
        text = f"a {' '.join(text.split())}"
        pieces = tokenizer.encode_with_offsets(text)
        for (_, *before), (piece, start, end) in itertools.pairwise(pieces):
            is_first = start == end or (text[start - 1] == " " and before[0] < before[1])
            assert starts[piece] == is_first, (piece, text)
            compared.add((piece, is_first))
    assert min(sum(is_first for _, is_first in compared), sum(not is_first for _, is_first in compared)) > 5


def test_pieces_of_scripts_without_spaces_begin_a_word():
    """Han, kana and Thai; also the first byte of one of their characters, but no byte within."""
    marks = dict.fromkeys(["▁", "▁a", "b", "中", "中国", "▁中", "の", "ไ", "é", "ж", "<0xE4>", "<0xB8>", "<0x41>"])
    found = starts_by_piece(library_of(list(marks), pre_tokenizers.Metaspace(), decoders.Metaspace()))
    assert {piece for piece in marks if not found[piece]} == {"b", "é", "ж", "<0xB8>", "<0x41>"}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    spelled = {piece: split(piece)[0][0] for piece in "a中é"}
    pieces = [*spelled.values(), spelled["中"][:1], spelled["中"][1:], "Ġ", "Ġa"]
    found = starts_by_piece(library_of(pieces, pre_tokenizers.ByteLevel(), decoders.ByteLevel()))
    assert [found[piece] for piece in pieces] == [False, True, False, True, False, True, True]


def library_of(pieces: list[str], pre_tokenizer=None, decoder=None) -> FastTokenizer:
    library = Tokenizer(models.BPE({piece: index for index, piece in enumerate(["<s>", *pieces])}, []))
    if pre_tokenizer is not None:
        library.pre_tokenizer, library.decoder = pre_tokenizer, decoder
    library.add_special_tokens(["<s>", "[E1]"])
    return FastTokenizer(library.to_str().encode("utf-8"), {"<s>": "<s>"})


def test_without_marks_each_piece_is_a_word_or_words_are_unknown(tmp_path):
    words = load_tokenizer(word_level_directory(tmp_path / "words", ["one", "▁two"]))
    assert word_starts(words).all()
    assert word_starts(library_of(["a", "b"])).all()
    with pytest.raises(UserError, match="the tokenizer marks neither a new nor a continued word"):
        word_starts(library_of(["a", "b", "ab"]))
