"""Column files, CoNLL-U and tables of lists, against files written by hand."""

import gzip
import json
import lzma
import re
from pathlib import Path

import pytest

from amos_fairseq.downstream.words.prepare import check_labels
from amos_fairseq.errors import UserError
from amos_fairseq.inputs.sentences import Sentence, WordFile
from amos_fairseq.inputs.word_files import (
    COLUMNS,
    CONLLU,
    CONLLU_PLUS,
    LINES,
    ROWS,
    read_conllu,
    read_sentences,
)

CONLL2003 = """-DOCSTART- -X- -X- O

U.N. NNP I-NP I-ORG
#1\u00a0000 CD I-NP O

-DOCSTART- -X- O O
Peter NNP I-NP I-PER"""
TREES = """# newdoc id = a
# text = I don't
1\tI\tI\tPRON\tPRP\tCase=Nom\t2\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVBP\t_\t0\troot\t_\t_
2.1\tsay\tsay\tVERB\tVB\t_\t_\t_\t2:x\t_
3\tn't\tnot\tPART\tRB\t_\t2\tadvmod\t_\t_

1\ta b\ta b\tX \t_\t_\t0\troot\t_\t_

"""
WORDS_OF_TREES = [["I", "do", "n't"], ["a b"]]
# GermEval 2014: a comment, an index, outer and inner names.
ROME_AND_ANNA = [["In", "Rom"], ["Anna"]]
GERMEVAL = "#\thttp://example.org [2010-01-01]\n1\tIn\tO\tO\n2\tRom\tB-LOC\tO\n\n#\tx [2010]\n1\tAnna\tB-PER\tB-LOC\n"
MANY_WORDS = "".join(f"{'NN' if n % 3 else 'DT'} word{n}\n" + "\n" * (n % 7 == 0) for n in range(60))


def write(path: Path, text: str) -> Path:
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "wb") as file:
        file.write(text.encode("utf-8"))
    return path


def lines_of(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_columns(suffix, tmp_path):
    path = write(tmp_path / f"train.txt{suffix}", CONLL2003)
    assert read_sentences(path).sentences == [
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
        ("a O \nb B-X  \n", None, {"label": ["O", "B-X"]}),
        ("a\tO\t\nb\tB-X\t\n", None, {"label": ["O", "B-X"]}),  # each line ends with a tab
        ("a DT B-NP\nb NN I-NP\nc NN O\n", None, {"pos": ["DT", "NN", "NN"], "chunk": ["B-NP", "I-NP", "O"]}),
        # Spans of CoNLL-2002 are entities.
        ("a DT O\nb NN B-LOC\nc NN O\n", None, {"pos": ["DT", "NN", "NN"], "ner": ["O", "B-LOC", "O"]}),
        # Two columns of spans are not pos and chunk.
        ("a O O\nb B-X O\n", None, {"2": ["O", "B-X"], "3": ["O", "O"]}),
        # Nor are lemmas, or the places of characters, parts of speech.
        ("Dogs dog B-X\nsee see O\nthis this O\n", None, {"2": ["dog", "see", "this"], "3": ["B-X", "O", "O"]}),
        ("a 0 1 O\nb 2 3 O\n", None, {"2": ["0", "2"], "3": ["1", "3"], "4": ["O", "O"]}),
        ("NN dog\nVB sees\n", ("pos", "word"), {"pos": ["NN", "VB"]}),
        ("a O\n", ("word", "ner"), {"ner": ["O"]}),
    ],
)
def test_names_of_columns(text, names, expected, tmp_path):
    (sentence,) = read_sentences(write(tmp_path / "train.txt", text), names).sentences
    assert sentence.columns == expected


# A file of words with labels; the words and the last column; the note about what was left out.
LEFT_OUT = [
    (
        GERMEVAL,
        ROME_AND_ANNA,
        [["O", "O"], ["B-LOC"]],
        r"comments are left out .2, .* line 1\)\; column 1 is the index",
    ),
    (GERMEVAL.replace("#\t", "# "), ROME_AND_ANNA, [["O", "O"], ["B-LOC"]], "comments are left out .2,"),
    ("0 a X O\n1 b Y O\n\n0 c X B-Z\n", [["a", "b"], ["c"]], [["O", "O"], ["B-Z"]], "column 1 is the index"),
    ("# text a b\na O\nb B-X\n\n# O\nb O\n", [["a", "b"], ["#", "b"]], [["O", "B-X"], ["O", "O"]], "left out .1,"),
    ("a DT\n# #\nb CD\n\nc X\n", [["a", "#", "b"], ["c"]], [["DT", "#", "CD"], ["X"]], ""),  # of the Penn Treebank
    ("a O\nb B-X\n", [["a", "b"]], [["O", "B-X"]], "^no line is blank: all words are one sentence$"),
    (
        "a O\n# sent_id = 7\nb B-X\n",
        [["a", "b"]],
        [["O", "B-X"]],
        r"^no line .*; comments .*\(1, the first in line 2\)$",
    ),
    ("a O\n\u00a0 O\n\u3000\tO\nb B-X\n", [["a", "b"]], [["O", "B-X"]], "; 2 blank words are left out"),
    ("#tag O\n\n#other B-X\n", [["#tag"], ["#other"]], [["O"], ["B-X"]], ""),  # words of a tweet
    ("token label\na O\nb B-X\n", [["a", "b"]], [["O", "B-X"]], "line 1 .* names the columns: token, label"),
    ("Word NER\na O\n\nWord NER\nb B-X\n", [["a"], ["b"]], [["O"], ["B-X"]], "line 1 .* as 1 more: word, ner"),
    ('a\tO\n""""\tO\n', [["a", '""""']], [["O", "O"]], "quotes of CSV, the first in line 2: .* quoting=3"),
    ("POS\tWord\nNN\tdog\nVB\tsees\n", [["dog", "sees"]], [["NN", "VB"]], "names the columns: pos, word"),
    ("id word tag\n\n1 a O\n2 b B-X\n", [["a", "b"]], [["O", "B-X"]], "names the columns: id, word, tag"),
    ("Sent\tVBN\nmail\tNN\n\na\tNN\n", [["Sent", "mail"], ["a"]], [["VBN", "NN"], ["NN"]], ""),
    ("text label\n\nword label\n", [["text"], ["word"]], [["label"], ["label"]], ""),  # its label is no name alone
]


@pytest.mark.parametrize("case", range(len(LEFT_OUT)))
def test_what_is_no_word_is_left_out_with_a_note(case, tmp_path):
    text, words, labels, note = LEFT_OUT[case]
    file = read_sentences(write(tmp_path / "train.tsv", text))
    assert [sentence.words for sentence in file.sentences] == words
    assert [list(sentence.columns.values())[-1] for sentence in file.sentences] == labels
    notes = "; ".join(file.notes)
    assert re.search(note, notes) if note else not notes


def test_lines_of_words(tmp_path):
    (first, second) = read_sentences(write(tmp_path / "train.txt", GERMEVAL)).sentences
    assert (first.lines, second.lines) == ([2, 3], [6])


def test_conllu(tmp_path):
    """Under any name; CoNLL-U Plus names its columns."""
    first, second = read_conllu(write(tmp_path / "dev.conllu.xz", TREES)).sentences
    assert first.words == first.columns["form"] == ["I", "do", "n't"]
    assert second.words == ["a b"]
    assert second.columns["upos"] == ["X"]
    assert list(first.columns) == ["form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc"]
    assert first.columns["upos"] == ["PRON", "AUX", "PART"]
    assert first.columns["head"] == ["2", "0", "2"]
    assert first.columns["deprel"] == ["nsubj", "root", "advmod"]
    plus = "# global.columns = ID UPOS FORM X:NER\n# sent_id = 1\n1\tNOUN\tmu\tO\n2\tPROPN\tVo\tB-LOC\n"
    file = read_sentences(write(tmp_path / "a.txt", plus))
    assert file.kind == CONLLU_PLUS
    columns = {"upos": ["NOUN", "PROPN"], "form": ["mu", "Vo"], "X:NER": ["O", "B-LOC"]}
    assert file.sentences == [Sentence(["mu", "Vo"], columns)]
    same = "# global.columns = ID FORM LEMMA UPOS XPOS FEATS HEAD DEPREL DEPS MISC\n" + TREES
    assert read_conllu(write(tmp_path / "b.conllup", same)).sentences == [first, second]
    with_tabs = TREES.replace("\t_\n", "\t_\t\n").replace("advmod\t_\t_\n", "advmod\t_\t_\t\n")
    assert read_conllu(write(tmp_path / "tabs", with_tabs)).sentences == [first, second]
    with_hash = TREES.replace("1\tI\tI\t", "1\t#\t#\t").replace("2.1\t", "# a comment in the middle\n2.1\t")
    assert read_conllu(write(tmp_path / "c.tsv", with_hash)).sentences[0].words == ["#", "do", "n't"]
    assert read_conllu(write(tmp_path / "d.txt", TREES.rstrip("\n"))).sentences == [first, second]
    odd = write(tmp_path / "e", TREES.replace("1\ta b\t", "1\t\u00a0\t").replace("1\tI\t", "1\t_\t"))
    assert [sentence.words[0] for sentence in read_conllu(odd).sentences] == ["_", "\u00a0"]  # a tree needs each word
    assert read_sentences(odd).notes[1:] == ["1 blank words are left out"]


def conllu(*tokens: str, text: str | None = None) -> str:
    """Tokens such as ``1 dog`` or ``1-2 don't SpaceAfter=No``."""
    rows = [[*token.split(" "), "_"][:3] for token in tokens]
    lines = ["\t".join([number, form, *"____", "0", "root", "_", misc]) for number, form, misc in rows]
    return "\n".join([*([f"# text = {text}"] if text else []), *lines]) + "\n\n"


NO = " SpaceAfter=No"
DO_NOT = ("1-2 don't", "1 do", "2 n't" + NO)
AU_CHAT = ("1-2 au", "1 à", "2 le", "3 chat" + NO, "4 ." + NO)
# A file, the texts of its sentences as a model reads them, and the note.
TEXTS = [
    (conllu(*DO_NOT, "3 go" + NO, "4 !"), ["don't go!"], ""),
    (conllu(*DO_NOT, "3 go", "4 !", text="don't  go!"), ["don't go!"], ""),  # the text counts, not SpaceAfter
    (conllu("1-2 don't" + NO, *DO_NOT[1:], "3 go"), ["don'tgo"], ""),  # SpaceAfter is that of the range
    (conllu(*AU_CHAT), ["à le chat."], ""),  # the words are not the characters of au
    (conllu(*AU_CHAT, text="au chat ."), ["à le chat ."], ""),
    (conllu("1 a", "2 b", text="a\u3000b"), ["a b"], ""),
    (conllu("1 a", "2 b", text="ab") + conllu("1 c", "2 d"), ["ab", "c d"], ""),
    (conllu("1 a", "2 b", text="abc"), ["a b"], "1 sentences have other words in # text, the first in line 2: it is"),
    (conllu("1 a" + NO, "2 b", text="abc"), ["ab"], "the first in line 2: SpaceAfter gives their spaces"),
    (conllu("2-9 x", "1-1 y", "1 a", "2 b" + NO), ["a b"], ""),  # ranges of other words
    (conllu("1 a" + NO, "2 \u00a0", "3 b"), ["a b"], "1 blank words are left out"),
    (conllu("1 a" + NO, "2 \u200b" + NO, "3 b" + NO, "4 c"), ["a bc"], "1 blank words are left out"),
    # Without either, the script decides; a file may have several. A space stays between two Latin words.
    (conllu("1 中国", "2 人") + conllu("1 한국", "2 사람"), ["中国人", "한국 사람"], "of 1 .* joined without spaces"),
    (conllu("1 中国", "2 人", text="中国 人"), ["中国 人"], ""),
    ("中国 O\nNew B-X\nYork I-X\n的 O\n冬天 O\n3.5 O\nkm O\n。 O\n", ["中国New York的冬天3.5 km。"], "joined without"),
    ("2 O\n0 O\n年 O\nA B-X\nB I-X\n社 O\n", ["20年AB社"], "joined without"),
    ("the O\n中国 B-X\npeople O\n", ["the 中国 people"], "^no line is blank: all words are one sentence$"),
    (lines_of([{"tokens": ["ไป", "ไหน", "มา"], "tags": ["O", "B-X", "O"]}]), ["ไปไหนมา"], "joined without"),
]


def named(stem: str, content: str | bytes | None) -> str:
    """Return the name of a file of JSON lines or of text."""
    return f"{stem}.jsonl" if isinstance(content, str) and content.startswith("{") else f"{stem}.txt"


@pytest.mark.parametrize("case", range(len(TEXTS)))
def test_the_text_of_words(case, tmp_path):
    """A space is between two words only where the raw text has one."""
    content, texts, note = TEXTS[case]
    file = read_sentences(write(tmp_path / named("a", content), content))
    assert [sentence.text for sentence in file.sentences] == texts
    assert re.search(note, "; ".join(file.notes)) if note else not file.notes


def test_marks_of_documents_are_no_words(tmp_path):
    """Alone in a line, with labels, or numbered as a word."""
    marks = "-DOCSTART-\n\n", "-DOCSTART-" + "\t_" * 9 + "\n\n", "1\t-DOCSTART-" + "\t_" * 8 + "\n\n"
    text = marks[0] + TREES + "".join(marks[1:]) + TREES
    sentences = read_sentences(write(tmp_path / "a.txt", text)).sentences
    assert [sentence.words for sentence in sentences] == WORDS_OF_TREES * 2
    text = "-DOCSTART-\n\na O\n\n-DOCSTART- O\nb O\n"
    assert [one.words for one in read_sentences(write(tmp_path / "b.txt", text)).sentences] == [["a"], ["b"]]


ROWS_OF_WORDS = [
    {"id": "0", "tokens": ["mu", "Vo"], "ner_tags": ["O", "B-LOC"], "lemmas": ["mu", "vo"]},
    {"id": "1", "tokens": [], "ner_tags": [], "lemmas": []},
    {"id": "2", "tokens": ["-DOCSTART-"], "ner_tags": ["O"], "lemmas": ["x"]},
    {"id": "3", "tokens": ["Rom", "\u200b "], "ner_tags": ["B-LOC", "O"], "lemmas": ["Rom", "x"]},
]


@pytest.mark.parametrize("name", ["ner.jsonl", "ner.json", "ner.parquet", "folder"])
def test_tables_of_lists(name, tmp_path):
    """The names of a ClassLabel, which Parquet of datasets and save_to_disk keep."""
    path = tmp_path / name
    if name in ("ner.parquet", "folder"):
        datasets = pytest.importorskip("datasets")
        ids = {"O": 0, "B-LOC": 1}
        rows = [row | {"ner_tags": [ids[label] for label in row["ner_tags"]]} for row in ROWS_OF_WORDS]
        classes = datasets.Sequence(datasets.ClassLabel(names=["O", "B-LOC"]))
        texts = datasets.Sequence(datasets.Value("string"))
        features = {"id": datasets.Value("string"), "tokens": texts, "ner_tags": classes, "lemmas": texts}
        table = datasets.Dataset.from_list(rows, datasets.Features(features))
        table.to_parquet(path) if name == "ner.parquet" else table.save_to_disk(path)
    else:
        write(path, lines_of(ROWS_OF_WORDS))
    file = read_sentences(path)
    assert file.sentences == [
        Sentence(["mu", "Vo"], {"lemmas": ["mu", "vo"], "ner_tags": ["O", "B-LOC"]}),
        Sentence(["Rom"], {"lemmas": ["Rom"], "ner_tags": ["B-LOC"]}),
    ]
    assert (file.kind, file.label_column(), file.notes) == (ROWS, "ner_tags", ["1 blank words are left out"])
    assert [one.words for one in read_sentences(path, labeled=False).sentences] == [["mu", "Vo"], ["Rom"]]
    assert file.left_out == 3  # an empty row, -DOCSTART- and a blank word


def test_columns_of_a_table_are_those_of_its_longest_row(tmp_path):
    """A topic is one text, as long as the first row; numbers are no labels where others have names."""
    rows = [
        {"tokens": ["a"], "topics": ["news"], "pos_tags": [3], "ner_tags": ["O"]},
        {"tokens": ["b", "c"], "topics": ["news"], "pos_tags": [1, 2], "ner_tags": ["B-X", "O"]},
    ]
    file = read_sentences(write(tmp_path / "a.jsonl", lines_of(rows)))
    assert [sentence.columns for sentence in file.sentences] == [{"ner_tags": ["O"]}, {"ner_tags": ["B-X", "O"]}]
    assert file.notes == ["pos_tags is left out: it has numbers without names"]


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("The dog  sees\n\nSo 1\u00a0000\n", LINES, [["The", "dog", "sees"], ["So", "1\u00a0000"]]),
        ("one two\nthree four\n", LINES, [["one", "two"], ["three", "four"]]),  # no line is blank
        ("a b c\n\nd e f\n\n\ng h i\n", LINES, [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]]),  # paragraphs
        ("The DT B-NP\ndog NN I-NP\n\nA DT O\n", COLUMNS, [["The", "dog"], ["A"]]),
        ("The\tDT\ndog\tNN\n", COLUMNS, [["The", "dog"]]),  # one sentence, with tabs
        ("The\n#\n\nA\n\n", COLUMNS, [["The", "#"], ["A"]]),
        ("The\ndog\n\u3000\nA\n\u200b\n", COLUMNS, [["The", "dog"], ["A"]]),  # lines that look blank
        ("a b\tX\nc\tY\n\nd\tX\n", COLUMNS, [["a b", "c"], ["d"]]),  # a word with a space, before a tab
        (CONLL2003, COLUMNS, [["U.N.", "#1\u00a0000"], ["Peter"]]),
        (GERMEVAL, COLUMNS, ROME_AND_ANNA),
        ("1\tIn\n2\tRom\n\n1\tAnna\n", COLUMNS, ROME_AND_ANNA),
        (TREES, CONLLU, WORDS_OF_TREES),
        (lines_of(ROWS_OF_WORDS), ROWS, [["mu", "Vo"], ["Rom"]]),
    ],
)
def test_words_without_labels(text, how, expected, tmp_path):
    """What the lines have in common decides how they are read."""
    file = read_sentences(write(tmp_path / named("a", text), text), labeled=False)
    assert (file.kind, [sentence.words for sentence in file.sentences], file.names) == (how, expected, [])


def unlabeled(path: Path) -> WordFile:
    return read_sentences(path, labeled=False)


def test_signs_that_are_glued_to_words_are_noted(tmp_path):
    for text, number in (
        ("He came.\nShe left .\n", 1),
        ("He came.\n" + 9 * "She left .\n", 0),  # not more than a tenth
        ("A \u201cword\u201d\nb c)\nU.N. x\nz y?!\n", 3),
        ("a .\nb ...\n", 0),
    ):
        file = unlabeled(write(tmp_path / "a.txt", text))
        expected = f"{number} of {text.count(chr(10))} sentences end with a word and a sign without a blank between"
        assert [note.startswith(expected) for note in file.notes] == [True] * (number > 0)


def default_column(path: Path) -> str:
    return read_sentences(path).label_column()


def test_default_column(tmp_path):
    defaults = {CONLL2003: "ner", TREES: "upos", "a x lem B-X B-Y\nb y lem O O\n": "5", "a O\n": "label"}
    for text, column in defaults.items():
        assert default_column(write(tmp_path / "a.txt", text)) == column


def checked(path: Path) -> None:
    file = read_sentences(path)
    check_labels(file, file.label_column())


def rows_of(count: int, *cells: str) -> str:
    """Rows of cells with the number of the row, a blank line after each seventh."""
    return "".join("\t".join(cells).format(n) + "\n" * (1 + (n % 7 == 0)) for n in range(count))


ONE_COLUMN_LESS = "word TAG\n" * 9 + "\n" + "word TAG\n" * 10 + "word\n" + "word TAG\n" * 9
REFUSED = {
    read_sentences: [
        ("a X\nb X Y\n", "line 2: 3 columns, expected 2"),
        ("a\tX\nb\t\n", "line 2: column 2 is empty: fill it, or remove the line"),
        ("a O\nb\nc\n", "line 2: expected one word a line .*, not 'b'"),
        ("a\nb\n", "line 1: expected one word a line with its labels behind it, .*, not 'a'"),
        ("The dog sees\nA cat\nOh no , he does\n", "line 1: expected one word a line .* 'The dog sees'"),
        ("a X\rb X\n", "line 1: a carriage return inside of the line"),
        ("a X\ncafé X\n".encode("latin-1"), "line 2 is not UTF-8"),
        (None, "no such file"),
        ("a O\n" * 1001, "there is no blank line in 1,001 lines: separate sentences by blank lines$"),
        ("a good film\tgood\nno good film\tbad\n\n", "2 of 2 words have blanks inside"),
        (MANY_WORDS, r"column 1 has 2 different values, column 2 60: .* --columns 1,word$"),
        (MANY_WORDS.replace(" ", " x "), r"column 1 has 2 .* column 3 60: .* --columns 1,2,word$"),
        ("#begin document (a); part 000\n" + MANY_WORDS.replace("NN", "DT"), "column 1 has 1 different values"),
        (rows_of(60, "{0}", "d1", "word{0}", "O"), "--columns 1,2,word,4$"),
        ("7 a O\n8 b O\n\n9 c O\n10 f X\n11 d O\n12 e O\n", "6 different numbers or ids, column 2 6"),
        ("O a\nB-X b\nO c\n", "column 1 has 2 different values, column 2 3: .* --columns 1,word$"),
        # Forms that are not read, each with the command that converts it.
        ("a/DT b/NN\nc/DT d/NN ./.\n", "'a/DT b/NN' is word/tag: .* sed -E"),
        ("a/DT b/NN ./.\n" * 9, "is word/tag"),
        ("Word,POS tag\na,X\nb,X\n", r"'Word,POS tag' is CSV: .*read_csv\(FILE, sep=SEPARATOR, header.*skip_blank"),
        ("John|NNP|B-PER\nis|VB|O\n\n", "is CSV"),
        # Others get a line that tells what is expected: brat, bracketed trees, numbers of sentences.
        (rows_of(40, "T{0}", "Person {0} 9", "Anna Smith{0}"), "40 different numbers or ids, column 2 40"),
        ("(TOP (S (NP (NN dog))))\n(TOP (NP (DT a) (NN dog)))\n", "columns, expected 5 as in most lines"),
        ("".join(f"sentence_{n // 3}\tw{n // 3}\tO\n" for n in range(1200)), "no blank line in 1,200 lines"),
        # Tables.
        (lines_of([{"tokens": ["a"], "ner_tags": [0]}]), r"row 1: ner_tags has numbers without names .0."),
        (lines_of([{"tokens": ["a", "b"], "tags": ["O"]}]), "has 2 words and tags 1 labels: .* does not label words"),
        (lines_of([{"tokens": ["a"], "tags": [None]}]), "row 1: tags has None, no label"),
        (lines_of([{"tokens": "a b", "tags": ["O"]}]), "row 1: no list of words .* .tokens is a text"),
        (lines_of([{"tokens": [{"text": "a"}], "spans": []}]), "row 1: tokens has {'text': 'a'}, no word"),
        (lines_of([{"text": "a"}]), "no list of words called tokens .*it has text"),
        (lines_of([{"tokens": ["a"]}]), "no list of labels that is as long as tokens"),
        (lines_of([{"tokens": ["a", "\ud83d"], "tags": ["O", "O"]}]), "row 1: tokens has None, no word"),
        (lines_of([{"tokens": ["a", "b\nc"], "tags": ["O", "O"]}]), "row 1: tokens has 'b.*c', no word"),
        ("# global.columns = ID UPOS\n1\tX\n", "line 1: global.columns has ID, UPOS, but not FORM"),
    ],
    default_column: [
        (lines_of([{"words": ["a"], "named entities": ["O"]}]), "'named entities' cannot name a column"),
        ("a B-X 0.9\nb O 0.8\n", "column 2 marks spans, 3 does not: choose one with --column 2"),
        ("a B-X NN\nb O VB\n", "column 2 marks spans, 3 does not"),
        (
            lines_of([{"tokens": ["a", "b"], "ner_tags": ["B-X", "O"], "pos_tags": ["NN", "VB"]}]),
            "column ner_tags marks spans, pos_tags does not",
        ),
        (GERMEVAL, "column 3 marks spans, 4 too: choose one with --column 3 or --column 4"),
    ],
    checked: [
        ("a 1\nb 0\n", r"column label has numbers without names .0.: write names .* another column with --column"),
        ("a x 1\nb y -0.5\n", "column chunk has numbers without names"),
        ("a\tNN B-X\nb\tVB O\n", "each label of column label has a blank .'NN B-X'.: .* sed"),
    ],
    read_conllu: [
        (TREES.replace("3\tn't", "4\tn't"), "line 7: word id 4, expected 3"),
        (TREES.replace("\tVBP\t", " VBP "), "line 5: 8 columns, expected 10 of CoNLL-U, separated by tabs"),
        (TREES.replace("advmod", " "), r"line 7: column 8 \(deprel\) is empty"),
        (TREES.replace("1\ta b", "1\t "), r"line 9: column 2 \(form\) is empty"),
        (TREES.replace("\tadvmod", ""), "line 7: 9 columns, expected 10"),
        (TREES.replace("1\tI\t", "0\tI\t"), "line 3: word id 0, expected 1$"),
        ("\t".join(["ID", "FORM", *"abcdefgh"]) + f"\n{TREES}" * 9, "word id ID, expected 1$"),
        (TREES.replace("\n1\ta b", "1\ta b"), "line 8: word id 1, expected 4: a blank line before it is missing"),
        (TREES.replace("\tI\tI", "\t_\tI").replace("\ta b\t", "\t_\t").replace("\tdo", "\t_"), "3 of 4 words are _"),
        (CONLL2003, "is not CoNLL-U but one word a line"),
        (lines_of(ROWS_OF_WORDS), "is not CoNLL-U but one sentence a row"),
    ],
    unlabeled: [
        ("The dog  sees\nA\tcat\n", "line 2: 2 columns, expected 3 .*; line 2 has a tab"),
        ("".join(f"{n}\tthe dog\n" for n in range(1001)), "line 1 has a tab, .* no blank line in 1,001 lines: sep"),
        ("1\tthe dog sees\n2\ta cat\n", "2 of 2 words have blanks inside: expected one word a line"),
        (ONE_COLUMN_LESS, "line 21: 1 columns, expected 2 as in most lines"),
        ("\n \n", "has no sentence"),
        ("John,B-PER\nis,O\n", "is CSV"),
    ],
    lambda path: read_sentences(path, ["pos"]): [
        (TREES, r" is CoNLL-U: leave it out"),
        ("a X O\n", r"3 columns, expected 2 \(word, pos\)"),
    ],
}


@pytest.mark.parametrize("read", REFUSED)
def test_refusals(read, tmp_path):
    """One line that names the file and the line."""
    for number, (content, message) in enumerate(REFUSED[read]):
        path = tmp_path / named(f"file{number}", content)
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        with pytest.raises(UserError, match=rf"file{number}\.(txt|jsonl).*{message}"):
            read(path)
