"""Column files and CoNLL-U, against files written by hand."""

import gzip
import lzma

import pytest

from amos_fairseq.downstream.tagging.word_files import (
    Sentence,
    read_columns,
    read_conllu,
    read_unlabeled,
)
from amos_fairseq.errors import UserError

CONLL2003 = """-DOCSTART- -X- -X- O

U.N. NNP I-NP I-ORG
#1\u00a0000 CD I-NP O

-DOCSTART- -X- O O
Peter NNP I-NP I-PER"""
CONLLU = """# newdoc id = a
# text = I don't
1\tI\tI\tPRON\tPRP\tCase=Nom\t2\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t0\troot\t_\t_
2.1\tsay\tsay\tVERB\tVB\t_\t_\t_\t2:x\t_
3\tn't\tnot\tPART\tRB\t_\t2\tadvmod\t_\t_

1\ta b\ta b\tX \t_\t_\t0\troot\t_\t_

"""


def write(path, text: str):
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "wb") as file:
        file.write(text.encode("utf-8"))
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_columns(suffix, tmp_path):
    path = write(tmp_path / f"train.txt{suffix}", CONLL2003)
    assert read_columns(path) == [
        Sentence(["U.N.", "#1\u00a0000"], {"pos": ["NNP", "CD"], "chunk": ["I-NP", "I-NP"], "ner": ["I-ORG", "O"]}),
        Sentence(["Peter"], {"pos": ["NNP"], "chunk": ["I-NP"], "ner": ["I-PER"]}),
    ]


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("New York\tB-LOC\r\nis\tO\r\n", None, {"label": ["B-LOC", "O"]}),
        ("New York \t B-LOC \nis\tO\n", None, {"label": ["B-LOC", "O"]}),
        ("Anna  NNP   O\n", None, {"pos": ["NNP"], "chunk": ["O"]}),
        ("Anna NC I-PER\n", ("pos", "ner"), {"pos": ["NC"], "ner": ["I-PER"]}),
        ("a b c d e\n", None, {"2": ["b"], "3": ["c"], "4": ["d"], "5": ["e"]}),
    ],
)
def test_names_of_columns(text, names, expected, tmp_path):
    (sentence,) = read_columns(write(tmp_path / "train.txt", text), names)
    assert sentence.columns == expected


def test_conllu(tmp_path):
    first, second = read_conllu(write(tmp_path / "dev.conllu.xz", CONLLU))
    assert first.words == first.columns["form"] == ["I", "do", "n't"]
    assert second.words == ["a b"]
    assert second.columns["upos"] == ["X"]
    assert list(first.columns) == ["form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc"]
    assert first.columns["upos"] == ["PRON", "AUX", "PART"]
    assert first.columns["head"] == ["2", "0", "2"]
    assert first.columns["deprel"] == ["nsubj", "root", "advmod"]


COLUMNS, LINES = "one word a line", "one sentence a line"


@pytest.mark.parametrize(
    ("name", "text", "how", "expected"),
    [
        ("a.txt", "The dog  sees\n\nSo 1\u00a0000\n", LINES, [["The", "dog", "sees"], ["So", "1\u00a0000"]]),
        ("a.txt", "one two\nthree four\n", LINES, [["one", "two"], ["three", "four"]]),  # no line is blank
        ("a.txt", "The DT B-NP\ndog NN I-NP\n\nA DT O\n", COLUMNS, [["The", "dog"], ["A"]]),
        ("a.txt", "The\tDT\ndog\tNN\n", COLUMNS, [["The", "dog"]]),  # one sentence, with tabs
        ("a.txt", "The\ndog\n\nA\n\n", COLUMNS, [["The", "dog"], ["A"]]),
        ("a.txt", "a b\tX\nc\tY\n\nd\tX\n", COLUMNS, [["a b", "c"], ["d"]]),  # a word with a space, before a tab
        ("a.txt", CONLL2003, COLUMNS, [["U.N.", "#1\u00a0000"], ["Peter"]]),
        ("a.conllu", CONLLU, "CoNLL-U", [["I", "do", "n't"], ["a b"]]),
    ],
)
def test_words_without_labels(name, text, how, expected, tmp_path):
    """What the lines have in common decides how they are read."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_unlabeled(tmp_path / name) == (expected, how)


COLUMN_LESS = ["word TAG"] * 9 + [""] + ["word TAG"] * 10 + ["word"] + ["word TAG"] * 9
REFUSED = [
    (read_columns, "a X\nb X Y\n", "line 2: 3 columns, expected 2"),
    (read_columns, "a\tX\nb\t\n", "line 2: column 2 is empty"),
    (read_columns, "a\nb\n", "has one column"),
    (read_columns, "a X\rb X\n", "line 1: a carriage return inside of the line"),
    (read_columns, "a X\ncafé X\n".encode("latin-1"), "line 2.*not UTF-8"),
    (read_columns, None, "no such file"),
    (read_conllu, CONLLU.replace("3\tn't", "4\tn't"), "line 7: word id 4, expected 3"),
    (read_conllu, CONLLU.replace("\tVBP\t", " VBP "), "line 5: not the ten columns"),
    (read_conllu, "1 I I PRON PRP _ 0 root _ _\n", "line 1: not the ten columns of CoNLL-U, separated by tabs"),
    (read_conllu, CONLLU.replace("\n1\ta b", "1\ta b"), "line 8: word id 1, expected 4"),
    (read_unlabeled, "The dog  sees\nA\tcat\n", "line 2: 2 columns, expected 3 .*; line 2 has a tab"),
    (
        read_unlabeled,
        "".join(f"{number}\tthe dog sees\n" for number in range(1001)),
        "line 1 has a tab, .* no blank line in 1,001 lines: separate",
    ),
    (read_unlabeled, "\n".join(COLUMN_LESS), "line 21: 1 columns, expected 2 as in most lines"),
    (read_unlabeled, "\n \n", "has no sentence"),
    (read_unlabeled, CONLLU, r"line 3: this is CoNLL-U: give the file a name that ends in \.conllu"),
]


def test_refusals(tmp_path):
    """One line that names the file and the line."""
    for number, (read, content, message) in enumerate(REFUSED):
        path = tmp_path / f"file{number}.txt"
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        with pytest.raises(UserError, match=rf"file{number}\.txt.*{message}"):
            read(path)
