"""Kinds of files against what wrote them: the content decides, whatever the name is."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile

import pytest
import zstandard

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.file_kinds import JSON, JSONL, PARQUET, TEXT, TSV, kind_of
from amos_fairseq.inputs.input_files import TableFile, read_content, read_lines

ROWS = [{"text": f"sentence {number}", "n": number} for number in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
PROSE = b"One sentence.\nAnother sentence.\n"
ARCHIVE_NAMES = ["c4.00000-of-01024.json.gz", "x.csv.json", "lines.txt", "part-0001", "a.tsv", "a.parquet", "a.bz2"]


def written(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress, zstandard.compress])
@pytest.mark.parametrize("name", ARCHIVE_NAMES)
def test_json_lines_are_read_under_any_name(tmp_path, name, compress):
    path = written(tmp_path / name, compress(b"\xef\xbb\xbf\r\n" + LINES))
    assert kind_of(path) == JSONL
    assert [row for _, row in TableFile(path).rows()] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.txt.gz", PROSE, TEXT),  # not compressed
        ("a.parquet.txt", PROSE, TEXT),
        ("a.html", b"PAR1 is the name of a format.\n", TEXT),
        ("a.txt", b"PAR1\nA chapter.\n", TEXT),
        ("a.txt", b"word " * 51 + b",mustard.\n", TEXT),  # "ustar" at the place where tar has it
        ("a.html", b"PAR1\x15\x04 ...", PARQUET),
        ("a.txt", b'{"text": "on two lines", \n"n": 1}\n', JSON),
        ("a.txt", json.dumps(ROWS).encode(), JSON),
        ("a.jsonl", json.dumps(ROWS, indent=1).encode(), JSON),
        ("a.txt", b'["one text",\n"another"]', JSON),
        ("a.txt", b"{'text': 'as Python prints it'}\n" * 3, JSON),
        ("a.txt", LINES.replace(b"{", b"\x1e{"), JSONL),  # a JSON text sequence
        ("a.txt", LINES.replace(b"}", b"},"), JSON),
        ("a.parquet", b"PAR1" + bytes(range(8)) + (7).to_bytes(8, "little") * 99, PARQUET),
        ("a.txt", b'{"cut": "\n' + LINES, JSONL),  # so that the first line is refused
        ("a.jsonl", PROSE, JSONL),
        ("a.json", PROSE, JSONL),
        ("a.txt", LINES[: LINES.index(b"\n") + 1] + PROSE * 9, TEXT),  # a text about JSON
        ("a.txt", b'{"a": 1} is how you write it in JSON.\nAnother sentence.\n', TEXT),
        ("a.txt", b'["a", "b"] is a list.\nAnother sentence.\n', TEXT),
        ("a.txt", b'[1, "text"]\n[2, "text"]\n', JSON),
        ("a.txt", b'[[1, "text"],\n[2, "text"]]\n', JSON),
        ("a.txt", b"[1]\n[2, 3] are references.\n[4]\n", TEXT),
        ("a.txt", b"[1] A reference.\n[[a link]]\n{a brace}\n", TEXT),
        ("a.txt", b'[Illustration]\n"Quoted."\n', TEXT),
        ("a.tsv", b'text\tjson\na\t{"b": 1}\n', TSV),
        ("a.txt", b'{"text": "' + b"long " * 100_000 + b'"}\n', JSONL),
        ("a.txt", b"\0o\0ne\0 two \0\nthr\0\0ee\n", TEXT),
    ],
)
def test_kind_of(tmp_path, name, content, kind):
    assert kind_of(written(tmp_path / name, content)) == kind


def tar(content):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    return stream.getvalue()


def zipped(content):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.txt", content)
    return stream.getvalue()


NOT_READ = {
    "bzip2": (bz2.compress(PROSE), "is compressed with bzip2: unpack it with bunzip2"),
    "empty bzip2": (bz2.compress(b""), "is compressed with bzip2"),
    "lzma": (lzma.compress(PROSE, lzma.FORMAT_ALONE), "is compressed with lzma"),
    "zip": (zipped(PROSE), "is a zip archive"),
    "tar": (tar(PROSE), "is a tar archive: unpack it with tar -xf"),
    "tar.gz": (gzip.compress(tar(PROSE)), "is a tar archive"),
    "PDF": (b"%PDF-1.4\n%text", "is a PDF"),
    "RTF": (rb"{\rtf1\ansi text}", "is a document of RTF"),
    "LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        "is a pointer of Git LFS, not the file itself: download it with git lfs pull",
    ),
    "Arrow": (b"ARROW1\0\0", "is a file of Arrow or Feather: write it as Parquet"),
    "WARC": (gzip.compress(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n"), "is a WARC file of Common Crawl"),
    "compressed twice": (gzip.compress(zstandard.compress(PROSE)), ": Parquet or another compressed file is inside"),
    "a mark of UTF-16": ("text".encode("utf-16"), "is UTF-16: convert it to UTF-8"),
    "a mark of UTF-32": ("text".encode("utf-32"), "is UTF-32: convert it to UTF-8, for example with iconv -f UTF-32"),
    "UTF-16 of Latin": ("“Text”".encode("utf-16-le") * 99 + "text\n".encode("utf-16-le") * 99, "is UTF-16"),
    "UTF-16 of Cyrillic": ("текст\n".encode("utf-16-be"), "is UTF-16"),
    "UTF-32": ("текст\n".encode("utf-32-le"), "is UTF-16 or UTF-32"),
}


@pytest.mark.parametrize("what", NOT_READ)
def test_other_files_are_named(tmp_path, what):
    """Whatever reads them."""
    content, message = NOT_READ[what]
    path = written(tmp_path / "text.txt", content)
    for read in (kind_of, TableFile, lambda path: read_content(path, 100), lambda path: list(read_lines(path))):
        with pytest.raises(UserError, match=f"text.txt ?{message}"):
            read(path)


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (json.dumps(ROWS).encode(), r"jq -c '\.\[\]' 'my file\.json' > 'my file\.lines\.jsonl'"),
        (json.dumps(ROWS, indent=2).encode(), r"jq -c '\.\[\]'"),
        (json.dumps({"data": ROWS}, indent=2).encode(), r"jq -c \. 'my file\.json'"),
        (b'["a",\n"b"]', r"jq -c '\.\[\] \| {text: \.}' 'my file"),
        (b'["1", "a"]\n["2", "b"]\n', r"jq -c '{text: \.\[1\]}' 'my file"),
        (b'[1, "a"]\n[2, "b"]\n', r"jq -c '{text: \.\[1\]}' 'my file"),
        (b'[[1, "a"], [2, "b"]]', r"jq -c '\.\[\] \| {text: \.\[1\]}' 'my file"),
        (LINES.replace(b"}", b"}, "), r"sed 's/, \*\$//' 'my file"),
        (LINES.replace(b"\n", b"\r"), r"tr '\\r' '\\n' < 'my file"),
    ],
)
def test_json_is_refused_with_the_command_that_converts_it(tmp_path, content, command):
    path = written(tmp_path / "my file.json", content)
    for read in (TableFile, lambda path: list(read_lines(path))):
        with pytest.raises(UserError, match=f"is JSON, but not one object on each line .* {command}"):
            read(path)
