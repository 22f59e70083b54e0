"""What ``amos classify`` makes of a table: columns, kinds of labels, dev rows, counts, and files, by hand."""

import csv
import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fairseq.data import Dictionary
from saved_models import small_tokenizer
from sklearn.model_selection import train_test_split

from amos_fairseq.downstream.texts.dataset import LabeledTexts, read_targets, read_task_record
from amos_fairseq.downstream.texts.prepare import write_tables
from amos_fairseq.errors import UserError
from amos_fairseq.inputs.rows import LabeledRows, Tables, read_rows, split_off_dev


def write_csv(path: Path, header: list[str], rows: list[tuple]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def read(path: Path, content: str, **options: object) -> tuple:
    """Return what ``amos classify`` reads of a table: rows to train and to score on, labels, notes."""
    path.write_text(content, encoding="utf-8")
    splits, space, notes = Tables(path, **options).check().read()
    return *splits.values(), space, notes


def table(labels: list[str], header: str = "text\tlabel\n") -> str:
    """TSV of different texts with these labels."""
    return header + "".join(f"text {number} .\t{label}\n" for number, label in enumerate(labels))


def prepared(tmp_path: Path, tables: Tables) -> tuple[Path, dict]:
    directory = tmp_path / "prepared"
    directory.mkdir(parents=True)
    write_tables(directory, tables, small_tokenizer(), {})
    return directory, read_task_record(directory)


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
    """Lists, also with missing labels, and a column in which a separator divides them; rows without labels."""
    lists = [{"text": f"row {i}", "tags": tags} for i, tags in enumerate([["b", "a"], [], ["b", None, "b", ""], None])]
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


@pytest.mark.parametrize(("number", "wanted"), [(20, 4), (200, 40), (300, 50), (900, 90)])
def test_dev_rows_are_a_tenth_of_many_and_share_no_text(number, wanted, tmp_path):
    """Of few a fifth, up to 50."""
    rows = [(f"text {i % (number * 3 // 4)}", "ab"[i % 2]) for i in range(number)]
    read = read_rows(write_csv(tmp_path / "t.csv", ["text", "label"], rows), ("text",), "label")
    train, dev = split_off_dev(read, "classes")
    assert wanted - 1 <= len(dev) <= wanted
    assert not set(train.texts) & set(dev.texts)
    assert Counter(train.ids + dev.ids) == Counter(read.ids)
    assert [part.ids for part in split_off_dev(read, "classes")] == [train.ids, dev.ids]


def test_dev_rows_keep_the_shares_of_classes():
    """Within a row those of scikit-learn's stratified split, but one of a rare class; a class never loses all of its rows."""
    sizes = {"a": 203, "b": 120, "c": 61, "d": 12, "rare": 3, "single": 1}
    labels = [name for name, size in sizes.items() for _ in range(size)]
    rows = LabeledRows("t.tsv", "", [""] * 400, [(str(n // 2 if n < 20 else n),) for n in range(400)], labels)
    train, dev = split_off_dev(rows, "classes")
    _, theirs = train_test_split(labels[:-1], test_size=50, stratify=labels[:-1], random_state=1)
    ours, theirs = Counter(dev.labels), Counter(theirs)
    assert (len(dev), ours["rare"], ours["single"], theirs["rare"]) == (50, 1, 0, 0)
    assert all(abs(ours[name] - theirs[name]) <= 1 for name in sizes)
    assert set(train.labels) == set(sizes)
    many = LabeledRows("t.tsv", "", [""] * 100, [(str(n),) for n in range(100)], [str(n // 2) for n in range(100)])
    train, dev = split_off_dev(many, "classes")
    assert (len(dev), len(set(train.labels))) == (20, 50)
    with pytest.raises(UserError, match="of 100 classes, too few to choose dev texts: give another --label"):
        split_off_dev(dataclasses.replace(many, labels=[str(n) for n in range(100)]), "classes")
    _, dev = split_off_dev(many, "number")  # without regard to labels
    assert [int(text) for (text,) in dev.texts] == sorted(np.random.default_rng(1).permutation(100)[:20])


NOTED = [
    (["Pos", "pos", "neg"] * 6, "3 classes (Pos, neg, pos)", "names that differ only in case: Pos, pos"),
    (["a", "b", ""] * 8, "2 classes (a, b), inferred", "8 training rows without label are left out"),
    (["1", "2", "nan", ""] * 6, "3 classes (1, 2, nan)", "6 training rows without label are left out"),
    (["1.5", "2.5"] * 6, "numbers of mean 2", None),
    (["good", "bad"] * 6 + ["god"], "3 classes (bad, god, good)", None),
    (["a,b", "b"] * 6, "2 classes ('a,b', b), inferred", None),
]


@pytest.mark.parametrize(("labels", "space", "note"), NOTED)
def test_what_is_inferred_and_left_out_is_noted(labels, space, note, tmp_path):
    *_, notes = read(tmp_path / "t.tsv", table(labels))
    assert notes[0].startswith(f"label: {space}"), notes
    others = [other for other in notes[1:] if "chosen at random" not in other and "dev rows of each" not in other]
    assert any(note in other for other in others) if note else not others, notes


def test_rows_that_show_no_text_are_left_out(tmp_path):
    """Blank for an editor, or half of a surrogate pair; the same in a pair of texts is one text that is empty."""
    texts = ["\u00a0", "\u3000", "\u200b", "\ufeff", "half \ud83d", None, math.nan, *(f"text {n}" for n in range(12))]
    lines = [{"text": text, "label": number % 2} for number, text in enumerate(texts)]
    train, dev, _, notes = read(tmp_path / "t.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert sorted(train.texts + dev.texts) == sorted((text,) for text in texts[7:])
    assert "t.jsonl: 7 training rows without text are left out" in notes
    pairs = [{"text1": text, "text2": "x", "label": number % 2} for number, text in enumerate(texts)]
    content = "".join(json.dumps(pair) + "\n" for pair in pairs)
    train, dev, _, _ = read(tmp_path / "t.jsonl", content, text=["text1", "text2"])
    assert (train.texts + dev.texts).count(("", "x")) == 7


def test_bytes_are_texts_and_names(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"caf\u00e9 {number}" for number in range(12)]
    columns = {"text": [text.encode() for text in texts], "image": [b"\xff"] * 12}
    columns["label"] = ["n\u00f6".encode(), b"ja"] * 6
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    splits, space, _ = Tables(tmp_path / "t.parquet").check().read()
    train, dev = splits.values()
    assert sorted(train.texts + dev.texts) == sorted((text,) for text in texts)
    assert space.names == ["ja", "n\u00f6"]
    with pytest.raises(UserError, match=r"is damaged or not what its name says .*utf-8"):
        Tables(tmp_path / "t.parquet", label="image").check().read()


def test_labels_that_are_written_in_another_way_on_dev(tmp_path):
    for split, labels in (("train", ["TRUE", "FALSE"]), ("dev", ["True", "False"])):
        (tmp_path / f"{split}.tsv").write_text(table(labels * 20))
    with pytest.raises(UserError, match="its labels are False, True, but those of training FALSE, TRUE: write both"):
        Tables(tmp_path / "train.tsv", tmp_path / "dev.tsv").check().read()
