"""The pieces of words, for tokenizers of every kind."""

import random

import pytest
from tokenizer_text import ALPHABETS, random_texts, token_of_word

from amos_fairseq.text.tokenization.exported import exported_tokenizer
from amos_fairseq.text.tokenization.tokenizer import UNK, embedding_symbols, join_words

SENTENCES = [
    ["bake", "limo", "nu"],
    ["Rockwell", "'s", "U.S.", "$", "1,000.5", "--", "can't", "ﬁne", "İstanbul", "snow☃man"],
    ["<mask>", "</s>", "x<s>y", "[MASK]", "中国", "人"],
    ["a\u00a0b", "New York", "re\u0301sí"],
]
# Words of which no piece remains for some tokenizers: removed, or counted as a space.
VANISHING = ["\u200b", "\x07", "\ufeff", "\u0301"]


def sentences():
    """Words with spaces between all of them, and with spaces between some."""
    draw = random.Random(3)
    drawn = [
        words
        for alphabet in ("ASCII", "the first planes", "two letters", "the vocabulary's letters")
        for text in random_texts(ALPHABETS[alphabet], 40, seed=9)
        if (words := text.split())
    ]
    for words in [*SENTENCES, *drawn]:
        yield words, None
        yield words, [draw.random() < 0.5 for _ in words[1:]] + [False]


def test_pieces_are_those_of_the_text(tokenizer):
    """The text's pieces, each once, in order; <unk> is inserted only for words without a piece of their own."""
    assert join_words(["do", "n't", "go"], [False, True, False]) == "don't go"
    rows = {symbol: row for row, symbol in enumerate(embedding_symbols(tokenizer.dictionary_symbols))}
    vanishing = ["a", *VANISHING, "b"]
    for words, spaces in [
        *sentences(),
        (vanishing, None),
        (vanishing, [False] * len(vanishing)),
        (VANISHING[:1], None),
    ]:
        ids, ranges = tokenizer.encode_words(words, spaces)
        expected = [rows.get(piece, rows[UNK]) for piece in tokenizer.encode(join_words(words, spaces))]
        alone = {a for a, b in ranges if b == a + 1 and ids[a] == rows[UNK]}
        assert len(ids) - len(expected) <= len(alone)
        if len(ids) == len(expected):
            assert ids == expected
        assert len(ranges) == len(words)
        assert all(0 <= start < end <= len(ids) for start, end in ranges)
        assert [start for start, _ in ranges] == sorted(start for start, _ in ranges)


def test_ranges_cover_the_words(tokenizer):
    """A range has every piece that covers a character of the word, and no other piece with a character; the piece that it
    shares with an earlier word only if it has no other one."""
    num_shared = num_left_out = 0
    for words, spaces in sentences():
        ids, ranges = tokenizer.encode_words(words, spaces)
        aligned = tokenizer.encode_with_offsets(join_words(words, spaces))
        if len(ids) != len(aligned):
            continue  # a word without a piece
        begin = 0
        for number, (word, (start, end)) in enumerate(zip(words, ranges, strict=True)):
            characters = set(range(begin, begin + len(word)))
            covering = [i for i, (_, a, b) in enumerate(aligned) if characters & set(range(a, b))]
            if covering and aligned[covering[0]][1] < begin:
                num_shared += 1
                num_left_out += len(covering) > 1
                covering = covering[1:] or covering
            if covering:
                assert (start, end) == (covering[0], covering[-1] + 1), (words, word)
            begin += len(word) + (spaces is None or spaces[number])
    assert num_shared > num_left_out > 0


def test_a_word_without_a_piece_gets_unk(tokenizer):
    """A word that the tokenizer removes becomes <unk>, its neighbours keep their pieces."""
    plain, _ = tokenizer.encode_words(["bake", "limo"])
    for removed in VANISHING:
        if tokenizer.encode(f"bake {removed} limo") == tokenizer.encode("bake limo"):
            ids, ranges = tokenizer.encode_words(["bake", removed, "limo"])
            start, end = ranges[1]
            assert ids[start:end] == [tokenizer.embedding_rows[UNK]]
            assert ids[:start] + ids[end:] == plain
            assert ranges[0][1] <= start < end <= ranges[2][0]


@pytest.mark.parametrize("tokenizer", ["cased", "wordpiece", "bytes", "prefixed bytes", "unigram"], indirect=True)
def test_the_documented_token_of_a_word_in_raw_text_is_its_first_piece(tokenizer):
    exported, num_words = exported_tokenizer(tokenizer), 0
    exported.encode_special_tokens = True
    for words, spaces in sentences():
        (ids, ranges), text = tokenizer.encode_words(words, spaces), join_words(words, spaces)
        encoding = exported.encode(text, add_special_tokens=False)
        spans = zip(encoding.tokens, encoding.offsets, strict=True)
        tokens = [{"word": token, "start": a, "end": b, "entity": i} for i, (token, (a, b)) in enumerate(spans)]
        end = 0
        for word, (first, _) in zip(words, ranges, strict=True):
            begin = text.index(word, end)
            end = begin + len(word)
            if len(ids) == len(tokens):
                assert token_of_word(tokens, text, begin, end)["entity"] == first, (words, word)
                num_words += 1
    assert num_words > 100


def test_equals_the_exported_tokenizer(tokenizer):
    exported = exported_tokenizer(tokenizer)
    symbols = {row: symbol for symbol, row in tokenizer.embedding_rows.items()}
    for words in SENTENCES[:2]:
        ids, _ = tokenizer.encode_words(words)
        encoding = exported.encode(" ".join(words), add_special_tokens=False)
        assert [tokenizer.hugging_face_ids[symbols[row]] for row in ids] == encoding.ids
