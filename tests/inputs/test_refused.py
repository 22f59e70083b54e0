"""What is refused of texts and tables, each with the one line that says why. docs/converting.md has the commands that help."""

import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard

from amos_fairseq.errors import UserError, one_line
from amos_fairseq.inputs.documents import DocumentFile
from amos_fairseq.inputs.rows import Tables

TEXT = b"one line\n\nanother line\n"
TSV = b"text\tlabel\none\ta\ntwo\tb\n"


def of_labels(*labels: str, name: str = "label") -> bytes:
    return "".join([f"text\t{name}\n", *(f"text {n}\t{label}\n" for n, label in enumerate(labels))]).encode()


# Name and content of a file of text, and the message.
TEXTS = [
    ("none.txt", None, ": no such file"),
    ("empty.txt", b"", "contains no text"),
    ("blank.txt", b" \n\n", "contains no text"),
    (
        "latin.txt",
        b"one\nsecond caf\xe9\n",
        "line 2 is not UTF-8, and the rest of the file is ASCII or like it: convert the whole",
    ),
    ("mixed.txt", b"\xc3\xa9\n\xe9\n", " (lines like it: 1; lines of UTF-8, without ASCII: 1): the file mixes enc"),
    ("cut.txt.gz", gzip.compress(TEXT * 999)[:-12], "is damaged"),
    ("more.txt.gz", gzip.compress(TEXT) + b"other bytes", "is damaged"),
    ("plain.txt.gz", TEXT, "is damaged, not compressed as its name says"),
    ("cut.txt.xz", lzma.compress(TEXT * 999)[:-30], "is damaged"),
    ("cut.txt.zst", zstandard.compress(TEXT * 999)[:-6], "is damaged"),
    (
        "array.json",
        json.dumps([{"text": "a"}]).encode(),
        "line 1 contains [{'text': 'a'}], not an object: each line has",
    ),
    ("indented.json", json.dumps({"text": "a"}, indent=1).encode(), "line 1 is not JSON"),
    ("cut.jsonl", b'{"text": "ok"}\n{"text": "o', "line 2 is not JSON"),
    ("deep.jsonl", b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}\n", "line 1 has more than 100 levels of values"),
    ("number.jsonl", b'{"text": "ok"}\n{"text": 1}\n', "row 2: text is 1, not a text"),
    (
        "absent.jsonl",
        b'{"body": "x", "id": 1}\n',
        "has no column 'text', it has body, id: choose one with --text-column",
    ),
    ("semicolons.csv", b"text;label\na;b\n", "has no column 'text', it has text;label"),
]
# Name and content of a table, the message, and options of amos classify.
TABLES = [
    ("table.txt", TSV, "is no table by its name: .tsv, .csv, .jsonl and .parquet are"),
    ("cr.csv", b"text,label\rone,a\r", "line 1: the row that begins there is not quoted as CSV (new-line"),
    ("open.csv", b'text,label\none,a\n"two,b\n', "line 3: the row that begins there is not quoted as CSV"),
    ("same.csv", b"text,label,text\n1,2,3\n", "its columns (text, label, text) need different names"),
    ("header.tsv", b"text\tlabel\n", "has no row of the columns text, label"),
    ("index.tsv", b"text\tlabel\n0\tone\ta\n1\ttwo\tb\n", "has no row of the columns text, label, and 2 with another"),
    (
        "other.tsv",
        b"review\tstars\nx\t1\n",
        "has no column 'text', it has review, stars: choose with --text and --label",
    ),
    ("label.tsv", TSV, "has no column 'lable', it has text, label", {"label": "lable"}),
    ("inside.jsonl", b'{"x": {"y": 1}}\n', "has no column 'x.z', it has x: choose with --text and", {"text": ["x.z"]}),
    ("dots.csv", b"x,label\na,b\n", "has no column 'x.y', it has x, label: choose with --text", {"text": ["x.y"]}),
    ("twice.tsv", TSV, "--text takes one column, or two different ones for pairs", {"text": ["label"]}),
    ("noise.parquet", b"this is no Parquet file", "is damaged or not what its name says"),
    ("texts.jsonl", b'{"text": ["a"], "label": "b"}\n', "line 1: text is a list or an object: give a column of texts"),
    ("no_label.tsv", of_labels("", " "), "has no row with a text and a label in text, label"),
    ("one.tsv", of_labels("a", "a"), "1 classes (a), of which nothing can be learned: give the column of the labels"),
    ("none.tsv", of_labels(",", ","), "0 labels (), of which nothing can be learned", {"kind": "labels"}),
    ("many.tsv", of_labels(*map(str, range(10_001))), "10001 classes"),
    (
        "large.tsv",
        of_labels("1", "2e300"),
        "line 3, column label: the label '2e300' is not a number",
        {"kind": "number"},
    ),
    (
        "times.tsv",
        of_labels("1700000000.5", "1700000001.5"),
        "numbers of mean 1.7e+09 and standard deviation 0.5, of which",
    ),
    ("object.jsonl", b'{"text": "a", "label": {"id": 1}}\n', "line 1, column label: the label {'id': 1} is not one of"),
    (
        "list.jsonl",
        b'{"text": "a", "label": ["b"]}\n',
        "the label ['b'] is not one of several classes",
        {"kind": "classes"},
    ),
    (
        "marks.csv",
        b"text,rude,sad\na,0,1\nb,0,\n",
        "line 3, column rude, sad: sad is '', not 0 or 1",
        {"label": ["rude", "sad"]},
    ),
    (
        "utf16.csv",
        "text,label\r\ngood,1\r\n".encode("utf-16-le"),
        "line 1: 11 of its 23 bytes are NUL, as in UTF-16 without a byte-order mark: convert the whole file",
    ),
    ("comment.csv", b"# made in May\ntext,label\na,b\n", "where its first line is a comment, remove it"),
    (
        "semicolons.csv",
        b"text;label\ngood;a\n",
        "its columns are separated by ';': convert it (docs/converting.md, Tables)",
    ),
    (
        "row_names.tsv",
        b'"text"\t"label"\n"1"\t"good"\t"a"\n"2"\t"bad"\t"b"\n',
        "and 2 with another number of columns: if R added row names, write the table with row.names=FALSE",
    ),
    (
        "python.csv",
        b"text,label\ngood,\"['a', 'b']\"\n",
        "is a list as Python prints it: write the table as JSON lines",
        {"kind": "labels"},
    ),
    (
        "few.tsv",
        TSV,
        "few.tsv has 2 different texts of 2 classes, too few to choose dev texts: give --dev",
        {"dev": None},
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), TEXTS, ids=[case[0] for case in TEXTS])
def test_texts(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(DocumentFile(path).read())
    assert message in str(error.value)
    assert str(path) in one_line(str(error.value)) == str(error.value)


@pytest.mark.parametrize("case", TABLES, ids=[case[0] for case in TABLES])
def test_tables(case: tuple, tmp_path: Path) -> None:
    name, content, message, *options = case
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        Tables(path, **{"dev": path} | dict(*options)).check().read()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
