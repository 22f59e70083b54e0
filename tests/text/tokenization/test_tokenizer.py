"""The base class of tokenizers: spellings and files; offsets, words and lost text of each kind; how texts are shortened."""

import itertools
import random

import pytest
import tokenizer_text
from tokenizer_text import ALPHABETS, HOSTILE, random_texts
from tokenizers import Tokenizer, models, pre_tokenizers

from amos_fairseq.errors import UserError
from amos_fairseq.files import directory_sha256
from amos_fairseq.inputs.raw_words import join_words
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.tokenization.standalone import kept_lengths
from amos_fairseq.text.tokenization.tokenizer import SPECIAL_SYMBOLS, UNK, embedding_symbols, spell_piece
from amos_fairseq.text.tokenization.word_pieces import tidy_spans, unspell_piece
from amos_fairseq.text.vocabulary import cut_long_line, learn_tokenizer

NASTY_CHARACTERS = " \t\x0b\x1c\x85\xa0\u2028\u3000\\{}x<>/s@#▁Ġ#é中☃\u0301ab0"
# A line, and where its words begin and end, counted by hand. Brackets occur in no word of the sample: unknown pieces.
WORDS = {
    "ba ke": [(0, 2), (3, 5)],
    "  tabs\t\tand   runs ": [(2, 6), (8, 11), (14, 18)],
    "cafe\u0301s cafe\u0301": [(0, 6), (7, 12)],
    "nai\u0308ve İstanbul ŒUVRE": [(0, 6), (7, 15), (16, 21)],
    "ﬁne oﬃce ½ ⅓": [(0, 3), (4, 8), (9, 10), (11, 12)],
    "\uff21\uff22\u3000\uff43\xa0d": [(0, 2), (3, 4), (5, 6)],
    "中国 and 日本": [(0, 2), (3, 6), (7, 9)],
    "🎉🎉 snow☃man": [(0, 2), (3, 11)],
    "\u200ba \ufeffb": [(1, 2), (4, 5)],
    "<mask> [MASK] x</s>y": [(0, 6), (7, 13), (14, 20)],
}
_ZERO_WIDTH = "\u200b\ufeff"
SENTENCES = [["bake", "limo", "nu"], ["a\u00a0b", "New York", "re\u0301sí"]]
SENTENCES += [["<mask>", "</s>", "x<s>y", "[MASK]", "中国", "人"]]
SENTENCES += [["Rockwell", "'s", "U.S.", "$", "1,000.5", "--", "can't", "ﬁne", "İstanbul", "snow☃man"]]
# Words of which no piece remains for some tokenizers: removed, or counted as a space.
VANISHING = ["\u200b", "\x07", "\ufeff", "\u0301"]


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


def test_saved_tokenizer_is_the_same_one_and_its_pieces_survive_fairseq(tokenizer, tmp_path):
    assert len(tokenizer) == 300 or tokenizer.kind == "huggingface"
    tokenizer_text.assert_survives_fairseq(tokenizer, tmp_path)  # which saves it there
    loaded = load_tokenizer(tmp_path)
    assert loaded.cased == tokenizer.cased
    assert loaded.sha256 == tokenizer.sha256 == directory_sha256(tmp_path)
    assert loaded.hugging_face_ids == tokenizer.hugging_face_ids
    assert [loaded.encode(line) for line in HOSTILE] == tokenizer.encode_lines(HOSTILE)


def test_ties_are_broken_deterministically(tmp_path):
    """Words that occur once make every merge a tie, which a hash table would break differently each time."""
    generator = random.Random(1)
    words = ["".join(generator.choices("abcdefghij", k=8)) for _ in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(words) + "\n")
    learned = {learn_tokenizer(tmp_path / "text.txt", 400, True).sha256 for _ in range(4)}
    assert len(learned) == 1


def test_long_lines_are_cut_between_words_and_characters():
    line = " ".join(f"word{i}é" for i in range(3000))
    parts = list(cut_long_line(line, 100))
    assert max(len(part.encode()) for part in parts) <= 100
    assert " ".join(parts) == line
    solid = "é中☃" * 100
    assert "".join(cut_long_line(solid, 50)) == solid


def test_damaged_directory_is_refused(sample, tmp_path):
    learned = learn_tokenizer(sample, 300, True)
    learned.save(tmp_path / "whole")
    lines = (tmp_path / "whole" / "dict.txt").read_bytes().split(b"\n")
    lines[4], lines[5] = lines[5], lines[4]
    for number, (name, content, message) in enumerate(
        [
            ("tokenizer.settings.json", None, "holds no tokenizer"),
            ("tokenizer.settings.json", b"{", "is not JSON"),
            ("tokenizer.settings.json", b'{"kind": "words"}', "is not readable as a tokenizer .*words"),
            ("tokenizer.json", None, r"tokenizer\.json is missing"),
            ("tokenizer.json", b"\xff\xfe", r"json is not a usable tokenizer\.json: "),
            ("dict.txt", None, "dict.txt is missing"),
            ("dict.txt", b"a b c\n", "each line needs a piece of its own"),
            ("dict.txt", b"\n".join(lines), "dict.txt is of another tokenizer"),
        ]
    ):
        directory = tmp_path / str(number)
        learned.save(directory)
        (directory / name).unlink()
        if content is not None:
            (directory / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            load_tokenizer(directory)


def test_pieces_are_those_of_encode_with_ordered_spans_without_spaces(tokenizer):
    for line in [*HOSTILE, *WORDS]:
        aligned = tokenizer.encode_with_offsets(line)
        assert [piece for piece, _, _ in aligned] == tokenizer.encode(line)
        spans = [(start, end) for _, start, end in aligned]
        assert [start for start, _ in spans] == sorted(start for start, _ in spans)
        assert all(0 <= start <= end <= len(line) for start, end in spans)
        assert all(line[start:end].strip() == line[start:end] for start, end in spans)


def test_every_character_outside_spans_can_be_removed(tokenizer):
    """Removing a character that no span covers leaves the pieces unchanged."""
    for line in [*HOSTILE, *WORDS]:
        covered = {place for _, start, end in tokenizer.encode_with_offsets(line) for place in range(start, end)}
        visible = {place for place, c in enumerate(line) if not c.isspace() and c not in _ZERO_WIDTH}
        for place in visible - covered:
            assert tokenizer.encode(line[:place] + line[place + 1 :]) == tokenizer.encode(line), (line, place)


@pytest.mark.parametrize(("line", "words"), WORDS.items())
def test_words_begin_and_end_where_pieces_do(tokenizer, line, words):
    if tokenizer.kind == "huggingface" and tokenizer.encode("a\xa0b") == tokenizer.encode("a#b"):
        line = line.replace("\u3000", " ").replace("\xa0", " ")  # this model makes one unknown piece of both
    aligned = [(start, end) for _, start, end in tokenizer.encode_with_offsets(line) if start < end]
    for word in words:
        inside = [(start, end) for start, end in aligned if word[0] <= start < word[1]]
        assert (inside[0][0], max(end for _, end in inside)) == word, (line[slice(*word)], aligned)


def test_spans_of_the_libraries_are_converted_to_one_convention():
    """By hand: spaces removed, an expanded character belongs to its first piece too, removed marks stay with their letter."""
    line = " \u00bd e\u0301 \u200b"
    given = [("\u25811", 0, 1), ("\u2044", 1, 1), ("2", 1, 2), ("\u2581", 2, 3), ("e", 3, 4), ("\u2581", 5, 7)]
    expected = [("\u25811", 1, 2), ("\u2044", 1, 2), ("2", 1, 2), ("\u2581", 3, 3), ("e", 3, 5), ("\u2581", 7, 7)]
    assert tidy_spans(line, given) == expected


def sentences():
    """Words with spaces between all of them, and with spaces between some."""
    draw = random.Random(3)
    alphabets = ("ASCII", "the first planes", "two letters", "the vocabulary's letters")
    texts = (text for alphabet in alphabets for text in random_texts(ALPHABETS[alphabet], 40, seed=9))
    for words in [*SENTENCES, *(text.split() for text in texts if text.strip())]:
        yield words, None
        yield words, [draw.random() < 0.5 for _ in words[1:]] + [False]


def test_pieces_are_those_of_the_text(tokenizer):
    """The text's pieces, each once, in order; <unk> is inserted only for words without a piece of their own."""
    assert join_words(["do", "n't", "go"], [False, True, False]) == "don't go"
    rows = {symbol: row for row, symbol in enumerate(embedding_symbols(tokenizer.dictionary_symbols))}
    vanishing = ["a", *VANISHING, "b"]
    texts = [*sentences(), (vanishing, None), (vanishing, [False] * len(vanishing)), (VANISHING[:1], None)]
    for words, spaces in texts:
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


def test_lengths_are_those_of_longest_first():
    """Of the library, with a token a word and no special tokens."""
    library = Tokenizer(models.WordLevel({"x": 0, "y": 1}, unk_token="x"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for first, second, limit in itertools.product(range(1, 9), range(1, 9), range(1, 17)):
        library.enable_truncation(limit, strategy="longest_first")
        ids = library.encode(" ".join("x" * first), " ".join("y" * second)).ids
        assert kept_lengths([first, second], limit) == [ids.count(0), ids.count(1)], (first, second, limit)
    for length in range(1, 9):
        library.enable_truncation(5, strategy="longest_first")
        assert kept_lengths([length], 5) == [len(library.encode(" ".join("x" * length)).ids)]
