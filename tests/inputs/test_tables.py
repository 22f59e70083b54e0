"""Rows of every kind of table against what Python's csv and json, pyarrow and datasets wrote; errors with file and line."""

import csv
import io
import json
from pathlib import Path

import pytest
import zstandard
from synthetic_corpus import write_jsonl

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import FORMS
from amos_fairseq.inputs.documents import DocumentFile
from amos_fairseq.inputs.files import CSV, FOLDER, PARQUET, TSV, files_of
from amos_fairseq.inputs.tables import TableFile

HOSTILE = [
    ["plain", "1"],
    ['She said "hi".', "2"],
    ['"quoted"', ""],
    ["a,b;c", "three; four, five"],
    ["line\nend", "\n"],
    ["carriage\r\nreturn", "lone\rone"],
    ["tab\tinside", "\t"],
    ["\U0001f600 \u4e2d\u6587 na\u00efve \u2028 \x85 \x1c", "\ufeffmark"],
    ["", "=1+1"],
    [" spaces ", '""'],
    ["long " * 50_000, "above the usual limit of csv"],
]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def values(table: TableFile) -> list[list[object]]:
    return [list(row.values()) for _, row in table.rows()]


@pytest.mark.parametrize(("kind", "separator", "mark"), [(CSV, ",", "\ufeff"), (CSV, ",", ""), (TSV, "\t", "")])
def test_hostile_texts_survive(tmp_path, kind, separator, mark):
    """Python's csv writes them, as pandas does. NUL is removed."""
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=separator).writerows([["text", "label"], *HOSTILE, ["N\0UL", "\0"]])
    path = written(tmp_path / f"table.{kind.lower()}", f"{mark}{stream.getvalue()}".encode())
    sizes: list[int] = []
    table = TableFile(path, on_read=sizes.append)
    assert (table.kind, table.columns) == (kind, ("text", "label"))
    assert values(table) == [*HOSTILE, ["NUL", ""]]
    assert table.broken_lines == []
    assert sum(sizes) == path.stat().st_size
    as_json = write_jsonl(tmp_path / "t.jsonl", [*((text,) for text, _ in HOSTILE), ("NUL",)])
    assert list(DocumentFile(path).read()) == list(DocumentFile(as_json).read())


def test_hostile_texts_survive_in_json(tmp_path):
    rows = [{"text": text, "n": n, "x": [n, None, True, {"a": "b\0"}]} for n, (text, _) in enumerate(HOSTILE)]
    lines = [json.dumps(row, ensure_ascii=bool(n % 2)) for n, row in enumerate(rows)]
    table = TableFile(written(tmp_path / "t.jsonl", "\r\n\n".join(lines).encode("utf-8")))
    assert table.columns == ("text", "n", "x")
    assert list(table.rows()) == [(2 * n + 1, row | {"x": [n, None, True, {"a": "b"}]}) for n, row in enumerate(rows)]


def test_half_of_a_surrogate_pair_is_no_value(tmp_path):
    """Also in a list; a key with one is left out, and NaN is no value either."""
    lines = [b'{"a": "x\\ud83d", "b": ["y", "\\udc00"], "\\ud83d": 1}', b'{"a": "\\ud83d\\ude00", "b": NaN}']
    table = TableFile(written(tmp_path / "t.jsonl", b"\n".join(lines)))
    assert values(table) == [[None, ["y", None]], ["\U0001f600", None]]


def test_numbers_are_those_of_the_first_line_of_a_row(tmp_path):
    table = TableFile(written(tmp_path / "t.csv", b'a,b\n"1\n\n2",3\n4,5\n6\n\n7,8\n'))
    assert [number for number, _ in table.rows()] == [2, 5, 8]
    assert table.broken_lines == [6]
    table = TableFile(written(tmp_path / "t.csv", b"a\n1\n\n3\n"))
    assert list(table.rows()) == [(2, {"a": "1"}), (3, {"a": ""}), (4, {"a": "3"})]


@pytest.mark.parametrize(("name", "content"), [("t.tsv", b'a "\tb\nc\td\n'), ("t.csv", b'"a ""\n",b\nc,d\n')])
def test_files_without_header(tmp_path, name, content):
    table = TableFile(written(tmp_path / name, content), header=False)
    first, second = (row for _, row in table.rows())
    assert table.columns == ("1", "2")
    assert (first["2"], second) == ("b", {"1": "c", "2": "d"})


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """What datasets writes: a Parquet file and a folder of two files with the same rows, a folder of splits; and the rows."""
    datasets = pytest.importorskip("datasets")
    classes = datasets.ClassLabel(names=["no", "yes"])
    types = {"text": "string", "score": "float64", "number": "int32", "words": [datasets.Value("string")]}
    types = {name: datasets.Value(kind) if isinstance(kind, str) else kind for name, kind in types.items()}
    features = datasets.Features(
        types | {"label": classes, "labels": datasets.Sequence(classes), "meta": {"is": classes}}
    )
    rows = [
        {"text": text, "score": n / 3, "number": n, "words": [text, other], "label": n % 2, "labels": [1, 0][: n % 3]}
        for n, (text, other) in enumerate(HOSTILE * 11)
    ]
    rows = [row | {"meta": {"is": row["label"]}} for row in rows]
    rows.append(
        {"meta": {"is": -1}, "text": None, "score": None, "number": None, "words": [], "label": -1, "labels": []}
    )
    directory = tmp_path_factory.mktemp("stored")
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(directory / "t.parquet", batch_size=40)
    table.save_to_disk(directory / "folder", num_shards=2)
    datasets.DatasetDict({"train": table, "dev": table}).save_to_disk(directory / "splits")
    names = {0: "no", 1: "yes", -1: None}
    expected = [
        row | {"label": name, "labels": [names[n] for n in row["labels"]], "meta": {"is": name}}
        for row, name in zip(rows, (names[row["label"]] for row in rows), strict=True)
    ]
    return directory, expected


@pytest.mark.parametrize(("name", "kind"), [("t.parquet", PARQUET), ("folder", FOLDER)])
def test_tables_of_datasets(stored, tmp_path, name, kind):
    """Values as they were given to datasets, with the names of classes."""
    directory, expected = stored
    sizes: list[int] = []
    table = TableFile(directory / name, on_read=sizes.append)
    assert (table.kind, table.columns) == (kind, tuple(expected[0]))
    assert list(table.rows()) == list(enumerate(expected, start=1))
    assert len(files_of(directory / name)) == (4 if kind == FOLDER else 1)
    assert sum(sizes) == sum(path.stat().st_size for path in files_of(directory / name))
    as_json = write_jsonl(tmp_path / "t.jsonl", [(row["text"] or "",) for row in expected])
    assert list(DocumentFile(directory / name).read()) == list(DocumentFile(as_json).read())
    names = [f"{row['meta']['is']}\n".encode() for row in expected[:-1]]
    assert list(DocumentFile(directory / name, "meta.is").read()) == names
    with pytest.raises(UserError, match=f"{name}, row 1: number is 0, not a text"):
        list(DocumentFile(directory / name, "number").read())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("other.json", b"{}", f"state.json is missing: give a file, .* of Dataset.save_to_disk, of one split; {FORMS}"),
        ("state.json", b'{"_data_files": {}}', "is damaged"),
        ("state.json", b'{"_data_files": {"a": 1}}', "is no whole folder"),
        ("state.json", b'{"_data_files": [{"filename": "../a.arrow"}]}', "is no whole folder"),
        ("state.json", b'{"_data_files": [{"filename": "link.arrow"}]}', "is no whole folder"),
        ("state.json", b'{"_data_files": [{"filename": "b.arrow"}]}', "is no whole folder"),
        ("state.json", b'{"_data_files": [{"filename": "a.arrow"}]}', "is damaged or not what its name says"),
    ],
)
def test_damaged_folders(tmp_path, file, content, message):
    """Nothing elsewhere is read, by its name or through a link."""
    pytest.importorskip("pyarrow")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link.arrow").symlink_to(written(tmp_path / "a.arrow", b"elsewhere"))
    for name, its_content in {"dataset_info.json": b"{}", "a.arrow": b"no table of Arrow", file: content}.items():
        written(folder / name, its_content)
    with pytest.raises(UserError, match=message):
        list(TableFile(folder).rows())


def test_a_class_without_a_name(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    features = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}}}
    for value in (2, -2):
        table = pa.table({"label": [0, value]}).replace_schema_metadata({"huggingface": json.dumps(features)})
        parquet.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(UserError, match=rf"is damaged .* \({value} is not the number of one of its 2 classes"):
            list(TableFile(tmp_path / "t.parquet").rows())


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"is read with pyarrow.* pip install 'amos_fairseq\[data\]'"):
        TableFile(written(tmp_path / "t.parquet", b"PAR1"))


def test_small_files_that_fill_the_memory(tmp_path, monkeypatch):
    """Parquet and compressed text; the same rows as text without compression are read."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("amos_fairseq.inputs.tables._ALWAYS_READ", 1 << 20)
    columns = [["x" * 10_000] * 300, ["x" * 2_000_000], ["a"] * 30_000, [None] * 30_000]
    files = [tmp_path / f"{number}.parquet" for number in range(len(columns))]
    for file, texts in zip(files, columns, strict=True):
        parquet.write_table(pa.table({"text": texts}), file, compression="zstd")
    rows = b"text\n" + b"a\n" * 30_000
    for file in (*files, written(tmp_path / "t.tsv.zst", zstandard.compress(rows))):
        assert file.stat().st_size < 5000
        with pytest.raises(UserError, match="take more than 200 times the size of the file"):
            for _ in TableFile(file).rows():
                pass
    assert len(values(TableFile(written(tmp_path / "t.tsv", rows)))) == 30_000
