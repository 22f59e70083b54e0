"""What ``amos classify`` makes of a table: columns, kinds of labels, dev rows, counts, and files, by hand."""

import csv
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from fairseq.data import Dictionary
from saved_models import small_tokenizer

from amos_fairseq.downstream.texts.dataset import LabeledTexts, read_targets, read_task_record
from amos_fairseq.downstream.texts.prepare import write_tables
from amos_fairseq.errors import UserError
from amos_fairseq.inputs.input_files import TableFile
from amos_fairseq.inputs.rows import Tables, find_columns, read_rows, split_off_dev


def write_csv(path: Path, header: list[str], rows: list[tuple]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read(path: Path, content: str, **options: object) -> tuple:
    """Return what ``amos classify`` reads of a table: rows to train and to score on, labels, notes."""
    path.write_text(content, encoding="utf-8")
    return Tables(path, **options).with_columns().read()


def table(labels: list[str], header: str = "text\tlabel\n") -> str:
    """TSV of different texts with these labels."""
    return header + "".join(f"text {number} .\t{label}\n" for number, label in enumerate(labels))


def prepared(tmp_path: Path, tables: Tables) -> tuple[Path, dict]:
    directory = tmp_path / "prepared"
    directory.mkdir(parents=True)
    write_tables(directory, tables, small_tokenizer(), {})
    return directory, read_task_record(directory)


@pytest.mark.parametrize(
    ("header", "texts", "label", "expected"),
    [
        ("premise,hypothesis,label", None, None, (("premise", "hypothesis"), "label")),
        ("a,b", None, "b", (("a",), "b")),
        ("text,label,class", ["class"], "text", (("class",), "text")),
        ("a,b,c", ["a", "b"], None, (("a", "b"), "c")),
        ("text_a,text_b,label", None, None, (("text_a", "text_b"), "label")),
        ("a,b,label", None, None, r"which column is the text is not clear: give --text with one or two of a, b \(or"),
        ("a,b,c", ["a"], None, "which column is the label is not clear"),
        ("a,b,c", ["x"], "c", "has no column 'x': give --text with one of a, b, c"),
        ("a,b,c", ["a"], "a", "not that of the label"),
    ],
)
def test_columns(header, texts, label, expected, tmp_path):
    table = TableFile(write_csv(tmp_path / "t.csv", header.split(","), [tuple("x" * 3)]))
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            find_columns(table, texts, label)
        return
    assert find_columns(table, texts, label) == expected


def test_classes_with_all_that_is_counted(tmp_path):
    train = [("good .", "pos"), ("bad .", "neg"), ("good .", "neg"), ("", "pos"), ("bad .", ""), ("so so .", "10")]
    train += [("so so so .", "9")]
    dev = [("bad .", "neg"), ("new .", "other"), ("new\nline .", "pos"), (" ", "pos"), ("old .", "other")]
    files = [write_csv(tmp_path / name, ["text", "label"], rows) for name, rows in (("a.csv", train), ("b.csv", dev))]
    directory, record = prepared(tmp_path, Tables(*files, ("text",), "label"))
    assert (record["kind"], record["labels"], record["num_classes"]) == ("classes", ["10", "9", "neg", "pos"], 4)
    assert read_targets(directory, "train", record).tolist() == [3, 2, 2, 0, 1]
    assert read_targets(directory, "valid", record).tolist() == [2, -1, 3, -1]
    # The third row takes two lines of the file.
    assert (directory / "valid.ids").read_text().split() == ["2", "3", "4", "7"]
    for note in (
        "a.csv: 1 training rows without text are left out",
        "a.csv: 1 training rows without label are left out",
        "a.csv: 1 training rows repeat the text of an earlier row; 1 texts have different labels",
        "b.csv: 1 of 4 dev rows have a text that trains too: the scores may be too high",
        "b.csv: 2 dev rows with labels that no training row has are counted as wrong: other",
    ):
        assert note in record["notes"]
    tokenizer = small_tokenizer()
    dictionary = Dictionary.load(str(directory / "tokenizer" / "dict.txt"))
    rows = LabeledTexts(directory, "valid", record, 30)
    expected = [dictionary.index(piece) for piece in tokenizer.encode("new line .")]
    assert rows[2]["tokens"].tolist() == [0, *expected, 2]


def test_several_labels(tmp_path):
    """Lists, and a column in which a separator divides them; a row without labels is a row, and dev may have others."""
    lists = [{"text": f"row {i}", "tags": tags} for i, tags in enumerate([["b", "a"], [], ["b", "b"], None])]
    (tmp_path / "l.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists), encoding="utf-8")
    texts = [(f"row {i}", tags) for i, tags in enumerate(["b; a", "", "b;b", ""])]
    csv_file = write_csv(tmp_path / "l.csv", ["text", "tags"], texts)
    dev = write_csv(tmp_path / "d.csv", ["text", "tags"], [("row", "c;b"), ("line", "c")])
    train = [[1, 1], [0, 0], [0, 1], [0, 0]]
    for tables, valid in (
        (Tables(tmp_path / "l.jsonl", tmp_path / "l.jsonl", ("text",), "tags"), train),
        (Tables(csv_file, dev, ("text",), "tags", "labels", ";"), [[0, 1], [0, 0]]),
    ):
        directory, record = prepared(tmp_path / tables.train.suffix, tables)
        assert (record["kind"], record["labels"]) == ("labels", ["a", "b"])
        targets = read_targets(directory, "train", record)
        assert (targets.dtype, targets.tolist()) == (bool, train)
        assert read_targets(directory, "valid", record).tolist() == valid


def test_numbers_keep_their_values(tmp_path):
    values = [0.1, -2.0, 1e6, 1 / 3]
    rows = [("same", f"text {i}", repr(value)) for i, value in enumerate(values)]
    file = write_csv(tmp_path / "n.csv", ["a", "b", "price"], rows)
    directory, record = prepared(tmp_path, Tables(file, file, ("a", "b"), "price"))
    assert read_targets(directory, "train", record).tolist() == values
    mean = sum(values) / 4
    assert record["mean"] == pytest.approx(mean)
    assert record["deviation"] == pytest.approx(math.sqrt(sum((value - mean) ** 2 for value in values) / 4))
    assert (directory / "input1" / "train.bin").is_file()


def test_whole_numbers_of_a_table_with_a_gap_are_the_same_classes(tmp_path):
    """pandas writes 0.0 and 1.0 where a label is missing, 0 and 1 elsewhere."""
    train, dev = ([(f"text {i}", label) for i, label in enumerate(own)] for own in (["0.0", "1.0", ""], ["1", "0"]))
    files = [write_csv(tmp_path / name, ["text", "label"], rows) for name, rows in (("a.csv", train), ("b.csv", dev))]
    directory, record = prepared(tmp_path, Tables(*files, ("text",), "label"))
    assert record["labels"] == ["0", "1"]
    assert read_targets(directory, "valid", record).tolist() == [1, 0]


def test_dev_rows_are_a_tenth_and_share_no_text(tmp_path):
    rows = [(f"text {i % 150}", "ab"[i % 2]) for i in range(200)]
    read = read_rows(write_csv(tmp_path / "t.csv", ["text", "label"], rows), ("text",), "label")
    train, dev = split_off_dev(read)
    assert 19 <= len(dev) <= 20
    assert not set(train.texts) & set(dev.texts)
    assert Counter(train.ids + dev.ids) == Counter(read.ids)
    assert [part.ids for part in split_off_dev(read)] == [train.ids, dev.ids]
    with pytest.raises(UserError, match="has 2 different texts, too few to choose dev texts: give --dev"):
        split_off_dev(read.choose([0, 1]))


@pytest.mark.parametrize(
    ("kind", "labels", "message"),
    [
        (None, ["a", "a"], "each row has the label a"),
        ("number", ["1", "inf"], "line 3, column label: the label 'inf' is not a finite number"),
        (None, [f"name {i}" for i in range(60)], "the 60 labels have 60 different values"),
        ("labels", [",", ","], "no row has a label"),
        ("number", ["1700000000.5", "1700000001.5"], "which float32 does not tell apart: subtract a constant"),
        ("number", ["1", "2e300"], "line 3, .* is larger than"),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(kind, labels, message, tmp_path):
    file = write_csv(tmp_path / "t.csv", ["text", "label"], [(f"text {i}", label) for i, label in enumerate(labels)])
    with pytest.raises(UserError, match=message):
        prepared(tmp_path, Tables(file, file, ("text",), "label", kind))


NOTED = [
    (["a", "b", "\\N"] * 8, "2 classes (a, b)", "8 training rows without label (\\N) are left out"),
    (["1", "2", "nan", ""] * 6, "2 classes (1, 2)", "12 training rows without label (nan) are left out"),
    ([*["1.5", "2.5"] * 6, "NA"], "numbers of mean 2", "1 training rows without label (NA) are"),
    (["pro", "None"] * 6, "2 classes (None, pro)", "rows have the label None, read as a name"),
    (["a", "b"] * 6 + ["a\ntext\tlabel"], "2 classes (a, b)", "1 training rows that repeat the names of"),
    (['["a", "b"]', "[]", '["b"]', ""] * 4, "2 labels (a, b)", "training rows have no label"),
    (["good", "bad"] * 6 + ["god"], "3 classes (bad, god, good)", "1 classes with one training row: god"),
    (["Good", "bad", "good"] * 6, "3 classes (Good, bad, good)", "classes differ in their spelling alone: Good, good"),
    (["caf\u00e9", "cafe\u0301"] * 6, "2 classes", "2 classes differ in their spelling alone"),
    (["a,b", "b"] * 6, "2 classes ('a,b', b), inferred (--kind labels", None),
]


@pytest.mark.parametrize(("labels", "space", "note"), NOTED)
def test_what_is_inferred_and_left_out_is_noted(labels, space, note, tmp_path):
    *_, notes = read(tmp_path / "t.tsv", table(labels))
    assert notes[0].startswith(f"label: {space}")
    others = [other for other in notes[1:] if "chosen at random" not in other]
    assert any(note in other for other in others) if note else not others, notes


def test_quotes_of_tsv_are_counted(tmp_path):
    """Every line is a row; with the quotes of CSV the same file has others, which is said with the number of such rows."""
    content = table(["a", "b"] * 6) + '"one, two\ta\nthree"\tb\n"four"\ta\n'
    train, dev, _, notes = read(tmp_path / "t.tsv", content)
    assert len(train) + len(dev) == 15
    begins = "t.tsv: 2 training rows have a field that begins with a quote, an ordinary character"
    assert any(begins in note for note in notes)
    *_, notes = read(tmp_path / "t.tsv", content.replace('\ta\nthree"', ' three"'), csv_quotes=True)
    assert not any("quote" in note for note in notes)


def test_a_list_may_have_missing_labels(tmp_path):
    lines = enumerate([["a", None], [], ["b", "nan"], ["a"]])
    content = "".join(json.dumps({"text": f"text {number}", "tags": tags}) + "\n" for number, tags in lines)
    (tmp_path / "d.jsonl").write_text(content)
    train, _, space, notes = read(tmp_path / "t.jsonl", content, dev=tmp_path / "d.jsonl")
    assert (space.names, train.labels) == (["a", "b"], [["a"], [], ["b"], ["a"]])
    assert "t.jsonl: 1 training rows have no label" in notes
    assert "t.jsonl: 2 training rows have a list with labels that are missing or there twice" in notes


REFUSED = [
    ("<!DOCTYPE html>\n<html>\n<body>Log in</body>\n", {}, "is no plain text: its first lines begin with tags"),
    (table(["Sport", '{"choices": ["Sport", "News"]}'] * 6), {}, "is JSON among names"),
    (
        table(["good", "bad\u200b"] * 6),
        {},
        "line 3, column label: the label 'bad\\u200b' has the invisible character U+",
    ),
    (table([f"{number / 8}%" for number in range(60)]), {}, "the labels have commas, spaces or %, such as '0.0%'"),
    (
        "text\tlabel\n" + "1\ttext\ta\n" * 9,
        {},
        "none of its 9 lines has the 2 tab-separated columns of the first line (t",
    ),
    ("text\ttoxic\tobscene\n" + "words\t0\t1\n" * 9, {}, "a list of those that are 1) of toxic, obscene (or"),
    (table(["['a', 'b']", "['a']"] * 6), {}, "labels such as ['a', 'b'] are no lists of JSON"),
    (table(["a", "b"] * 6), {"no_header": True, "text": ["1"], "label": "2"}, "remove --no-header"),
    (table(["a", "b"] * 6, header=""), {}, "with one or two of text 0 ., a (or --no-header, if the first line"),
    ("text,label\na,b\n", {}, "has the one column 'text,label', of texts or of labels: tabs have to"),
    (table(["", "nan", "\\N"] * 4), {}, "no row has a label"),
    (table(["a", "b"] * 6), {"label": "lable"}, "no column 'lable': give --label with one of text, label"),
]


@pytest.mark.parametrize(("content", "options", "message"), REFUSED)
def test_tables_that_are_refused(content, options, message, tmp_path):
    with pytest.raises(UserError) as error:
        read(tmp_path / "t.tsv", content, **options)
    assert "t.tsv" in str(error.value)
    assert message in str(error.value)


# Each dev row would be wrong. Models compute numbers in float32, and their squares have to be finite.
REFUSED_DEV = [
    (["0", "1"], table(["-1", "-1"]), "d.tsv: no training row has any of its labels (-1; in training: 0, 1)"),
    (["0", "1"], '{"body": "a", "label": "b"}\n', "d.tsv has no column 'text': it has body, label"),
    (["0.5", "1.5"], table(["1.5", "1e31"]), "d.tsv, line 3, column label: the label 1e+31 is larger than 1e+30"),
    (["0.5", "1.5"], table(["1.5", "1e999"]), "d.tsv, line 3, column label: the label '1e999' is not a finite number"),
]


@pytest.mark.parametrize(("labels", "dev", "message"), REFUSED_DEV)
def test_dev_rows_that_are_refused(labels, dev, message, tmp_path):
    (tmp_path / "d.tsv").write_text(dev)
    with pytest.raises(UserError, match=re.escape(message)):
        read(tmp_path / "t.tsv", table(labels * 6), dev=tmp_path / "d.tsv")


def test_a_class_may_have_the_name_of_a_column(tmp_path):
    """It is no header if other rows have it."""
    train, dev, space, _ = read(tmp_path / "t.tsv", table(["score", "b"] * 6, header=""), no_header=True, label="2")
    assert (space.names, len(train) + len(dev)) == (["b", "score"], 12)


def test_columns_that_are_not_read_are_named(tmp_path, capsys):
    rows = [(f"head {number}", f"text {number}", "ab"[number % 2]) for number in range(12)]
    Tables(write_csv(tmp_path / "t.csv", ["title", "text", "category"], rows)).with_columns()
    assert capsys.readouterr().err.endswith("t.csv: text: text; label: category; not read: title\n")


def test_rows_that_show_no_text_are_left_out(tmp_path):
    """Blank for an editor, or half of a surrogate pair; the same in a pair of texts is one text that is empty."""
    texts = ["\u00a0", "\u3000", "\u200b", "\ufeff", "half \ud83d", None, "nan", *(f"text {n}" for n in range(12))]
    lines = [{"text": text, "label": number % 2} for number, text in enumerate(texts)]
    train, dev, _, notes = read(tmp_path / "t.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert sorted(train.texts + dev.texts) == sorted((text,) for text in texts[7:])
    assert "t.jsonl: 7 training rows without text (nan) are left out" in notes
    pairs = [{"text1": text, "text2": "x", "label": number % 2} for number, text in enumerate(texts)]
    train, dev, _, notes = read(tmp_path / "t.jsonl", "".join(json.dumps(pair) + "\n" for pair in pairs))
    assert (train.texts + dev.texts).count(("", "x")) == 7
    assert any("pairs have one empty text" in note for note in notes)


@pytest.mark.parametrize(
    ("cells", "place"),
    [
        ([b"neg", b"p\xf6s"] * 6, "row 2: the value of label cannot be read .*utf-8"),
        ([{"a": 1}, {"a": 2}] * 6, "line 1, column label: the label is an object, or a list of lists"),
        ([[("a", 1)], [("b", 2)]] * 6, "line 1, column label: the label is an object, or a list of lists"),
        ([[["a"]], [["b"]]] * 6, "line 1, column label: the label is an object, or a list of lists"),
    ],
)
def test_cells_of_parquet_that_are_no_label(cells, place, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kind = pa.map_(pa.string(), pa.int64()) if isinstance(cells[0], list) and isinstance(cells[0][0], tuple) else None
    columns = {"text": [f"text {number}".encode() for number in range(12)], "label": pa.array(cells, kind)}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=place):
        Tables(tmp_path / "t.parquet").with_columns().read()
    with pytest.raises(UserError, match=r"t\.parquet, line 1: label is a list or an object: give a column of|row 2"):
        read_rows(tmp_path / "t.parquet", ["label"], "text")


def test_bytes_are_texts_and_names(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"caf\u00e9 {number}" for number in range(12)]
    columns = {"text": [text.encode() for text in texts], "image": [b"\xff"] * 12}
    columns["label"] = ["n\u00f6".encode(), b"ja"] * 6
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    train, dev, space, _ = Tables(tmp_path / "t.parquet").with_columns().read()
    assert sorted(train.texts + dev.texts) == sorted((text,) for text in texts)
    assert space.names == ["ja", "n\u00f6"]


def test_a_text_that_no_model_reads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("amos_fairseq.inputs.rows.MOST_CHARACTERS", 1000)
    with pytest.raises(UserError, match=r"t\.tsv, line 3: text has 1,001 characters: cut it to 1,000 or fewer"):
        read(tmp_path / "t.tsv", f"text\tlabel\n{'x' * 1000}\ta\n{'x' * 1001}\tb\n")
