"""Column files, CoNLL-U and tables of lists, against files written by hand."""

import gzip
import json
import random
import unicodedata
from pathlib import Path

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.word_files import (
    COLUMNS,
    CONLLU,
    LINES,
    ROWS,
    Sentence,
    WordFile,
    read_conllu,
    read_sentences,
    undivided,
    words_in,
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


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode("utf-8"))
    return path


def name_for(content: object) -> str:
    """Return a name whose suffix says what a file holds: JSON lines, brat's spans, or words."""
    if isinstance(content, str) and content.startswith(("{", "T1\t")):
        return "file.jsonl" if content[0] == "{" else "file.ann"
    return "file.txt"


def lines_of(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_columns(tmp_path):
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress(CONLL2003.encode()))
    file = read_sentences(tmp_path / "train.txt.gz")
    assert file.sentences == [
        Sentence(["U.N.", "#1\u00a0000"], {"2": ["NNP", "CD"], "3": ["I-NP", "I-NP"], "label": ["I-ORG", "O"]}),
        Sentence(["Peter"], {"2": ["NNP"], "3": ["I-NP"], "label": ["I-PER"]}),
    ]
    assert [sentence.lines for sentence in file.sentences] == [[3, 4], [7]]
    assert file.left_out == {"lines with -DOCSTART-": 2, "blank words": 0, "sentences without words": 0}


@pytest.mark.parametrize(
    ("text", "names", "words", "columns"),
    [
        ("New York\tB-LOC\r\nis\tO\r\n", None, ["New York", "is"], {"label": ["B-LOC", "O"]}),
        ("New York\tB-LOC\ris\t\0O\n", None, ["New York", "is"], {"label": ["B-LOC", "O"]}),  # CR ends a line, NUL goes
        ("New York \t B-LOC \nis\tO\n", None, ["New York", "is"], {"label": ["B-LOC", "O"]}),
        ("a O \nb B-X  \n", None, ["a", "b"], {"label": ["O", "B-X"]}),
        ("a\tO\t\nb\tB-X\t\n", None, ["a", "b"], {"label": ["O", "B-X"]}),  # each line ends with a tab
        ("#tag O\n# O\n", None, ["#tag", "#"], {"label": ["O", "O"]}),  # no comments
        ("NN dog\nVB sees\n", ("pos", "word"), ["dog", "sees"], {"pos": ["NN", "VB"]}),
        ("1 a O\n2 b O\n", ("id", "word", "ner"), ["a", "b"], {"id": ["1", "2"], "ner": ["O", "O"]}),
        ("a O\n\u00a0 O\n\u3000\tO\nb B-X\n", None, ["a", "b"], {"label": ["O", "B-X"]}),  # blank words
    ],
)
def test_names_of_columns(text, names, words, columns, tmp_path):
    (sentence,) = read_sentences(write(tmp_path / "train.txt", text), names).sentences
    assert (sentence.words, sentence.columns) == (words, columns)


def test_conllu(tmp_path):
    first, second = read_conllu(write(tmp_path / "dev.txt", TREES)).sentences
    assert first.words == first.columns["form"] == ["I", "do", "n't"]
    assert (second.words, second.columns["upos"]) == (["a b"], ["X"])
    assert list(first.columns) == ["form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc"]
    assert first.columns["upos"] == ["PRON", "AUX", "PART"]
    assert first.columns["head"] == ["2", "0", "2"]
    assert first.columns["deprel"] == ["nsubj", "root", "advmod"]
    with_hash = TREES.replace("1\tI\tI\t", "1\t#\t#\t").replace("2.1\t", "# a comment in the middle\n2.1\t")
    assert read_conllu(write(tmp_path / "c.tsv", with_hash)).sentences[0].words == ["#", "do", "n't"]
    assert read_conllu(write(tmp_path / "d.txt", TREES.rstrip("\n"))).sentences == [first, second]
    odd = write(tmp_path / "e", TREES.replace("1\ta b\t", "1\t\u00a0\t"))
    assert read_conllu(odd).sentences[1].words == ["\u00a0"]  # a tree needs each word
    assert read_sentences(odd).left_out["blank words"] == 1


def conllu(*tokens: str) -> str:
    """Tokens such as ``1 dog`` or ``1-2 don't SpaceAfter=No``."""
    rows = [[*token.split(" "), "_"][:3] for token in tokens]
    return "\n".join("\t".join([number, form, *"____", "0", "root", "_", misc]) for number, form, misc in rows) + "\n\n"


NO = " SpaceAfter=No"
DO_NOT = ("1-2 don't", "1 do", "2 n't" + NO)
# A file, and the texts of its sentences as a model reads them.
TEXTS = [
    (conllu(*DO_NOT, "3 go" + NO, "4 !"), ["don't go!"]),
    (conllu("1-2 don't" + NO, *DO_NOT[1:], "3 go"), ["don'tgo"]),  # SpaceAfter is that of the range
    (
        conllu("1-2 au", "1 à", "2 le", "3 chat" + NO, "4 ." + NO),
        ["à le chat."],
    ),  # the words are not the characters of au
    (conllu("2-9 x", "1-1 y", "1 a", "2 b" + NO), ["a b"]),  # ranges of other words
    (conllu("1 a" + NO, "2 \u00a0", "3 b"), ["a b"]),
    (conllu("1 a" + NO, "2 \u200b" + NO, "3 b" + NO, "4 c"), ["a bc"]),
    # Without it, the script decides; a file may have several. A space stays between two Latin words.
    (conllu("1 中国", "2 人") + conllu("1 한국", "2 사람"), ["中国人", "한국 사람"]),
    (conllu("1 中国", "2 人" + NO), ["中国 人"]),
    ("中国 O\nNew B-X\nYork I-X\n的 O\n冬天 O\n3.5 O\nkm O\n。 O\n", ["中国New York的冬天3.5 km。"]),
    ("2 O\n0 O\n年 O\nA B-X\nB I-X\n社 O\n", ["20年AB社"]),
    ("the O\n中国 B-X\npeople O\n", ["the 中国 people"]),
    (lines_of([{"tokens": ["ไป", "ไหน", "มา"], "tags": ["O", "B-X", "O"]}]), ["ไปไหนมา"]),
]


@pytest.mark.parametrize("case", range(len(TEXTS)))
def test_the_text_of_words(case, tmp_path):
    """A space is between two words only where the raw text has one."""
    content, texts = TEXTS[case]
    file = read_sentences(write(tmp_path / name_for(content), content))
    assert [sentence.text for sentence in file.sentences] == texts


def test_marks_of_documents_are_no_words(tmp_path):
    """Alone in a line, with labels, or numbered as a word."""
    marks = "-DOCSTART-\n\n", "-DOCSTART-" + "\t_" * 9 + "\n\n", "1\t-DOCSTART-" + "\t_" * 8 + "\n\n"
    text = marks[0] + TREES + "".join(marks[1:]) + TREES
    sentences = read_sentences(write(tmp_path / "a.txt", text)).sentences
    assert [sentence.words for sentence in sentences] == WORDS_OF_TREES * 2


ROWS_OF_WORDS = [
    {"id": "0", "tokens": ["mu", "Vo"], "ner_tags": ["O", "B-LOC"], "lemmas": ["mu", "vo"]},
    {"id": "1", "tokens": [], "ner_tags": [], "lemmas": []},
    {"id": "2", "tokens": ["-DOCSTART-"], "ner_tags": ["O"], "lemmas": ["x"]},
    {"id": "3", "tokens": ["Rom", "\u200b "], "ner_tags": ["B-LOC", "O"], "lemmas": ["Rom", "x"]},
]


@pytest.mark.parametrize("name", ["ner.jsonl", "ner.parquet", "folder"])
def test_tables_of_lists(name, tmp_path):
    """The names of a ClassLabel are read, which Parquet of datasets and save_to_disk keep."""
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
    expected = [Sentence(["mu", "Vo"], {"ner_tags": ["O", "B-LOC"]}), Sentence(["Rom"], {"ner_tags": ["B-LOC"]})]
    assert file.sentences == expected
    assert (file.kind, file.label_column()) == (ROWS, "ner_tags")
    assert file.left_out == {"blank words": 1, "sentences without words": 2}
    assert [one.columns for one in read_sentences(path, column="lemmas").sentences][1] == {"lemmas": ["Rom"]}
    assert [one.words for one in read_sentences(path, labeled=False).sentences] == [["mu", "Vo"], ["Rom"]]


TEXT_WITH_SPANS = 'He met  "Jan-Peter" in New York.'
WORDS_WITH_LABELS = 'He/O met/O "/O Jan/B-PER -/I-PER Peter/I-PER "/O in/O New/B-LOC York/I-LOC ./O'
SPANS = [
    '"label": [[9, 18, "PER"], [23, 31, "LOC"]]',
    '"labels": [[23, 31, "LOC"], [9, 18, "PER"]], "label": "news"',
    '"entities": [{"id": 1, "start_offset": 9, "end_offset": 18, "label": "PER"}, '
    '{"id": 2, "start_offset": 23, "end_offset": 31, "label": "LOC"}], "relations": []',
    '"tokens": [{"text": "He", "start": 0}], "answer": "accept", "spans": [{"start": 9, "end": 18, "token_start": 3, '
    '"label": "PER"}, {"start": 23, "end": 31, "token_start": 7, "label": "LOC"}]',
    '"ents": [{"start": 9, "end": 18, "label": "PER"}, {"start": 23, "end": 31, "label": "LOC", "text": "New York"}]',
]


def test_words_of_raw_text_as_in_the_training_data():
    """Hyphens and the points of numbers, not an apostrophe that mostly begins words; others are whole between spaces."""
    words = ["vice-mayor", "'s", "O'Brien", "'s", "3.5", ".", "U.S.", "-"]
    found = undivided([Sentence(words, {}), Sentence(["Jan-Peter", "a", "/b"], {})])
    assert found == ("-.", ["'s", "/b", "O'Brien", "U.S."])
    french = Sentence(["l'", "e-mail", "d'", "aujourd'hui"], {}, [False, True, False, False])
    assert undivided([french, Sentence(["well", "-", "known"], {}, [False] * 3), french]) == (
        "-",
        ["aujourd'hui", "d'", "l'"],
    )
    assert words_in("A vice-mayor's 's 3.5 -1 U.S. U.S.-Bank.", 1, *found)[0].words == [
        *("A", "vice-mayor", "'", "s", "'s", "3.5", "-", "1", "U.S.", "U.S", ".", "-", "Bank", ".")
    ]


@pytest.mark.parametrize("spans", SPANS)
def test_spans_of_characters(spans, tmp_path):
    """As doccano, Prodigy and spaCy write them. Without labels the same words, in the same text."""
    rows = f'{{"text": {json.dumps(TEXT_WITH_SPANS)}, {spans}}}\n{{"text": " \u200b ", "answer": null}}\n'
    (sentence,) = read_sentences(write(tmp_path / "a.jsonl", rows)).sentences
    assert list(map("/".join, zip(sentence.words, sentence.columns["label"], strict=True))) == WORDS_WITH_LABELS.split()
    (same,) = read_sentences(tmp_path / "a.jsonl", labeled=False).sentences
    assert (same.words, same.text) == (sentence.words, " ".join(TEXT_WITH_SPANS.split()))


def label_characters(text: str, spans: list[list]) -> tuple[list[str], int]:
    """Words and labels by a loop over characters; the longest of spans that overlap. And the number of ends inside words."""
    owner, words = [None], []  # of the character before the text, and of each one
    for character in text:
        alone = unicodedata.category(character)[0] == "P" or "\u4e00" <= character <= "\u9fff"
        if not character.isspace() and (alone or owner[-1] is None or words[-1][1]):
            words.append(["", alone])
        owner.append(None if character.isspace() else len(words) - 1)
        words[-1:] = [[words[-1][0] + character.strip(), words[-1][1]]] if words else []
    labels = ["O"] * len(words)
    inside = [(sorted({*owner[start + 1 : end + 1]} - {None}), label) for start, end, label in spans]
    edges = [edge for span, (places, _) in zip(spans, inside, strict=True) if places for edge in span[:2]]
    cut = sum(owner[edge] is not None and owner[edge : edge + 2] == [owner[edge]] * 2 for edge in edges)
    for places, label in sorted(inside, key=lambda each: (-len(each[0]), each[0][:1])):
        if {labels[place] for place in places} == {"O"}:
            for place in places:
                labels[place] = f"{'B' if place == places[0] else 'I'}-{label}"
    return [f"{word}/{label}" for (word, _), label in zip(words, labels, strict=True)], cut


def test_spans_are_those_of_a_loop_over_characters(tmp_path):
    draw, rows = random.Random(1), []
    for _ in range(500):
        text = "".join(draw.choices("ab é-.中国  \t\u00a0", k=draw.randint(1, 20))) + "x"
        edges = [sorted(draw.choices(range(len(text) + 1), k=2)) for _ in range(draw.randint(0, 4))]
        rows.append({"text": text, "labels": [[*edge, draw.choice("XY")] for edge in edges]})
    file = read_sentences(write(tmp_path / "a.jsonl", lines_of(rows)))
    expected, cut = zip(*(label_characters(row["text"], row["labels"]) for row in rows), strict=True)
    found = [list(map("/".join, zip(one.words, one.columns["label"], strict=True))) for one in file.sentences]
    assert found == list(expected)
    assert [one.text for one in file.sentences] == [" ".join(row["text"].split()) for row in rows]
    extended, overlap, empty = (count for why, count in sorted(file.left_out.items()) if "spans" in why)
    lost = sum(len(row["labels"]) for row in rows) - str(expected).count("/B-")
    assert (extended, overlap + empty) == (sum(cut), lost)


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        ("The dog  sees\n\nSo 1\u00a0000\n", LINES, [["The", "dog", "sees"], ["So", "1\u00a0000"]]),
        ("one two\nthree four\n", LINES, [["one", "two"], ["three", "four"]]),  # no line is blank
        ("a b c\n\nd e f\n\n\ng h i\n", LINES, [["a", "b", "c"], ["d", "e", "f"], ["g", "h", "i"]]),
        ("The DT B-NP\ndog NN I-NP\n\nA DT O\n", COLUMNS, [["The", "dog"], ["A"]]),
        ("The\tDT\ndog\tNN\n", COLUMNS, [["The", "dog"]]),  # one sentence, with tabs
        ("The\n#\n\nA\n\n", COLUMNS, [["The", "#"], ["A"]]),
        ("The\ndog\n\u3000\nA\n\u200b\n", COLUMNS, [["The", "dog"], ["A"]]),  # lines that look blank
        ("a b\tX\nc\tY\n\nd\tX\n", COLUMNS, [["a b", "c"], ["d"]]),  # a word with a space, before a tab
        (CONLL2003, COLUMNS, [["U.N.", "#1\u00a0000"], ["Peter"]]),
        (TREES, CONLLU, WORDS_OF_TREES),
        (lines_of(ROWS_OF_WORDS), ROWS, [["mu", "Vo"], ["Rom"]]),
    ],
)
def test_words_without_labels(text, how, expected, tmp_path):
    file = read_sentences(write(tmp_path / name_for(text), text), labeled=False)
    assert (file.kind, [sentence.words for sentence in file.sentences]) == (how, expected)
    assert how == COLUMNS or not file.names  # other columns may show that it was text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TREES, "CoNLL-U, column upos: 2 sentences of 4 words | I/PRON do/AUX n't/PART"),
        ("1 Rom B-LOC\n2 is O\n", ": 1 sentences of 2 words | 1/B-LOC 2/O"),  # an index column
        (
            '{"text": "A B", "spans": [[0, 1, "X"], [0, 3, "Y"], [2, 2, "X"]]}\n{"text": "a", "answer": "reject"}',
            "one text a row, spans in spans, column label: 1 sentences of 2 words; left out: 1 spans without a word, 1 spans "
            "that overlap another one (the longest stays), 1 rows whose answer is reject or ignore | A/B-Y B/I-Y",
        ),
        (lines_of(ROWS_OF_WORDS), "a row, column ner_tags: 2 sentences of 3 words; left out: 1 blank words, 2"),
    ],
)
def test_what_was_read_is_printed(text, expected, tmp_path, capsys):
    path = write(tmp_path / name_for(text), text)
    file = read_sentences(path)
    file.report(column=file.label_column())
    printed = capsys.readouterr().err.replace(f"\nprepare: {path}: the first:", " |")
    assert expected in printed


def test_the_text_is_printed_where_there_are_no_labels(tmp_path, capsys):
    read_sentences(write(tmp_path / "a.txt", TREES), labeled=False).report("tag")
    said = f"tag: {tmp_path / 'a.txt'}"
    expected = f"{said}: CoNLL-U: 2 sentences of 4 words\n{said}: the first: I do n't\n"
    assert capsys.readouterr().err == expected


def unlabeled(path: Path) -> WordFile:
    return read_sentences(path, labeled=False)


def named(path: Path) -> WordFile:
    return read_sentences(path, ["word", "pos"])


FORMS = "words are read from CoNLL-U, .* docs/converting.md"
# A file, the beginning of the one line that refuses it, and another reader.
REFUSED = [
    ("a X\nb X Y\n", f"line 2: 3 columns .b X Y., expected word, label: {FORMS}"),
    ("a\tX\nb\t\n", f"line 2: 1 columns .b., expected word, label: {FORMS}"),
    ("a\nb\n", f"line 1: 1 columns .a., expected word, label: {FORMS}"),
    ("\n \n", f"has no sentence: {FORMS}"),
    ("-DOCSTART- O\n\n\u00a0 O\n", f"has no sentence: {FORMS}"),
    ("café X\n".encode("latin-1"), "line 1.*not UTF-8"),
    (None, "no such file"),
    (lines_of([{"tokens": ["a"], "ner_tags": [0]}]), "row 1: ner_tags is no list of texts .*: .0.: words"),
    (lines_of([{"tokens": ["a", "b"], "tags": ["O"]}]), "row 1: tags is no list .* as long as tokens"),
    (lines_of([{"tokens": ["a"], "tags": [" "]}]), "row 1: tags is no list of texts"),
    (lines_of([{"tokens": "a b", "tags": ["O"]}]), "row 1: tokens is no list of texts"),
    (lines_of([{"tokens": ["a", "b\nc"], "tags": ["O", "O"]}]), "row 1: tokens is no list of texts"),
    (lines_of([{"text": "a", "tags": ["O"]}]), "no column 'tokens', it has text, tags: .* --column; words"),
    ('{"text": "a", "label": "b"}', f"row 1: 'a' is no text, or 'b' no list of spans: {FORMS}"),
    (
        '{"text": "one two", "spans": [[5, 7, "X"]]}\n' * 3,
        "3 spans begin one character into a word: count .* from 0",
    ),
    ('{"text": null, "spans": []}', "row 1: None is no text, or .. no list of spans: words"),
    *(
        (f'{{"text": "a", "spans": [[0, 1, "X"], {span}]}}', "row 1: .* is not start, end and label of")
        for span in [
            '{"start":0,"end":1,"label":"X","text":"b"}',
            '"O"',
            "[0,1]",
            '[0,1.0,"X"]',
            '[1,0,"X"]',
            '{"start":0,"end":1}',
            '[-1,1,"X"]',
            '[0,1,""]',
        ]
    ),
    ('{"text": "a", "label": [[0, 2, "X"]]}', r"row 1: .0, 2, 'X'. is not .* in a text of 1 characters"),
    (TREES.replace("3\tn't", "4\tn't"), "line 7: expected word 3 in the ten columns of CoNLL-U", read_conllu),
    (
        TREES.replace("\n1\ta b", "1\ta b"),
        "line 8: expected word 4 .* with a blank line after each sentence",
        read_conllu,
    ),
    (
        TREES.replace("\tVBP\t", " VBP "),
        "line 5: expected word 2 in the ten columns of CoNLL-U, separated by",
        read_conllu,
    ),
    (TREES.replace("advmod", " "), "line 7: expected word 3", read_conllu),
    (CONLL2003, "line 3: expected word 1 .*: 'U.N. NNP I-NP I-ORG'", read_conllu),
    ("# a\n", "has no sentence", read_conllu),
    ("a\tX\n" * 201, "no blank line, so that its 201 words are one sentence: put one"),
    ("The dog  sees\nA\tcat\n", "line 2: 2 columns .A cat., expected word, 2, label", unlabeled),
    ("a X O\n", "line 1: 3 columns .a X O., expected word, pos", named),
    (
        lines_of(ROWS_OF_WORDS),
        "--columns names all columns, with word among them, of a file with one word a line",
        named,
    ),
    ("a X\n", "--columns names all columns, with word among them", lambda path: read_sentences(path, ["a", "b"])),
    (
        "T1\tPER 0 4\tAnna\nT2\tLOC 9 13\tRome\n",
        "holds brat's spans without their text: write JSON lines with text and spans",
    ),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals(case, tmp_path):
    """One line that names the file and the place."""
    content, message, *other = REFUSED[case]
    read = other[0] if other else read_sentences
    path = tmp_path / name_for(content)
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    with pytest.raises(UserError, match=rf"{path.name}.*{message}") as refusal:
        read(path)
    assert "\n" not in str(refusal.value)
