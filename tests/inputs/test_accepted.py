"""Small inputs in the documented forms, against what plain code reads of them: json, csv, or by hand."""

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
import zstandard

from amos_fairseq.inputs.documents import DocumentFile
from amos_fairseq.inputs.rows import Tables
from amos_fairseq.inputs.tables import TableFile

TEXTS = [
    'She said "go", twice.',
    "na\u00efve \u4e2d\u6587 \U0001f600",
    "a,b;c | d",
    '"quoted"',
    "=1+1",
    "NULL",
    "nan",
    "\\N",
]
PARAGRAPHS = [["One.", "Two words."], ["Three."], ["Four, \u00a0five.", "* * *", "<b>six</b>"]]


def separated(rows: list[list[str]], separator: str) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=separator).writerows(rows)
    return stream.getvalue().encode("utf-8")


def objects(texts: list[object], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, key: text}, ensure_ascii=False) + "\n" for text in texts).encode("utf-8")


def labeled(rows: list[tuple[str, object]]) -> bytes:
    return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows).encode()


def blocks(end: str = "\n") -> bytes:
    return (end * 2).join(end.join(paragraphs) for paragraphs in PARAGRAPHS).encode("utf-8")


ROWS = [["id", "text"], *([str(number), text] for number, text in enumerate(TEXTS))]
OF_PARAGRAPHS = ["".join(f"{line}\n" for line in paragraphs) for paragraphs in PARAGRAPHS]
OF_TEXTS = [f"{text}\n" for text in TEXTS]
INSIDE = [{"web": {"body": text}} for text in TEXTS]
OF_NUL = ["one two\nthree\n", "four\n"]
# Name of the file, content, the documents, and the column if it is not text.
DOCUMENTS = {
    "any other suffix is text": ("chapter.one", blocks(), OF_PARAGRAPHS),
    "CR LF and a mark": ("a.txt", b"\xef\xbb\xbf" + blocks("\r\n"), OF_PARAGRAPHS),
    "zstd": ("A.TXT.ZST", zstandard.compress(blocks()), OF_PARAGRAPHS),
    "NUL": ("a.txt", b"\0o\0ne\0 two \0\nthr\0\0ee\n\0\0\nfour\n", OF_NUL),
    "NUL in JSON": ("a.jsonl", objects(["o\0ne two \0\nthree", "\0", "four"]), OF_NUL),
    "JSON lines of a hub": ("c4.00000-of-01024.json.gz", gzip.compress(objects(TEXTS)), OF_TEXTS),
    "another field": ("a.jsonl", objects(TEXTS, "body"), OF_TEXTS, "body"),
    "inside of objects": ("a.jsonl", objects([{}, *INSIDE], "meta"), OF_TEXTS, "meta.web.body"),
    "a dot in a name": ("a.jsonl", b'{"meta.body": "x", "meta": {"body": "y"}}', ["x\n"], "meta.body"),
    "CSV": ("a.csv", separated(ROWS, ","), OF_TEXTS),
    "TSV": ("a.tsv.zst", zstandard.compress(separated(ROWS, "\t")), OF_TEXTS),
    "lines in a cell": ("a.csv", separated([["text"], ["a\n\nb\r\nc"], ["d"]], ","), ["a\nb\nc\n", "d\n"]),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str, tmp_path: Path) -> None:
    file, content, expected, *column = DOCUMENTS[name]
    (tmp_path / file).write_bytes(content)
    assert [each.decode("utf-8") for each in DocumentFile(tmp_path / file, *column).read()] == expected


LABELS, A_B, A_B_C = ["pos", "neg"], [("a",), ("b",)], [("a",), ("b",), ("c",)]
OF_COLUMNS = b"id,text,rude,sad,new\n1,a,0,1.0,1\n2,b,0,0,False\n3,c,1,0,TRUE\n"
OF_LISTS = [("a", [0.0, 1.0, 1.0]), ("b", [0, 0, 0]), ("c", None)]
# Name of the file, content, options, texts, the kind of labels, and the labels.
TABLES = {
    "classes": ("t.tsv", b'text\tlabel\n"""0"""\tpos\n"x"\tneg\n', {}, [('"0"',), ("x",)], "classes", LABELS),
    "pairs": (
        "t.csv",
        b"x,y,label\na,c,pos\nb,d,neg\n",
        {"text": ["x", "y"]},
        [("a", "c"), ("b", "d")],
        "classes",
        LABELS,
    ),
    "numbers": ("t.csv", b"text,price\na,0.5\nb,1\n", {"label": "price"}, A_B, "number", [0.5, 1]),
    "inside of objects": (
        "t.jsonl",
        b'{"x": {"text": "a", "by": {"label": 1}}}\n{"x": {"text": "b", "by": {"label": 0}}}\n',
        {"text": ["x.text"], "label": "x.by.label"},
        A_B,
        "classes",
        ["1", "0"],
    ),
    "lists": (
        "t.jsonl",
        labeled([("a", []), ("b", ["x"]), ("c", ["x", "y"])]),
        {},
        A_B_C,
        "labels",
        [[], ["x"], ["x", "y"]],
    ),
    "columns of 0 and 1": (
        "t.csv",
        OF_COLUMNS,
        {"label": ["rude", "sad", "new"]},
        A_B_C,
        "labels",
        [["sad", "new"], [], ["rude", "new"]],
    ),
    "lists of 0 and 1": ("t.jsonl", labeled(OF_LISTS), {"label": ["label"]}, A_B_C, "labels", [["1", "2"], [], []]),
    "lists of names that are numbers": (
        "t.jsonl",
        labeled([("a", [0, 1]), ("b", [1])]),
        {},
        A_B,
        "labels",
        [["0", "1"], ["1"]],
    ),
    "no header": (
        "t.tsv",
        b"pos\ta\nneg\tb\n",
        {"text": ["2"], "label": "1", "no_header": True},
        A_B,
        "classes",
        LABELS,
    ),
}


NOTES = {
    "columns of 0 and 1": "labels: 3 labels (new, rude, sad), a column of 0 and 1 each",
    "lists of 0 and 1": "label: 2 labels (1, 2), inferred: --kind gives another, named by their places in lists of 0 and 1",
}


@pytest.mark.parametrize("name", TABLES)
def test_rows_with_labels(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What is printed has the first row, and how many there are."""
    file, content, options, texts, kind, labels = TABLES[name]
    path = tmp_path / file
    path.write_bytes(content)
    splits, space, notes = Tables(path, path, **options).check().read()
    train, dev = splits.values()
    assert (train.texts, train.labels, space.kind) == (texts, labels, kind)
    assert notes[0] == NOTES.get(name, notes[0])
    assert (dev.texts, dev.labels) == (texts, labels)
    error = capsys.readouterr().err
    assert f"{path}: the first: {' | '.join(texts[0])} -> {labels[0]}\n" in error
    assert f": {len(texts)} rows\n" in error


# Lines of TSV with quotes -> the texts of their first fields, and whether the quotes are those of CSV.
QUOTES = {
    "as pandas writes them": (['a "b"', '"c"'], ['"a ""b"""\t1', '"""c"""\t0'], True),
    "texts of several lines": (["a\nb", "c"], ['"a\nb"\t1', "c\t0"], True),
    "of speech": (['"Yes," he said', "c"], ['"Yes," he said\t1', "c\t0"], False),
    "one of them closed by a later line": (['"Go', "on", 'home"'], ['"Go\t1', "on\t0", 'home"\t1'], False),
    "never closed": (['"Go', "on"], ['"Go\t1', "on\t0"], False),
    "of CSV in all lines but one": (['"a"', '"b" c'], ['"a"\t1', '"b" c\t0'], False),
}


@pytest.mark.parametrize("name", QUOTES)
def test_quotes_of_tsv_are_those_of_csv_or_ordinary_in_the_whole_file(name: str, tmp_path: Path, capsys) -> None:
    expected, lines, as_csv = QUOTES[name]
    path = tmp_path / "rows.tsv"
    path.write_text("".join(f"{line}\n" for line in ["text\tlabel", *lines]))
    assert [row["text"] for _, row in TableFile(path).rows()] == expected
    assert [document.decode() for document in DocumentFile(path).read()] == [f"{text}\n" for text in expected]
    DocumentFile(path).print_first()
    assert (' whose " are ordinary characters, column' in capsys.readouterr().err) is not as_csv
