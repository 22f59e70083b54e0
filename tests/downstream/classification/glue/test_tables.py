"""Rows of TSV files against lists written by hand and Hugging Face's own reader; errors with file and line."""

import gzip
import hashlib
import lzma
import os
from pathlib import Path

import pytest
from synthetic_glue import EXPECTED, FILES, write_raw_glue

from amos_fairseq.downstream.classification.glue.tables import find_files, read_table
from amos_fairseq.downstream.classification.glue.tasks import TASKS, parse_tasks
from amos_fairseq.errors import UserError

ALL_SPLITS = [(task, split) for task, splits in EXPECTED.items() for split in splits]


@pytest.mark.parametrize(("task", "split"), ALL_SPLITS)
def test_rows_are_those_written_by_hand(raw_glue, task, split):
    expected = EXPECTED[task][split]
    table = read_table(find_files(raw_glue, TASKS[task])[split], TASKS[task], split)
    labelled = not split.startswith("test")
    assert [(*row.texts, row.label) if labelled else row.texts for row in table.rows] == expected.rows
    assert table.broken_lines == expected.broken
    if expected.ids:
        assert [row.id for row in table.rows] == expected.ids


@pytest.mark.parametrize("task", ["CoLA", "SST-2", "STS-B", "MNLI", "QNLI", "RTE", "WNLI"])
def test_hugging_face_reads_the_same(raw_glue, task):
    """transformers' processors take columns by position, we by name. Without MRPC and QQP, whose broken lines they let
    through (MRPC) or skip on their own terms (QQP)."""
    processors = pytest.importorskip("transformers.data.processors.glue", reason="removed from transformers")
    processor = processors.glue_processors[task.lower()]()
    for split, read in (("train", processor.get_train_examples), ("valid", processor.get_dev_examples)):
        examples = ([each.text_a, each.text_b, each.label] for each in read(str(raw_glue / task)))
        theirs = [tuple(part for part in example if part is not None) for example in examples]
        ours = read_table(find_files(raw_glue, TASKS[task])[split], TASKS[task], split).rows
        assert [(*row.texts, row.label) for row in ours] == theirs


@pytest.mark.skipif(not os.environ.get("AMOS_DATA"), reason="AMOS_DATA names no data folder")
@pytest.mark.parametrize("task", ["CoLA", "SST-2", "MRPC", "STS-B", "RTE", "WNLI"])
def test_official_files_have_their_official_rows(task):
    directory = Path(os.environ["AMOS_DATA"]) / "glue"
    files = find_files(directory, TASKS[task])
    assert set(files) == {"train", "valid"}
    for split, path in files.items():
        table = read_table(path, TASKS[task], split)
        assert (len(table.rows), table.broken_lines) == (TASKS[task].official_rows[split], [])


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_compressed_files_are_the_same(raw_glue, tmp_path, suffix, compress):
    content = compress(FILES["QQP/train.tsv"].encode("utf-8"))
    path = tmp_path / f"train.tsv{suffix}"
    path.write_bytes(content)
    table = read_table(path, TASKS["QQP"], "train")
    assert table.rows == read_table(raw_glue / "QQP" / "train.tsv", TASKS["QQP"], "train").rows
    assert table.sha256 == hashlib.sha256(content).hexdigest()


def test_ids_are_row_numbers_where_no_column_has_them(tmp_path):
    """Broken lines keep their numbers: the leaderboard counts every line."""
    path = tmp_path / "test.tsv"
    path.write_text("sentence1\tsentence2\na\tb\nbroken\nc\td\n")
    assert [row.id for row in read_table(path, TASKS["RTE"], "test").rows] == ["0", "2"]


def test_columns_are_found_by_name(tmp_path):
    path = tmp_path / "dev.tsv"
    path.write_text("label\tsentence2\tnew\tsentence1\nentailment\tb\tx\ta\n")
    assert read_table(path, TASKS["RTE"], "valid").rows[0].texts == ("a", "b")


def test_carriage_returns_and_nul_are_replaced(tmp_path):
    """A carriage return ends a line for fairseq; NUL is dropped by one tokenizer and unknown to another."""
    path = tmp_path / "dev.tsv"
    path.write_bytes(b"sentence\tlabel\na\rb\0c\t1\r\n")
    assert read_table(path, TASKS["SST-2"], "valid").rows[0].texts == ("a bc",)


FAULTS = {
    "not UTF-8": (b"sentence\tlabel\ncaf\xe9\t1\n", "line 2, byte 18: not UTF-8"),
    "no header": (b"good\t1\nbad\t0\n", "no column 'sentence' in its first line, which has 'good', '1'"),
    "another task": (b"index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n", "no column 'sentence'"),
    "no label": (b"index\tsentence\n0\tgood\n", "no column 'label'"),
    "label": (b"sentence\tlabel\ngood\t1\nbad\t2\n", "line 3: label '2' is not one of 0, 1"),
    "empty label": (b"sentence\tlabel\ngood\t\n", "line 2: label '' is not one of 0, 1"),
    "empty": (b"", "is empty"),
    "header alone": (b"sentence\tlabel\n", "is empty"),
    "no header in CoLA": (b"sentence\tlabel\ngood\t1\n", "none of its 2 lines has the 4 tab-separated columns"),
    "commas": (b"sentence\tlabel\ngood,1\nbad,0\n", "none of its 2 lines has the 2 tab-separated columns"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_errors_name_file_and_line(tmp_path, name):
    content, message = FAULTS[name]
    task = "CoLA" if name == "no header in CoLA" else "SST-2"
    path = tmp_path / "train.tsv"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_table(path, TASKS[task], "train")
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("score", ["5.001", "-0.1", "nan", "inf", "four", ""])
def test_scores_outside_0_to_5_are_refused(tmp_path, score):
    path = tmp_path / "dev.tsv"
    path.write_text(f"sentence1\tsentence2\tscore\na\tb\t5\na\tb\t{score}\n")
    with pytest.raises(UserError, match=r"line 3: label '.*' is not a number from 0 to 5"):
        read_table(path, TASKS["STS-B"], "valid")


def test_missing_and_duplicate_files(tmp_path):
    write_raw_glue(tmp_path, "RTE", "diagnostic")
    (tmp_path / "RTE" / "dev.tsv").rename(tmp_path / "RTE" / "valid.tsv")
    with pytest.raises(UserError, match=r"RTE/dev.tsv: no such file \(nor as .gz, .xz, .zst\)"):
        find_files(tmp_path, TASKS["RTE"])
    (tmp_path / "RTE" / "dev.tsv.xz").write_bytes(lzma.compress(b""))
    found = {"train": tmp_path / "RTE" / "train.tsv", "valid": tmp_path / "RTE" / "dev.tsv.xz"}
    assert find_files(tmp_path, TASKS["RTE"]) == found
    (tmp_path / "RTE" / "dev.tsv").write_text("")
    with pytest.raises(UserError, match="are the same part of a task: keep one of them"):
        find_files(tmp_path, TASKS["RTE"])
    (tmp_path / "diagnostic").rename(tmp_path / "AX")
    assert find_files(tmp_path, TASKS["AX"]) == {"test": tmp_path / "AX" / "diagnostic.tsv"}
    (tmp_path / "AX" / "diagnostic.tsv").unlink()
    with pytest.raises(UserError, match="no such file"):
        find_files(tmp_path, TASKS["AX"])


def test_names_of_tasks():
    """Those of the average, unless others are known; AX is prepared and not scored."""
    assert parse_tasks("rte, CoLA,RTE") == ["RTE", "CoLA"]
    assert len(parse_tasks("ALL")) == 8
    assert parse_tasks("all", TASKS, TASKS) == list(TASKS)
    with pytest.raises(UserError, match="unknown task 'AX': choose ALL or"):
        parse_tasks("AX")
