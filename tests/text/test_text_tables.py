"""amos prepare text of tables: the documents of the same text as JSON lines, and inputs that are folders."""

import csv
from pathlib import Path

import pytest
from synthetic_corpus import DOCUMENTS, write_jsonl

from amos_fairseq.errors import UserError
from amos_fairseq.text.input_files import files_of
from amos_fairseq.text.split import SplitSettings, split_corpus

ROWS = [{"id": n, "body": "\r\n".join(document)} for n, document in enumerate(DOCUMENTS)]
# In the middle, so that the numbers of documents behind them are tested too.
ROWS[100:100] = [{"id": -1, "body": ""}, {"id": -1, "body": " \n\0\n"}]


def write_separated(path: Path) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, ["id", "body"], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_parquet(path: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    rows = [row | {"body": row["body"] or None} for row in ROWS]
    pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), path)
    return path


def write_folder(path: Path) -> Path:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(path, num_shards=2)
    return path


WRITE = {"t.csv": write_separated, "t.tsv": write_separated, "t.parquet": write_parquet, "folder": write_folder}


def content_of_split(path: Path, directory: Path, **columns: object) -> dict[str, bytes]:
    directory.mkdir()
    sizes_of_parts = {"shard_bytes": 32_000, "valid_bytes": 9999, "sample_bytes": 9999}
    settings = SplitSettings(seed=1, valid_share=0.1, **sizes_of_parts, **columns)
    sizes: list[int] = []
    split = split_corpus([path], directory, settings, sizes.append)
    assert split.documents == [len(DOCUMENTS)]
    assert sum(sizes) == sum(file.stat().st_size for file in files_of(path))
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("name", WRITE)
def test_each_row_is_a_document(tmp_path, name):
    """As each object of JSON lines with a field "text" is."""
    expected = content_of_split(write_jsonl(tmp_path / "text.jsonl", DOCUMENTS), tmp_path / "expected")
    path = WRITE[name](tmp_path / name)
    assert content_of_split(path, tmp_path / "split", text_column="body", csv_quotes=True) == expected


def test_rows_that_are_left_out_are_counted(tmp_path, capsys):
    path = tmp_path / "t.tsv"
    path.write_text("text\tlabel\none\t1\ntwo\nthree\t3\nfour\n")
    (tmp_path / "split").mkdir()
    settings = SplitSettings(seed=1, shard_bytes=99, valid_share=0.5, valid_bytes=99, sample_bytes=99)
    split = split_corpus([path], tmp_path / "split", settings, lambda size: None)
    assert split.documents == [2]
    assert "t.tsv: 2 of its rows, the first in line 3, do not have the 2 columns" in capsys.readouterr().err


def test_values_that_are_no_text(tmp_path):
    (tmp_path / "split").mkdir()
    settings = SplitSettings(seed=1, shard_bytes=99, valid_share=0.5, valid_bytes=99, sample_bytes=99, text_column="id")
    with pytest.raises(UserError, match=r"t.parquet, row 1: id is 0, not a text"):
        split_corpus([write_parquet(tmp_path / "t.parquet")], tmp_path / "split", settings, lambda size: None)


FAULTS = (
    ("t.csv", b"a,b\n1,2\n", [], "no column 'text', it has 'a', 'b'"),
    ("u.csv", b"a,b\n1,2\n", ["--text-column", "c"], "no column 'c', it has 'a', 'b'"),
    ("t.txt", b"a\n\nb\n", ["--text-column", "a"], "no input has columns"),
    ("t.jsonl", b'{"text": "a"}\n', ["--text-column", "b"], 'not a JSON object with a string "b"'),
    ("v.csv", b"text,b\n,2\n", [], "contains no text in text"),
)


def test_bad_tables_are_one_line(tmp_path, refused):
    for name, content, flags, message in FAULTS:
        (tmp_path / name).write_bytes(content)
        assert message in refused(tmp_path / name, *flags, "--out", tmp_path / "out"), name
        assert not (tmp_path / "out").exists()
