"""Which pieces begin a word, against the spaces of the text that they cover."""

import itertools

import pytest
from tokenizer_text import random_texts, small_tokenizer_of_kind, word_level_directory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer
from amos_fairseq.text.tokenization.tokenizer import embedding_symbols
from amos_fairseq.text.tokenization.word_starts import word_starts


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
    spelled = {
        piece: pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(piece)[0][0] for piece in "a中é"
    }
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
