"""Documents of every kind of file against the list that was written; errors with file and line."""

import gzip
import hashlib
import json
import lzma
import tracemalloc

import pytest
import zstandard
from synthetic_corpus import make_documents, write_jsonl, write_text

from amos_fairseq.errors import UserError
from amos_fairseq.preprocess.common import reading
from amos_fairseq.preprocess.common.reading import InputFile, refuse_other_formats

DOCUMENTS = make_documents(40)
EXPECTED = ["".join(f"{paragraph}\n" for paragraph in document).encode("utf-8") for document in DOCUMENTS]


def two_parts(compress):
    """Compressed files may be concatenated with `cat`."""
    return lambda content: compress(content[: len(content) // 3]) + compress(content[len(content) // 3 :])


COMPRESS = {
    "": bytes,
    ".gz": two_parts(gzip.compress),
    ".xz": two_parts(lzma.compress),
    ".zst": two_parts(zstandard.ZstdCompressor().compress),
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_all_formats_give_the_same_documents(tmp_path, kind, suffix):
    plain = (write_text if kind == ".txt" else write_jsonl)(tmp_path / f"plain{kind}", DOCUMENTS)
    path = tmp_path / f"corpus{kind}{suffix}"
    path.write_bytes(COMPRESS[suffix](plain.read_bytes()))
    sizes = []
    file = InputFile(path, sizes.append)
    assert list(file.documents()) == EXPECTED
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(sizes) == path.stat().st_size


@pytest.mark.parametrize("name", ["text", "wiki.train.raw", "wiki_00", "text.JSONL.GZ"])
def test_file_names(tmp_path, name):
    """Only suffixes of JSON lines and of compression have a meaning, in upper or lower case."""
    path = tmp_path / name
    if name == "text.JSONL.GZ":
        path.write_bytes(gzip.compress(write_jsonl(tmp_path / "plain.jsonl", DOCUMENTS).read_bytes()))
    else:
        write_text(path, DOCUMENTS)
    assert list(InputFile(path).documents()) == EXPECTED


def test_line_ends_byte_order_marks_and_blank_lines(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\n  one \r\n\ttwo\rthree\r\n \t \r\n\n\nfour\n\x0c\nfive  six")
    assert list(InputFile(path).documents()) == [b"one\ntwo\nthree\n", b"four\n", b"five  six\n"]


def test_json_text(tmp_path):
    """Blank lines inside a text do not end the document; empty texts (redirects of Wikipedia) are skipped."""
    path = tmp_path / "text.jsonl"
    texts = ["one\n\n\ntwo\r\n three ", "", " \n", "four"]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n\n")
    assert list(InputFile(path).documents()) == [b"one\ntwo\nthree\n", b"four\n"]


def test_nul_characters_are_removed(tmp_path):
    """As bytes of a text or escaped in JSON; a line of nothing else is blank."""
    text, lines = tmp_path / "text.txt", tmp_path / "text.jsonl"
    text.write_bytes(b"\0o\0ne\0 two \0\nthr\0\0ee\n\0\0\nfour\n")
    lines.write_text('{"text": "o\\u0000ne two \\u0000\\nthree"}\n{"text": "\\u0000"}\n{"text": "four"}\n')
    for path in (text, lines):
        assert list(InputFile(path).documents()) == [b"one two\nthree\n", b"four\n"]


OTHER_FORMATS = [
    ("text.bz2", ".bz2"), ("TEXT.JSONL.BZ2", ".bz2"), ("text.zip", ".zip"), ("text.7z", ".7z"), ("text.tar", ".tar"),
    ("text.tar.gz", ".tar"), ("text.tgz", ".tgz"), ("part-0.parquet", ".parquet"), ("part-0.parquet.zst", ".parquet"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), OTHER_FORMATS)
def test_other_formats_are_refused_by_name(tmp_path, name, kind):
    with pytest.raises(
        UserError, match=rf"{name}: \{kind} files are not supported: unpack it .* as \.gz, \.xz or \.zst"
    ):
        refuse_other_formats(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["text", "a.tar/text", "wiki.zip.txt", "text.txt.gz", "text.jsonl.zst", "text.gz", ".zst"]
)
def test_names_of_text_are_not_refused(tmp_path, name):
    refuse_other_formats(tmp_path / name)


def test_memory_is_constant(tmp_path):
    """At most six buffers of 10 MB of text."""
    path = tmp_path / "large.txt.gz"
    path.write_bytes(gzip.compress((b"a paragraph of words " * 40 + b"\n\n") * 12_000, compresslevel=1))
    tracemalloc.start()
    try:
        number = sum(1 for _ in InputFile(path).documents())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert number == 12_000
    assert peak < 6 * reading.BUFFER_BYTES


GOOD = b"one line\n\nanother line\n"
LATIN = "first\nsecond caf\u00e9\n".encode("latin-1")
CASES = {
    "empty.txt": (b"", "contains no text"),
    "blank.txt": (b" \n\n\t\n", "contains no text"),
    "blank.jsonl": (b'{"text": ""}\n', "contains no text"),
    "latin.txt": (LATIN, r"latin.txt, line 2, byte 16: not UTF-8"),
    "latin.txt.gz": (gzip.compress(LATIN), r"line 2, byte 16: not UTF-8"),
    "latin.jsonl": (b'{"text": "ok"}\n' + b'{"text": "\xe9"}', r"line 2, byte 25: not UTF-8"),
    "cut.txt.gz": (gzip.compress(GOOD * 999)[:-12], "is damaged"),
    "noise.txt.gz": (b"this is no gzip file", "is damaged"),
    "changed.txt.gz": (gzip.compress(GOOD)[:-8] + b"\0" * 8, "is damaged"),
    "cut.txt.xz": (lzma.compress(GOOD * 999)[:-30], "is damaged"),
    "noise.txt.xz": (b"this is no xz file at all", "is damaged"),
    "cut.txt.zst": (zstandard.compress(GOOD * 999)[:-6], "is damaged"),
    "noise.txt.zst": (b"this is no zstandard file", "is damaged"),
    "words.jsonl": (b'{"text": "ok"}\nwords\n', r'line 2: not a JSON object with a string "text"'),
    "list.jsonl": (b'["text"]\n', r'line 1: not a JSON object with a string "text"'),
    "absent.jsonl": (b'{"title": "no text here"}\n', r'line 1: not a JSON object with a string "text"'),
    "number.jsonl": (b'{"text": 7}\n', r'line 1: not a JSON object with a string "text"'),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', r'line 1: not a JSON object with a string "text"'),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_name_file_and_line(tmp_path, name):
    content, message = CASES[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(InputFile(path).documents())


@pytest.mark.parametrize("content", [b"x" * 300, b"y" * 90 + b"\n" + b"z" * 90])
def test_documents_have_a_maximum_size(tmp_path, monkeypatch, content):
    """A file without blank lines is one document, which must not be read into memory."""
    monkeypatch.setattr(reading, "LARGEST_DOCUMENT_BYTES", 128)
    path = tmp_path / "text.txt"
    path.write_bytes(b"short\n\n" + content)
    with pytest.raises(UserError, match=r"from line 3 on is larger than .* blank line between documents"):
        list(InputFile(path).documents())
