"""Rows of every kind of table against what Python's csv and json, pyarrow and datasets wrote; errors with file and line."""

import csv
import gzip
import io
import json
import lzma
from pathlib import Path

import pytest
import zstandard

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.documents import read_documents
from amos_fairseq.inputs.input_files import TableFile, files_of

COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
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


def separated(rows: list[list[str]], separator: str = ",", **settings: object) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=separator, **settings).writerows(rows)
    return stream.getvalue().encode("utf-8")


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def documents_of_json(path: Path, texts: list[str | None]) -> list[bytes]:
    """The documents of these texts as JSON lines, one of which is empty and none."""
    return list(read_documents(written(path, "\n".join(json.dumps({"text": text or ""}) for text in texts).encode())))


def values(table: TableFile) -> list[list[object]]:
    return [list(row.values()) for _, row in table.rows()]


@pytest.mark.parametrize(
    ("kind", "separator", "compression", "mark"),
    [("csv", ",", "", "\ufeff"), ("csv", ";", ".gz", ""), ("tsv", "\t", ".xz", ""), ("tsv", "\t", ".zst", "")],
)
def test_hostile_texts_survive(tmp_path, kind, separator, compression, mark):
    """Python's csv writes them, as pandas does. NUL is removed, and the limit of csv is that of the process again."""
    content = mark.encode() + separated([["text", "label"], *HOSTILE, ["N\0UL", "\0"]], separator)
    path = written(tmp_path / f"table.{kind}{compression}", COMPRESS[compression](content))
    sizes: list[int] = []
    limit = csv.field_size_limit()
    table = TableFile(path, csv_quotes=True, on_read=sizes.append)
    assert (table.kind, table.columns) == (kind, ("text", "label"))
    assert values(table) == [*HOSTILE, ["NUL", ""]]
    assert table.broken_lines == []
    assert sum(sizes) == path.stat().st_size
    assert csv.field_size_limit() == limit
    documents = documents_of_json(tmp_path / "t.jsonl", [*(text for text, _ in HOSTILE), "NUL"])
    assert list(read_documents(path, csv_quotes=True)) == documents


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
    assert (table.broken_lines, table.num_blank_lines) == ([6], 1)
    table = TableFile(written(tmp_path / "t.csv", b"a\n1\n\n3\n"))
    assert list(table.rows()) == [(2, {"a": "1"}), (3, {"a": ""}), (4, {"a": "3"})]


def test_lines_of_tsv_with_ordinary_quotes(tmp_path, capsys):
    """A quote at the start of a text is closed in another row: nothing between is lost."""
    content = b'text\tlabel\n"Go\t1\nmiddle\t0\naway"\t1\none\ttwo\tthree\n\n"a"\t0\r\nc\rd\t0\n'
    table = TableFile(written(tmp_path / "t.tsv", content))
    assert values(table) == [['"Go', "1"], ["middle", "0"], ['away"', "1"], ['"a"', "0"], ["c\rd", "0"]]
    assert (table.broken_lines, table.num_blank_lines) == ([5], 1)
    assert list(read_documents(tmp_path / "t.tsv"))[::2] == [b'"Go\n', b'away"\n', b"c\nd\n"]
    said = capsys.readouterr().err
    assert "t.tsv: 1 of its rows (16.7%), the first in line 5, do not have the 2 columns" in said
    assert "t.tsv: 1 blank lines are left out" in said
    # Also where most lines are blank.
    assert values(TableFile(written(tmp_path / "t.tsv", b"a\tb\n1\t2\n \n\n\n\n\n3\t4\n"))) == [["1", "2"], ["3", "4"]]


SEPARATORS = {"text;label\na,b;c\n": ";", 'text\tlabel\n"a\tb"\tc\n': "\t", "text|label\na,b|c\n": "|"}
SEPARATORS |= dict.fromkeys(["text,label\na;b,c\n", '"a;b;c",label\nx,y\n', "text\nx\n"], ",")
SEPARATORS |= dict.fromkeys(["a;b,c\nx;y,z\n", "text|of|three,label\na,b\n"], ",")


@pytest.mark.parametrize("content", SEPARATORS)
def test_separator_of_csv(tmp_path, content):
    rows = list(csv.reader(io.StringIO(content, newline=""), delimiter=SEPARATORS[content]))
    table = TableFile(written(tmp_path / "t.csv", content.encode()))
    assert [list(table.columns), *values(table)] == rows


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
    features = datasets.Features(types | {"label": classes, "labels": datasets.Sequence(classes)})
    rows = [
        {"text": text, "score": n / 3, "number": n, "words": [text, other], "label": n % 2, "labels": [1, 0][: n % 3]}
        for n, (text, other) in enumerate(HOSTILE * 11)
    ]
    rows.append({"text": None, "score": None, "number": None, "words": [], "label": -1, "labels": []})
    directory = tmp_path_factory.mktemp("stored")
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(directory / "t.parquet", batch_size=40)
    table.save_to_disk(directory / "folder", num_shards=2)
    datasets.DatasetDict({"train": table, "dev": table}).save_to_disk(directory / "splits")
    names = {0: "no", 1: "yes", -1: None}
    expected = [row | {"label": names[row["label"]], "labels": [names[n] for n in row["labels"]]} for row in rows]
    return directory, expected


@pytest.mark.parametrize(("name", "kind"), [("t.parquet", "parquet"), ("folder", "folder")])
def test_tables_of_datasets(stored, tmp_path, name, kind):
    """Values as they were given to datasets, with the names of classes."""
    directory, expected = stored
    sizes: list[int] = []
    table = TableFile(directory / name, on_read=sizes.append)
    assert (table.kind, table.columns) == (kind, tuple(expected[0]))
    assert list(table.rows()) == list(enumerate(expected, start=1))
    assert len(files_of(directory / name)) == (4 if kind == "folder" else 1)
    assert sum(sizes) == sum(path.stat().st_size for path in files_of(directory / name))
    documents = documents_of_json(tmp_path / "t.jsonl", [row["text"] for row in expected])
    assert list(read_documents(directory / name)) == documents
    with pytest.raises(UserError, match=f"{name}, row 1: number is 0, not a text"):
        list(read_documents(directory / name, "number"))


BAD_TEXTS = {
    "absent.csv": (None, "no such file"),
    "same.csv": (b"a,b,a\n1,2,3\n", "two columns have the name 'a'"),
    "empty.csv": (b"", "is empty"),
    "wide.tsv": (b"\t".join(str(n).encode() for n in range(10_001)), "at most 10,000 are read"),
    "cr.tsv": (b"a\tb\r1\t2\r", "its lines end with CR: convert it, for example with tr '\\r' '\\n' < FILE"),
    "cr.csv": (b"a,b\r1,2\r", "its lines end with CR: convert it"),
    "half.csv": (b"a,b\n1,\xed\xa0\xbd\n", "line 2, byte 6: not UTF-8 (invalid continuation byte)"),
    "commas.tsv": (b"a\tb\n1,2\n3,4\n", "none of its 2 lines has the 2 tab-separated columns"),
    "words": (b"a\tb\n", "is no table: give JSON lines"),
    "twice.jsonl": (b'{"a": 1}\n{"a": 1, "b": {"a": 2}, "a": 3}\n', "line 2 has the key 'a' twice"),
    "inner.jsonl": (b'{"a": 1, "b": [{"c": 2, "c": 3}]}\n', "line 1 has the key 'c' twice"),
    "half.tsv": (b"a\tb\n1\t2\n3\n4\n", "only 1 of its 3 lines have the 2 tab-separated columns"),
    "title.csv": (b"Export;;\na;b;c\n", "two columns have the name '': remove what is above the names"),
    "t.parquet.gz": (gzip.compress(b"PAR1\x15"), "unpack .gz first"),
    "e.csv.gz": (gzip.compress(b""), "is empty"),
    "end.csv": (b'a,b\n1,2\n3,"4\n5,6\n', "line 3: the row that begins there is not CSV (unexpected end of data)"),
    "nul.jsonl": (b'{"a": 1, "a\\u0000": 2}\n', "line 1 has the key 'a' twice"),
    "deep.jsonl": (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}\n", "line 1 is nested more than 100 levels deep"),
    "list.jsonl": (b"[1]\n", "line 1 contains [1], not an object"),
    "noise.parquet": (b"this is no Parquet file", "is damaged or no Parquet file"),
}


def test_errors_name_file_and_line(tmp_path):
    for name, (content, message) in BAD_TEXTS.items():
        if content is not None:
            written(tmp_path / name, content)
        with pytest.raises(UserError) as error:
            list(TableFile(tmp_path / name).rows())
        assert str(error.value).startswith(str(tmp_path / name))
        assert message in str(error.value)
    with pytest.raises(UserError, match="remove --no-header"):
        TableFile(written(tmp_path / "t.jsonl", b'{"a": 1}\n'), header=False)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("other.json", b"{}", "a folder, but not of save_to_disk"),
        ("dataset_dict.json", b"{}", "has several splits"),
        ("state.json", b'{"_data_files": {}}', "state.json is damaged"),
        ("state.json", b'{"_data_files": [{"filename": "../a.arrow"}]}', "copy the whole folder"),
        ("state.json", b'{"_data_files": [{"filename": "a.arrow"}, {"filename": "a.arrow"}]}', "names a file twice"),
        ("state.json", b'{"_data_files": [{"filename": "a.arrow"}]}', "is damaged or no folder of datasets"),
    ],
)
def test_damaged_folders(tmp_path, file, content, message):
    pytest.importorskip("datasets")
    for name, its_content in {"dataset_info.json": b"{}", "a.arrow": b"no table of Arrow", file: content}.items():
        written(tmp_path / name, its_content)
    with pytest.raises(UserError, match=message):
        TableFile(tmp_path)


def test_a_class_without_a_name(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    features = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}}}
    for value in (2, -2):
        table = pa.table({"label": [0, value]}).replace_schema_metadata({"huggingface": json.dumps(features)})
        parquet.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(UserError, match=rf"row 2: .* label cannot be read \({value} is not the number of one of"):
            list(TableFile(tmp_path / "t.parquet").rows())


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"is read with pyarrow.* pip install 'amos_fairseq\[data\]'"):
        TableFile(written(tmp_path / "t.parquet", b"PAR1"))


def test_small_files_that_fill_the_memory(tmp_path, monkeypatch):
    """Parquet and compressed text; the same rows as text without compression are read."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("amos_fairseq.inputs.input_files._ALWAYS_READ", 1 << 20)
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
