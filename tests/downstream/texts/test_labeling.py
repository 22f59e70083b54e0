"""Labels for the rows of a table: one row for each, in order, also where there is no text to label."""

import csv
import datetime
import json
import math
import random
import re
import uuid
from argparse import Namespace
from decimal import Decimal
from pathlib import Path
from unittest import mock

import pytest
from sklearn.metrics import accuracy_score, classification_report, confusion_matrix
from synthetic_glue import open_table, session

import amos_fairseq
from amos_fairseq.downstream.texts.command import main
from amos_fairseq.downstream.texts.labeling import label_table, table_lines
from amos_fairseq.downstream.texts.prepare import NAME
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.table import run_benchmark
from amos_fairseq.inputs.tables import TableFile
from tests.helpers.benchmark_summary import read_results

TEXTS = ["the quick fox", "a lazy dog", "over the end", "jumps and jumps", "brown"]


def trained(start: Path, out: Path, table: Path, **options: object) -> Path:
    """OUT of ``amos classify`` with random weights."""
    assert not run_benchmark(open_table(start, out, table, **options)).failures
    return out


def test_many_labels_are_trained_for_longer(start: Path, tmp_path: Path) -> None:
    """The recipe's 30 updates for each of eight labels are more than its 200."""
    train = tmp_path / "train.tsv"
    train.write_text("text\tlabel\n" + "".join(f"the dog {n}\t{'abcdefgh'[n % 8]}\n" for n in range(40)))
    trial, linear = open_table(start, tmp_path / "out", train, recipe="own_labels").tasks[NAME].trials
    assert trial.min_updates == 240
    assert linear.schedule(40).total_updates == 1


def test_out_is_refused_before_tables_are_converted(start: Path, tmp_path: Path) -> None:
    own_session = session(start, tmp_path / "a:b", NAME, seeds=1)
    args = Namespace(predict=None, tables=None)  # which are not read
    with (
        mock.patch("amos_fairseq.downstream.texts.command.session_from", return_value=own_session),
        pytest.raises(UserError, match="a:b: fairseq separates folders at ':': give a path without it"),
    ):
        main(args)


@pytest.fixture
def results(start, fake_training, tmp_path) -> Path:
    train = tmp_path / "train.tsv"
    train.write_text("text\tlabel\n" + "".join(f"the dog {n}\t{'ab'[n % 2]}\n" for n in range(20)))
    return trained(start, tmp_path / "out", train)


def label(
    results: Path,
    file: Path,
    out: Path,
    texts: list[str] | None = None,
    no_header: bool = False,
    probabilities: bool = False,
) -> int:
    """In parts of three rows."""
    with mock.patch("amos_fairseq.downstream.texts.labeling.ROWS_AT_ONCE", 3):
        return label_table(results, file, out, texts, no_header, probabilities, "cpu")


def test_scores_on_a_test_table_and_calibrated_probabilities(start, fake_training, tmp_path):
    """Predictions, probabilities and tables beside scikit-learn and a naive loop; the training is that of a run without a test
    table."""
    generator = random.Random(2)
    tables = {}
    for split, count in (("train", 40), ("dev", 60), ("test", 80)):
        rows = [
            (" ".join(generator.choices(TEXTS, k=3)) + f" {split} {n}", generator.choice("abc")) for n in range(count)
        ]
        tables[split] = tmp_path / f"{split}.tsv"
        tables[split].write_text("text\tlabel\n" + "".join(f"{text}\t{name}\n" for text, name in rows))
    options = {split: tables[split] for split in ("dev", "test")}
    outcome = run_benchmark(open_table(start, tmp_path / "out", tables["train"], **options))
    (result,) = read_results(tmp_path / "out")
    assert not run_benchmark(open_table(start, tmp_path / "without", tables["train"], dev=tables["dev"])).failures
    assert read_results(tmp_path / "without")[0].identity == result.identity

    found = {}
    for split in ("dev", "test"):
        label(tmp_path / "out", tables[split], tmp_path / f"{split}.jsonl", probabilities=True)
        found[split] = read_jsonl(tmp_path / f"{split}.jsonl")
        with (tmp_path / "out" / result.directory / f"predictions.{split}.tsv").open(newline="") as stream:
            written = list(csv.DictReader(stream, delimiter="\t"))
        assert [row["line"] for row in written] == [str(line) for line in range(2, len(written) + 2)]
        for name in ("prediction", "label", "text"):
            assert [row[name] for row in written] == [row[name] for row in found[split]]
    for row in found["test"]:
        shares = [row[f"probability {name}"] for name in "abc"]
        assert sum(shares) == pytest.approx(1, abs=2e-6)  # they have six digits
        assert row["probability"] == max(shares) == row[f"probability {row['prediction']}"]

    def calibration_error(rows, temperature):
        bins = [[] for _ in range(15)]
        for row in rows:
            powers = [row[f"probability {name}"] ** temperature for name in "abc"]
            share = max(powers) / sum(powers)
            bins[min(int(15 * share), 14)].append(share - (row["prediction"] == row["label"]))
        return 100 * sum(abs(sum(gaps)) for gaps in bins) / len(rows)

    scores = result.scores
    assert scores["temperature"] == pytest.approx(20, rel=0.01)  # labels at random: the flattest that is allowed
    assert scores["ece"] == pytest.approx(calibration_error(found["dev"], 1), abs=1e-3)
    assert scores["ece_before"] == pytest.approx(calibration_error(found["dev"], scores["temperature"]), abs=0.1)

    by_title = {table.title: table for table in outcome.details}
    gold, predicted = ([row[name] for row in found["test"]] for name in ("label", "prediction"))
    expected = classification_report(gold, predicted, output_dict=True, zero_division=0)
    assert by_title["classes of test"].rows == [
        [
            name,
            *(f"{100 * expected[name][score]:.1f}" for score in ("precision", "recall", "f1-score")),
            str(gold.count(name)),
        ]
        for name in "abc"
    ]
    counts = confusion_matrix(gold, predicted).astype(str).tolist()
    assert [row[1:] for row in by_title["label (row) and prediction (column), test"].rows] == counts
    assert by_title["label, test"].rows[0][1] == f"{100 * accuracy_score(gold, predicted):.1f}"
    assert "## classes of test" in (tmp_path / "out" / "classification.md").read_text()


@pytest.mark.parametrize("kind", ["classes", "labels", "number"])
def test_predictions_in_python_are_those_of_the_command(kind, start, fake_training, tmp_path):
    """Of two texts where the label is a number; a text may be too long, or have several lines."""
    value = {"classes": lambda n: "ab"[n % 2], "labels": lambda n: list("abc"[: n % 4]), "number": lambda n: n + 0.5}
    rows = [{"text": f"the {TEXTS[n % 5]} {n}", "second": f"dog {n}", "label": value[kind](n)} for n in range(20)]
    names = ["text", "second"] if kind == "number" else ["text"]
    table = tmp_path / "train.jsonl"
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    results = trained(start, tmp_path / "out", table, text=names)
    rows += [{"text": "dog " * 500, "second": "fox"}, {"text": "a\nfox", "second": "the\r\nend"}]
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    label_table(results, table, tmp_path / "l.jsonl", None, False, kind != "number", "cpu")
    model = amos_fairseq.load(results)
    texts = [tuple(row[name] for name in names) for row in rows]
    with pytest.warns(UserWarning, match=r"^1 of 22 texts are cut to \d+ tokens$"):
        predicted = model.predict([text if len(text) == 2 else text[0] for text in texts])
    for row, found in zip(read_jsonl(tmp_path / "l.jsonl"), predicted, strict=True):
        shares = found.pop("probabilities", {})
        assert {name: row[name] for name in row if name.startswith("pr")} == found | {
            f"probability {name}": share for name, share in shares.items()
        }
        if kind == "labels":
            assert found["prediction"] == [name for name, share in shares.items() if share > 0.5]
    labels = {"classes": "classes (a, b)", "labels": "labels (a, b, c)", "number": "number"}[kind]
    assert re.fullmatch(
        rf"Encoder\(.*/checkpoint_.*\.pt: \d layers of width .*, cpu, {re.escape(labels)}\)", repr(model)
    )
    assert model.predict([]) == []
    blank = (" ", "")[: len(names)] if len(names) == 2 else " "
    full = texts[0] if len(names) == 2 else texts[0][0]
    assert model.predict([blank, full, blank]) == [None, *model.predict([full]), None]
    with pytest.raises(UserError, match=r"text 1: expected (one text|a pair of texts), got|a string or a pair"):
        model.predict([("a", "b", "c")[: 3 - len(names)]])


def read_jsonl(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_csv(file: Path, separator: str = ",") -> list[dict]:
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream, delimiter=separator))


def test_every_row_of_the_table_is_one_of_the_result(results, tmp_path, capsys):
    """The predictions are those of a table without the rows that have none."""
    whole, gaps = tmp_path / "whole.tsv", tmp_path / "gaps.tsv"
    whole.write_text("text\tid\n" + "".join(f"{text}\t{n}\n" for n, text in enumerate(TEXTS)))
    lines = ["broken", "text\tid", "\t7", "\u200b\u00a0\t8", f"{TEXTS[0]}\t0", "one\ttoo\tmany"]
    lines += [f"{text}\t{n + 1}" for n, text in enumerate(TEXTS[1:])] + ["broken"]
    gaps.write_text("text\tid\n" + "".join(f"{line}\n" for line in lines))
    assert label(results, whole, tmp_path / "whole.jsonl") == len(TEXTS)
    expected = [[row["text"], row["prediction"]] for row in read_jsonl(tmp_path / "whole.jsonl")]
    capsys.readouterr()
    assert label(results, gaps, tmp_path / "gaps.jsonl") == len(lines)
    printed = capsys.readouterr().err
    left_out = "2 without text, 4 with another number of columns than the first line, or equal to it"
    assert f"gaps.tsv: 5 rows are labeled; left out: {left_out}\n" in printed
    assert f"gaps.tsv: the first: {TEXTS[0]}\n" in printed
    rows = read_jsonl(tmp_path / "gaps.jsonl")
    ids = [cells[1] if len(cells := line.split("\t")) == 2 else None for line in lines]
    assert [row["id"] for row in rows] == [None if name == "id" else name for name in ids]
    labeled = [row for row in rows if row["prediction"] is not None]
    assert [[row[name] for name in ("text", "prediction")] for row in labeled] == expected
    assert all(row["probability"] is None for row in rows if row["prediction"] is None)
    label(results, gaps, tmp_path / "gaps.csv")
    assert [row["prediction"] or None for row in read_csv(tmp_path / "gaps.csv")] == [row["prediction"] for row in rows]
    label(results, tmp_path / "gaps.csv", tmp_path / "again.csv")
    assert "gaps.csv: its columns prediction, probability get other values in again.csv\n" in capsys.readouterr().err


def test_values_of_json_that_are_no_text(results, tmp_path, capsys):
    """None, a key that is missing, and half of a surrogate pair have no label; a number is a text. JSON has no NaN. A key that
    the last row alone has is a column, which pandas would read too."""
    lines = [
        *['{"text": "the dog"}'] * 150,
        '{"text": null, "id": 1}',
        '{"id": 2}',
        '{"text": "half \\ud83d", "id": 3}',
    ]
    lines += ['{"text": 7, "id": 4, "x": [NaN]}']
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    assert label(results, tmp_path / "t.jsonl", tmp_path / "l.jsonl") == 154
    rows = read_jsonl(tmp_path / "l.jsonl")[150:]
    assert [(row["id"], row["x"]) for row in rows] == [(1, None), (2, None), (3, None), (4, [None])]
    assert [row["prediction"] is None for row in rows] == [True, True, True, False]
    assert "left out: 3 without text\n" in capsys.readouterr().err


def test_tables_without_a_header_and_texts_inside_of_objects(results, tmp_path):
    """The labels of the same texts in a column of their own; the objects stay as they are."""
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "t.tsv").write_text("".join(f"x\t{text}\n" for text in TEXTS))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"meta": {"body": text}}) + "\n" for text in TEXTS))
    with pytest.raises(UserError, match="no column 'text', it has x, the quick fox"):
        label(results, tmp_path / "t.tsv", tmp_path / "l.jsonl")
    found = []
    for name, texts in (("own.jsonl", None), ("t.tsv", ["2"]), ("in.jsonl", ["meta.body"])):
        assert label(results, tmp_path / name, tmp_path / "l.jsonl", texts, no_header=name == "t.tsv") == len(TEXTS)
        found.append(read_jsonl(tmp_path / "l.jsonl"))
    assert [row.pop("text") for row in found[0]] == [row.pop("2") for row in found[1]] == TEXTS
    assert [row.pop("meta")["body"] for row in found[2]] == TEXTS
    assert found[0] == [row for row in found[1] if row.pop("1")] == found[2]


def test_the_header_is_that_of_the_training_table(start, fake_training, tmp_path):
    lines = "".join(f'"the ""dog"" {n}"\t{"ab"[n % 2]}\n' for n in range(20))
    (tmp_path / "t.tsv").write_text(lines)
    results = trained(start, tmp_path / "out", tmp_path / "t.tsv", text=["1"], label="2", no_header=True)
    assert label(results, tmp_path / "t.tsv", tmp_path / "l.jsonl") == 20
    rows = read_jsonl(tmp_path / "l.jsonl")
    assert [row["1"] for row in rows] == [f'the "dog" {n}' for n in range(20)]
    (tmp_path / "new.tsv").write_text("text\tprobability\nthe dog\t1\n")
    with pytest.raises(UserError, match="has no column 'text', it has 1, 2"):
        label(results, tmp_path / "new.tsv", tmp_path / "l.jsonl", ["text"])


HOSTILE = ["plain", "lone\rone", "cr\r\nlf", "line\nend", 'a "quote"', '"quoted"', "tab\tin"]
HOSTILE += ["a,b;c", "", " spaces ", "=1+1", "\u2028\x85"]


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t"), (".jsonl", None)])
def test_tables_are_read_back_by_other_programs(suffix, separator, tmp_path):
    """csv, pandas, pyarrow and the reader of this package have the same rows and columns."""
    pandas, pyarrow_csv = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.csv")
    columns, file = ("a\rb", "c,d", "e"), tmp_path / f"t{suffix}"
    cells = zip(HOSTILE, HOSTILE[::-1], ["x"] * len(HOSTILE), strict=True)
    rows = [dict(zip(columns, row, strict=True)) for row in cells]
    file.write_text("".join(table_lines(suffix, columns, rows)), encoding="utf-8", newline="")
    table = TableFile(file)
    assert table.columns == columns
    assert [row for _, row in table.rows()] == rows
    if separator is None:
        assert [json.loads(line) for line in file.read_bytes().splitlines()] == rows
        return
    assert read_csv(file, separator) == rows
    assert pandas.read_csv(file, sep=separator, keep_default_na=False).to_dict("records") == rows
    options = {"parse_options": pyarrow_csv.ParseOptions(delimiter=separator, newlines_in_values=True)}
    assert pyarrow_csv.read_csv(file, **options).to_pylist() == rows


def test_any_table_is_read_back(tmp_path):
    """By csv and the reader of this package; of a table of one column no line has a tab that tells quotes from texts."""
    generator, file = random.Random(1), tmp_path / "t.tsv"
    pieces = ['"', '""', "\t", "\n", "\r", "\\", "a", " ", "\u2028", "\x85", ",", "\ufeff"]

    def cells(number: int) -> list[str]:
        return ["".join(generator.choices(pieces, k=generator.randrange(5))) for _ in range(number)]

    for number in range(400):
        columns = tuple(dict.fromkeys(["c", *cells(number % 3)]))
        rows = [dict(zip(columns, cells(len(columns)), strict=True)) for _ in range(1 + number % 5)]
        file.write_text("".join(table_lines(".tsv", columns, rows)), encoding="utf-8", newline="")
        table = TableFile(file)
        assert (table.columns, [row for _, row in table.rows()], read_csv(file, "\t")) == (columns, rows, rows)


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
def test_values_of_parquet_that_json_lacks_have_one_form(suffix, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    types = {
        "uint64": (pa.uint64(), 2**64 - 1, 2**64 - 1),
        "binary": (pa.binary(), "caf\u00e9".encode(), "caf\u00e9"),
        "uuid": (pa.uuid(), uuid.UUID(int=7).bytes, str(uuid.UUID(int=7))),
        "day": (pa.date32(), datetime.date(2026, 1, 2), "2026-01-02"),
        "nanoseconds": (pa.timestamp("ns"), 1, "1970-01-01 00:00:00.000000001"),
        "unknown zone": (pa.timestamp("ms", "Mars/Base"), 1, "1970-01-01 00:00:00.001Z"),
        "time": (pa.time64("ns"), 1, "00:00:00.000000001"),
        "decimal": (pa.decimal128(9, 2), Decimal("1.50"), "1.50"),
        "nan": (pa.float64(), math.nan, None),
        "infinite": (pa.float64(), -math.inf, "-Infinity"),
        "dictionary": (pa.dictionary(pa.int8(), pa.string()), "x", "x"),
        "list": (pa.list_(pa.float64()), [1.5, math.nan], [1.5, None]),
        "struct": (pa.struct({"n": pa.decimal128(9, 2)}), {"n": Decimal("1.50")}, {"n": "1.50"}),
        "map": (pa.map_(pa.string(), pa.int64()), [("k", 1)], [["k", 1]]),
    }
    columns = {name: pa.array([value, None], kind) for name, (kind, value, _) in types.items()}
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    table, file = TableFile(tmp_path / "t.parquet"), tmp_path / f"t{suffix}"
    lines = table_lines(suffix, table.columns, (row for _, row in table.rows()))
    file.write_text("".join(lines), encoding="utf-8", newline="")
    values, nones = (row for _, row in TableFile(file).rows())
    for name, (*_, expected) in types.items():
        if suffix != ".jsonl" and expected is not None:
            expected = json.dumps(expected) if isinstance(expected, list | dict) else str(expected)
        assert (values[name] or None, nones[name] or None) == (expected, None), name
