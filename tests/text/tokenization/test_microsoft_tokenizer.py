"""The tokenizer of the released AMOS checkpoint: its rules on hand-made cases, and the properties of every tokenizer."""

import pytest
import sentencepiece
from fairseq.data import Dictionary
from tokenizer_text import HOSTILE, SPLIT_LINES, assert_survives_fairseq, train_bpe

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.microsoft_tokenizer import MicrosoftAmosTokenizer
from amos_fairseq.text.tokenization.standalone import normalize, text_of, without_lone_marks

# Worked out by hand from the rules.
NORMALIZED = {
    "": "",
    "  two   words ": "two words",
    "(a test), he said.": "( a test ), he said .",
    "\"quoted\" \u201ctypographic\u201d ``latex''": '" quoted " " typographic " " latex "',
    "\u2018a\u2019 \u00b4b\u00b4": "' a ' ' b '",
    "one\u2014two \u2013 three": "one-two - three",
    "don't": "don't",  # an apostrophe inside a word is unchanged
    "do n't dogs' s": "do n't dogs 's",
    "'s 'll 're 've": "'s 'll 're 've",  # split off, and joined again
    "'LL 'lls": "'LL ' lls",
    "he 'll, they 'RE-x": "he 'll , they 'RE -x",
    "'twas 'd's": "' twas 'd's",
    "e.g. U.S. 3.5%": "e.g . U.S . 3.5 %",
    "... ?! --": "... ?! --",  # a word of punctuation only stays whole
    "(... (x": "(... ( x",
    "\u00bfqu\u00e9? \u3010\u672c\u3011": "\u00bf qu\u00e9 ? \u3010 \u672c \u3011",
    "\u2019\u2019x": "'' x",  # two typographic quotes are not the two ASCII ones that mean a double quote
}

PLAIN = {"``": '"', "''": '"', "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u00b4": "'"}
PLAIN |= {"\u2013": "-", "\u2014": "-"}


@pytest.fixture(scope="module")
def model() -> bytes:
    return train_bpe(SPLIT_LINES, 90, normalization_rule_name="nmt_nfkc")


@pytest.fixture(scope="module")
def release(model, tmp_path_factory):
    """sp.model and dict.txt, whose order is not the model's and which lacks a piece."""
    directory = tmp_path_factory.mktemp("release")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = [processor.id_to_piece(i) for i in range(1, len(processor))]
    (directory / "sp.model").write_bytes(model)
    listed = [piece for piece in reversed(pieces) if piece != "\u2581?"]
    (directory / "dict.txt").write_text("".join(f"{piece} 7\n" for piece in listed), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def tokenizer(release):
    return MicrosoftAmosTokenizer.from_release(release)


@pytest.mark.parametrize(("line", "normalized"), NORMALIZED.items())
def test_normalized_text(line, normalized):
    assert text_of(normalize(line)) == normalized


def test_every_normalized_character_has_its_original_position():
    for line in [*NORMALIZED, *HOSTILE]:
        characters = normalize(line)
        assert [c.start for c in characters] == sorted(c.start for c in characters)
        for value, start, end in characters:
            original = line[start:end]
            if value == " " or value == original:
                continue
            assert PLAIN[original] == value
        assert "".join(line[c.start : c.end] for c in characters if c.value != " ") == "".join(line.split())


def test_lone_marks_are_dropped_before_punctuation_and_at_the_end(tokenizer, model):
    """Against SentencePiece alone, which gives the marks; "7", "&" and "▁" are in no piece of the model."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert processor.encode("the & 7", out_type=str) == ["\u2581the", "\u2581", "&", "\u2581", "7"]
    assert tokenizer.encode("the& 7") == ["\u2581the", "&", "\u2581", "7"]
    # Only models that keep trailing spaces produce a mark at the end; this one does not.
    assert without_lone_marks(["\u2581", "a", "\u2581", "\u2581", "\u2014", "\u2581"]) == [0, 1, 2, 4]
    assert without_lone_marks([]) == []


def test_ids_are_those_of_the_dictionary_of_the_release(tokenizer, release):
    dictionary = Dictionary.load(str(release / "dict.txt"))
    assert tokenizer.dictionary_symbols == dictionary.symbols[4:]
    pieces = tokenizer.encode("the dog is it?")
    ids = [dictionary.index(piece) for piece in pieces]
    assert [dictionary[i] for i in ids if i != dictionary.unk()] == pieces[:-1]
    assert ids[-1] == dictionary.unk()  # the piece that dict.txt lacks
    assert tokenizer.ids_of(pieces) == ids


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.kind, again.cased, again.sha256) == ("microsoft_amos", True, tokenizer.sha256)
    assert [again.encode(line) for line in HOSTILE] == [tokenizer.encode(line) for line in HOSTILE]
    assert again.encode_lines(HOSTILE) == [again.encode(line) for line in HOSTILE]
    assert_survives_fairseq(again, tmp_path)


def test_offsets_point_into_the_original_line(tokenizer):
    line = "\u201cThe  fox\u201d \u2014 it\u2019s ``lazy''!"
    aligned = tokenizer.encode_with_offsets(line)
    assert [piece for piece, _, _ in aligned] == tokenizer.encode(line)
    assert "".join(line[start:end] for _, start, end in aligned) == "".join(line.split())
    assert "``" in [line[start:end] for _, start, end in aligned]  # two characters, one piece
    for text in HOSTILE:
        spans = tokenizer.encode_with_offsets(text)
        assert [piece for piece, _, _ in spans] == tokenizer.encode(text)
        assert [s for _, s, _ in spans] == sorted(s for _, s, _ in spans)
        assert all(0 <= s <= e <= len(text) and text[s:e].strip() == text[s:e] for _, s, e in spans)


def test_files_that_fairseq_would_read_differently_are_refused(model, tmp_path):
    for content in ("a 1\nb 1\na 1\n", "<pad> 1\n", "a\n"):
        (tmp_path / "sp.model").write_bytes(model)
        (tmp_path / "dict.txt").write_text(content)
        with pytest.raises(UserError, match="each line needs a piece of its own"):
            MicrosoftAmosTokenizer.from_release(tmp_path)
    (tmp_path / "dict.txt").write_text("a 1\n")
    for content in (b"no model", b""):
        (tmp_path / "sp.model").write_bytes(content)
        with pytest.raises(UserError, match="is not a SentencePiece model"):
            MicrosoftAmosTokenizer.from_release(tmp_path)
