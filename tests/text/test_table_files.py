"""Rows of every kind of table against what Python's csv and json, pyarrow and datasets wrote; errors with file and line."""

import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import random
from pathlib import Path

import pytest
import zstandard

from amos_fairseq.errors import UserError
from amos_fairseq.text import arrow_tables, table_files, text_files
from amos_fairseq.text.table_files import TableFile, has_csv_quotes, number_columns

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
]


def separated(rows: list[list[str]], separator: str = ",", **settings: object) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=separator, **settings).writerows(rows)
    return stream.getvalue().encode("utf-8")


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def values(table: TableFile) -> list[list[object]]:
    return [list(row.values()) for _, row in table.rows()]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".csv", ";"), (".tsv", "\t")])
def test_hostile_texts_survive(tmp_path, suffix, separator, compression, mark):
    """Python's csv writes them, as pandas does. NUL is removed."""
    content = mark + separated([["text", "label"], *HOSTILE, ["N\0UL", "\0"]], separator)
    path = written(tmp_path / f"table{suffix}{compression}", COMPRESS[compression](content))
    sizes: list[int] = []
    table = TableFile(path, on_read=sizes.append)
    assert (table.kind, table.columns) == (suffix[1:], ("text", "label"))
    assert values(table) == [*HOSTILE, ["NUL", ""]]
    assert table.broken_lines == []
    assert table.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(sizes) == path.stat().st_size


def test_hostile_texts_survive_in_json(tmp_path):
    rows = [{"text": text, "n": n, "x": [n, None, True, {"a": "b\0"}]} for n, (text, _) in enumerate(HOSTILE)]
    lines = [json.dumps(row, ensure_ascii=bool(n % 2)) for n, row in enumerate(rows)]
    table = TableFile(written(tmp_path / "t.jsonl", "\r\n\n".join(lines).encode("utf-8")))
    assert table.columns == ("text", "n", "x")
    assert list(table.rows()) == [(2 * n + 1, row | {"x": [n, None, True, {"a": "b"}]}) for n, row in enumerate(rows)]


def test_keys_of_json_are_those_of_the_first_objects(tmp_path):
    lines = [b'{"a": 1.5, "b": null}\n', b'{"c": 1, "b": "x", "a": false}\n', *[b"{}\n"] * 98, b'{"d": 1, "c": 2}\n']
    table = TableFile(written(tmp_path / "t.ndjson", b"".join(lines)))
    rows = [row for _, row in table.rows()]
    assert table.columns == ("a", "b", "c")
    assert rows[:2] == [{"a": 1.5, "b": None, "c": None}, {"a": False, "b": "x", "c": 1}]
    assert rows[-1] == {"a": None, "b": None, "c": 2}


def test_numbers_are_those_of_the_first_line_of_a_row(tmp_path):
    path = written(tmp_path / "t.csv", b'a,b\n"1\n\n2",3\n4,5\n6\n\n7,8\n')
    table = TableFile(path)
    assert [number for number, _ in table.rows()] == [2, 5, 8]
    assert table.broken_lines == [6, 7]
    table = TableFile(written(tmp_path / "t.csv", b"a\n1\n\n3\n"))
    assert list(table.rows()) == [(2, {"a": "1"}), (3, {"a": ""}), (4, {"a": "3"})]


def test_lines_of_tsv_with_ordinary_quotes(tmp_path):
    """A quote at the start of a text is closed in another row: nothing between is lost."""
    content = b'text\tlabel\n"Go\t1\nmiddle\t0\naway"\t1\none\ttwo\tthree\n\n"a"\t0\r\n'
    table = TableFile(written(tmp_path / "t.tsv", content))
    assert values(table) == [['"Go', "1"], ["middle", "0"], ['away"', "1"], ['"a"', "0"]]
    assert table.broken_lines == [5, 6]


QUOTES = {
    "no quotes": (b"a\tb\nx\ty\n", False),
    "a text in quotes": (b'a\tb\nx\t"y"\n', False),
    "all in quotes": (b'"a"\t"b"\n"x"\t"y"\n', True),
    "names alone, without a header": (b'"a"\t"b"\n"x"\t"y"\n', False),
    "doubled": (b'a\tb\nx\t"He said ""y""."\n', True),
    "doubled, and an ordinary one": (b'a\tb\nx\t"He said ""y""."\nx\t5" long\n', False),
    "an ordinary one first": (b'a\tb\n5" long\t"He said ""y""."\n', False),
    "a tab": (b'a\tb\nx\t"y\tz"\nu\tv\n', True),
    "a line end": (b'a\tb\nx\t"y\nz"\n', True),
    "a line end, and a broken line": (b'a\tb\nx\t"y\nz"\nx\n', False),
    "rows between two quotes": (b'a\tb\n"x\t1\ny\t2\nz"\t3\n', False),
    "a carriage return": (b'a\tb\nx\t"y\tz"\nu\rv\tw\n', False),
    "not closed": (b'a\tb\nx\ty\tz\nx\t"y\n', False),
    "one column": (b'a\n"x\ny"\nz\n', True),
    "one column of lines": (b'a\n"x"\nz\n', False),
}


@pytest.mark.parametrize("name", QUOTES)
def test_which_quotes_of_tsv_are_those_of_csv(tmp_path, name):
    content, expected = QUOTES[name]
    path = written(tmp_path / "t.tsv", content)
    assert has_csv_quotes(path, 2 if "without a header" in name else 0) is expected
    plain = [line.split("\t") for line in content.decode().removesuffix("\n").split("\n")]
    rows = plain if not expected else list(csv.reader(io.StringIO(content.decode(), newline=""), delimiter="\t"))
    table = TableFile(path)
    if "without" not in name:
        assert [list(table.columns), *values(table)] == [row for row in rows if len(row) == len(rows[0])]
    assert values(TableFile(path, ordinary_quotes=True)) == [row for row in plain[1:] if len(row) == len(plain[0])]


@pytest.mark.parametrize("special", ['"', '"\n', '"\t', '"\r\n'])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_what_csv_writes_with_tabs_is_read_as_it_was(tmp_path, special, quoting):
    generator = random.Random(f"{special}{quoting}")
    for _ in range(100):
        texts = ("".join(generator.choices("ab" + special, k=generator.randrange(6))) for _ in range(20))
        rows = [["n", "text", "label"], *([str(n), text, "x"] for n, text in enumerate(texts))]
        path = written(tmp_path / "t.tsv", separated(rows, "\t", quoting=quoting))
        table = TableFile(path)
        assert [list(table.columns), *values(table)] == rows


@pytest.mark.skipif(not os.environ.get("AMOS_DATA"), reason="AMOS_DATA names no data folder")
@pytest.mark.parametrize(("task", "quoted"), [("SST-2", False), ("MRPC", False), ("RTE", False), ("QQP", True)])
def test_quotes_of_official_files(task, quoted):
    """Texts of QQP were written with the quotes of CSV; those of the others were not, and no row is lost."""
    path = next((Path(os.environ["AMOS_DATA"]) / "glue" / task).glob("dev*.tsv.xz"))
    assert has_csv_quotes(path) is quoted
    text = lzma.decompress(path.read_bytes()).decode("utf-8")
    table = TableFile(path)
    if not quoted:
        assert values(table) == [line.split("\t") for line in text.split("\n")[1:] if line]
    else:
        assert values(table) == list(csv.reader(io.StringIO(text, newline=""), delimiter="\t"))[1:]
    assert table.broken_lines == []


SEPARATORS = {
    "text;label\na,b;c\n": ";",
    "text,label\na;b,c\n": ",",
    '"a;b;c",label\nx,y\n': ",",
    "text\nx\n": ",",
    "a;b,c\nx;y,z\n": ",",
}


@pytest.mark.parametrize("content", SEPARATORS)
def test_separator_of_csv(tmp_path, content):
    path = written(tmp_path / "t.csv", content.encode())
    rows = list(csv.reader(io.StringIO(content, newline=""), delimiter=SEPARATORS[content]))
    table = TableFile(path)
    assert [list(table.columns), *values(table)] == rows
    assert number_columns(path) == len(rows[0])


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.tsv", b'a "\tb\nc\td\n'), ("t.csv", b'"a "" ; ;",b\nc,d\n'), ("q.tsv", b'"a ""\tx"\tb\nc\td\n')],
)
def test_files_without_header(tmp_path, name, content):
    path = written(tmp_path / name, content)
    assert number_columns(path) == 2
    rows = list(TableFile(path, ["1", "2"]).rows())
    assert [number for number, _ in rows] == [1, 2]
    assert rows[0][1]["2"] == "b"
    assert rows[1][1] == {"1": "c", "2": "d"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """What datasets writes: a Parquet file and a folder of two files with the same rows, a folder of splits; and the rows."""
    datasets = pytest.importorskip("datasets")
    classes = datasets.ClassLabel(names=["no", "yes\0"])
    types = {"text": "string", "score": "float64", "number": "int32", "words": [datasets.Value("string")]}
    types = {name: datasets.Value(kind) if isinstance(kind, str) else kind for name, kind in types.items()}
    features = datasets.Features(types | {"label": classes, "labels": datasets.Sequence(classes)})
    rows = [
        {"text": text, "score": n / 3, "number": n, "words": [text, other], "label": n % 2, "labels": [1, 0][: n % 3]}
        for n, (text, other) in enumerate(HOSTILE)
    ]
    rows.append({"text": None, "score": None, "number": None, "words": [], "label": -1, "labels": []})
    directory = tmp_path_factory.mktemp("stored")
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(directory / "t.parquet", batch_size=4)
    table.save_to_disk(directory / "folder", num_shards=2)
    datasets.DatasetDict({"train": table, "dev": table}).save_to_disk(directory / "splits")
    names = {0: "no", 1: "yes", -1: None}
    expected = [row | {"label": names[row["label"]], "labels": [names[n] for n in row["labels"]]} for row in rows]
    return directory, expected


@pytest.mark.parametrize(("name", "kind"), [("t.parquet", "parquet"), ("folder", "folder")])
def test_tables_of_datasets(stored, name, kind):
    """Values as they were given to datasets, with the names of classes."""
    directory, expected = stored
    sizes: list[int] = []
    table = TableFile(directory / name, on_read=sizes.append)
    assert (table.kind, table.columns) == (kind, tuple(expected[0]))
    assert list(table.rows()) == list(enumerate(expected, start=1))
    files = [directory / name]
    if kind == "folder":
        files = [files[0] / each for each in ("state.json", "dataset_info.json")] + sorted(files[0].glob("*.arrow"))
        assert len(files) == 4
    content = b"".join(path.read_bytes() for path in files)
    assert table.sha256 == hashlib.sha256(content).hexdigest()
    assert sum(sizes) == len(content)


def test_a_folder_of_splits_is_no_table(stored):
    path = stored[0] / "splits"
    with pytest.raises(UserError, match=f"has the splits train, dev: give one of them, such as {path}/train"):
        TableFile(path)
    assert len(list(TableFile(path / "dev").rows())) == len(stored[1])


def test_parquet_of_other_writers(tmp_path):
    """Other types of texts, and a dictionary."""
    pa = pytest.importorskip("pyarrow")
    texts = ["a", None, "c" * 5000] * 1000
    arrays = {
        "large": pa.array(texts, pa.large_string()),
        "dictionary": pa.array(texts).dictionary_encode(),
        "bytes": pa.array([each and each.encode() for each in texts]),
        "numbers": pa.array([1, None, 3] * 1000).dictionary_encode(),
        "flag": pa.array([True, False, None] * 1000),
        "changing": pa.array(
            [f"{n} {'y' * 1000}" for n in range(3000)]
        ),  # a dictionary page is full after a third of them
        "map": pa.array([[("k", each)] for each in texts], pa.map_(pa.string(), pa.string())),
        "pair": pa.array([[each, "b"] for each in texts], pa.list_(pa.string(), 2)),
        "struct": pa.array([{"x": each} for each in texts]),
    }
    parquet = pytest.importorskip("pyarrow.parquet")
    for size in (700, 3000):
        parquet.write_table(pa.table(arrays), tmp_path / "t.parquet", compression="zstd", row_group_size=size)
        rows = [row for _, row in TableFile(tmp_path / "t.parquet").rows()]
        assert rows == pa.table(arrays).to_pylist()


def test_a_large_text_that_a_small_parquet_file_repeats(tmp_path):
    """One text of 8 MB in each of 20,000 rows, 160 GB, in a file of a few kilobytes: it is in memory a few times at once."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * (8 << 20)]))
    parquet.write_table(pa.table({"text": column}), tmp_path / "t.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    before = pa.total_allocated_bytes()
    rows = TableFile(tmp_path / "t.parquet").rows()
    for _ in range(50):
        assert len(next(rows)[1]["text"]) == 8 << 20
        assert pa.total_allocated_bytes() - before < 100 << 20
    rows.close()


def test_large_rows_of_parquet_are_refused(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": ["x", "x" * 300, "y"]}), tmp_path / "t.parquet")
    monkeypatch.setattr(arrow_tables, "_BYTES_AT_ONCE", 50)
    rows = TableFile(tmp_path / "t.parquet").rows()
    assert [len(row["text"]) for _, row in rows] == [1, 300, 1]
    monkeypatch.setattr(arrow_tables, "LARGEST_DOCUMENT_BYTES", 299)
    rows = TableFile(tmp_path / "t.parquet").rows()
    assert next(rows) == (1, {"text": "x"})
    with pytest.raises(UserError, match="row 2: larger than"):
        next(rows)


@pytest.mark.parametrize(
    "columns", [{"text": ["x" * 5000] * 20}, {"text": ["x", "y"], "dictionary": ["z" * 5000, "u"]}]
)
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_compressed_batches_of_arrow_are_refused(tmp_path, columns, compression):
    """A few bytes would become gigabytes at once. The flag is read from the header of a batch, or of a dictionary."""
    pa = pytest.importorskip("pyarrow")
    arrays = {name: pa.array(values) for name, values in columns.items()}
    table = pa.table(arrays | {name: arrays[name].dictionary_encode() for name in arrays if name == "dictionary"})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema, options=options) as out,
    ):
        out.write_table(table)
    written(tmp_path / "state.json", b'{"_data_files": [{"filename": "a.arrow"}]}')
    written(tmp_path / "dataset_info.json", b"{}")
    rows = TableFile(tmp_path).rows()
    if compression is None:
        assert [row for _, row in rows] == table.to_pylist()
        return
    with pytest.raises(UserError, match=r"a\.arrow is compressed"):
        next(rows)


TEXTS = {
    "same.csv": (b"a,b,a\n1,2,3\n", "two columns have the name 'a'"),
    "same.tsv": (b"a\ta\n1\t2\n", "two columns have the name 'a'"),
    "empty.csv": (b"", "is empty"),
    "empty.jsonl.gz": (gzip.compress(b""), "has no values"),
    "empty.tsv.gz": (gzip.compress(b""), "is empty"),
    "header.csv": (b"a,b\n", "is empty, but for the names of its columns"),
    "tabs.csv": (b"a\tb\n1\t2\n", "rename it to .tsv"),
    "commas.tsv": (
        b"a\tb\n1,2\n3,4\n",
        "none of its 2 lines has the 2 tab-separated columns that were expected (a, b)",
    ),
    "words.txt": (b"a\tb\n", ".txt is no table that can be read: .tsv, .csv and .jsonl"),
    "words": (b"a\tb\n", "a file without suffix is no table that can be read"),
    "table.json": (b"[]", ".json is no table that can be read"),
    "t.parquet.gz": (b"", "unpack .gz first"),
    "end.csv": (b'a,b\n1,2\n3,"4\n5,6\n', "line 3: the file ends inside of a quoted field"),
    "quote.csv": (b'a,b\n1,"2" 3\n', "line 2: the row that begins there is not CSV"),
    "return.csv": (b"a,b\n1,2\r3,4\n", "line 2: the row that begins there is not CSV"),
    "latin.csv": (b"a,b\n1,caf\xe9\n", "line 2, byte 9: not UTF-8"),
    "utf16.csv": ("a,b\n1,2\n".encode("utf-16"), "line 1, byte 0: not UTF-8"),
    "cut.csv.gz": (gzip.compress(b"a,b\n" + os.urandom(99).hex().encode())[:-12], "is damaged"),
    "list.jsonl": (b'{"a": 1}\n[1]\n', "line 2 contains [1], not an object"),
    "words.jsonl": (b'{"a": 1}\nwords\n', "line 2 is not JSON"),
    "deep.jsonl": (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}\n", "line 1 is nested more than 100 levels deep"),
    "half.jsonl": (b'{"a": "\\ud800"}\n', "line 1 has half of a surrogate pair"),
    "nan.jsonl": (b'{"a": NaN}\n', "line 1 is not JSON (NaN is not a finite number)"),
    "noise.parquet": (b"this is no Parquet file", "is damaged or no Parquet file"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_errors_name_file_and_line(tmp_path, name):
    content, message = TEXTS[name]
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = written(tmp_path / name, content)
    with pytest.raises(UserError) as error:
        list(TableFile(path).rows())
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_what_is_no_table_at_all(tmp_path):
    for path, message in ((tmp_path / "no.csv", "no such file"), (tmp_path, "a folder, but not of save_to_disk")):
        with pytest.raises(UserError, match=message):
            TableFile(path)
    path = written(tmp_path / "t.jsonl", b'{"a": 1}\n')
    for read in (number_columns, lambda path: TableFile(path, ["1"])):
        with pytest.raises(UserError, match="remove --no-header"):
            read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'a,b\n1,"2\n' + b"x\n" * 100, "line 2: the row that begins there is larger than"),
        (b"a,b\n1,2\n" + b"," * 60, "line 3: the row that begins there is larger than"),
    ],
)
def test_a_row_of_csv_has_a_maximum_size(tmp_path, monkeypatch, content, message):
    monkeypatch.setattr(table_files, "LARGEST_DOCUMENT_BYTES", 128)
    monkeypatch.setattr(table_files, "_MOST_SEPARATORS", 50)
    with pytest.raises(UserError, match=message):
        list(TableFile(written(tmp_path / "t.csv", content)).rows())


def test_json_of_many_lists_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LARGEST_NUMBER_OF_BRACKETS", 1000)
    content = json.dumps({"a": [[]] * 999}).encode()
    with pytest.raises(UserError, match="line 1: more than 1,000 brackets"):
        TableFile(written(tmp_path / "t.jsonl", content))


def test_many_columns_are_refused(tmp_path):
    with pytest.raises(UserError, match="at most 10,000 are read"):
        TableFile(written(tmp_path / "t.tsv", b"\t".join(str(n).encode() for n in range(10_001)) + b"\n"))


STATES = {
    "elsewhere": ({"_data_files": [{"filename": "../t.arrow"}]}, "files elsewhere"),
    "none": ({"_data_files": []}, "names no data"),
    "absent": ({"_data_files": [{"filename": "b.arrow"}]}, "b.arrow is missing: copy the whole folder"),
    "selected": ({"_indices_data_files": [{"filename": "i.arrow"}], "_data_files": []}, "rows are selected by another"),
    "damaged": ({"_data_files": [{"filename": "a.arrow"}]}, "is damaged or no folder of datasets"),
}


@pytest.mark.parametrize("name", STATES)
def test_damaged_folders(tmp_path, name):
    pytest.importorskip("pyarrow")
    state, message = STATES[name]
    written(tmp_path / "state.json", json.dumps(state).encode())
    written(tmp_path / "dataset_info.json", b"{}")
    written(tmp_path / "a.arrow", b"no table of Arrow")
    with pytest.raises(UserError, match=message):
        TableFile(tmp_path)


def test_a_class_without_a_name(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    features = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}}}
    for value in (2, -2):
        table = pa.table({"label": [0, value]}).replace_schema_metadata({"huggingface": json.dumps(features)})
        parquet.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(UserError, match=f"row 2: label is {value}, not the number of one of its 2 classes"):
            list(TableFile(tmp_path / "t.parquet").rows())


def test_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"is read with pyarrow.* pip install 'amos_fairseq\[data\]'"):
        TableFile(written(tmp_path / "t.parquet", b"PAR1"))
