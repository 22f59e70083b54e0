"""Lines and documents of every kind of file against the list that was written; errors with file and line."""

import gzip
import json
import lzma
import tracemalloc
import zlib
from contextlib import contextmanager
from functools import partial

import pytest
import zstandard
from synthetic_corpus import make_documents, write_jsonl, write_text

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import file_kinds, input_files
from amos_fairseq.inputs.documents import read_documents
from amos_fairseq.inputs.input_files import read_content, read_lines

DOCUMENTS = make_documents(40)
EXPECTED = ["".join(f"{paragraph}\n" for paragraph in document).encode("utf-8") for document in DOCUMENTS]


COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": partial(lzma.compress, preset=0), ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_all_formats_give_the_same_documents(tmp_path, kind, suffix):
    """Compressed files may be concatenated with `cat`; gzip and xz write zeros behind, to fill blocks of a tape."""
    content = (write_text if kind == ".txt" else write_jsonl)(tmp_path / f"plain{kind}", DOCUMENTS).read_bytes()
    path, cut = tmp_path / f"corpus{kind}{suffix}", len(content) // 3
    zeros = bytes(2000 if suffix in (".gz", ".xz") else 0)
    path.write_bytes(COMPRESS[suffix](content[:cut]) + COMPRESS[suffix](content[cut:]) + zeros)
    sizes = []
    assert list(read_documents(path, on_read=sizes.append)) == EXPECTED
    assert sum(sizes) == path.stat().st_size


def test_line_ends_byte_order_marks_and_blank_lines(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf\r\n  one \r\n\ttwo\rthree\r\n \t \r\n\n\nfour\n\x0c\nfive  six")
    assert list(read_documents(path)) == [b"one\ntwo\nthree\n", b"four\n", b"five  six\n"]


def test_nul_characters_are_removed(tmp_path):
    """As bytes of a text or escaped in JSON; a line of nothing else is blank."""
    text, lines = tmp_path / "text.txt", tmp_path / "text.jsonl"
    text.write_bytes(b"\0o\0ne\0 two \0\nthr\0\0ee\n\0\0\nfour\n")
    lines.write_text('{"text": "o\\u0000ne two \\u0000\\nthree"}\n{"text": "\\u0000"}\n{"text": "four"}\n')
    for path in (text, lines):
        assert list(filter(None, read_documents(path))) == [b"one two\nthree\n", b"four\n"]


@contextmanager
def at_most(num_bytes):
    """Refuse more memory of Python at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def test_memory_is_constant(tmp_path):
    """At most six buffers of 10 MB of text."""
    path = tmp_path / "large.txt.gz"
    path.write_bytes(gzip.compress((b"a paragraph of words " * 40 + b"\n\n") * 12_000, compresslevel=1))
    with at_most(6 * file_kinds.BUFFER_BYTES):
        assert sum(1 for _ in read_documents(path)) == 12_000


GOOD = b"one line\n\nanother line\n"
CASES = {
    "blank.txt": (b" \n\n", "contains no text"),
    "latin.txt": ("first\nsecond caf\u00e9\n".encode("latin-1"), "line 2, byte 16: not UTF-8 .* iconv -f CP1252 -t"),
    "latin.jsonl": (b'{"text": "ok"}\n' + b'{"text": "\xe9"}', "line 2, byte 25: not UTF-8"),
    "cut.txt.gz": (gzip.compress(GOOD * 999)[:-12], "is damaged"),
    "changed.txt.gz": (gzip.compress(GOOD)[:-8] + b"\0" * 8, "is damaged"),
    "more.txt.gz": (gzip.compress(GOOD) + b"other bytes", "is damaged"),
    "cut.txt.xz": (lzma.compress(GOOD * 999)[:-30], "is damaged"),
    "more.txt.xz": (lzma.compress(GOOD) + b"other bytes", "is damaged"),
    "cut.txt.zst": (zstandard.compress(GOOD * 999)[:-6], "is damaged"),
    "words.jsonl": (b'{"text": "ok"}\nwords\n', "line 2 is not JSON .* each line has to be an object"),
    "cut.txt": (b'{"text": "ok"}\n' * 30 + b'{"text": "o', "line 31 is not JSON"),
    "list.jsonl": (b'{"text": ["ok"]}\n', "line 1: text is \\['ok'\\], not a text"),
    "number.json": (b'{"text": "ok"}\n{"text": 1}\n', "line 2: text is 1, not a text"),
    "absent.jsonl": (b'{"body": "x", "id": 1}\n', "no column 'text', it has 'body', 'id'"),
    "null.jsonl": (b'{"text": null}\n{"text": " "}\n', "contains no text in text"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', "contains no text in text"),
    "table.txt": (b"id,text\n1,words\n", "has the column text in its first line: .* .csv or .tsv"),
    "quoted": (b'"text"\t"label"\nwords\tb\n', "has the column text in its first line"),
    "page.html": (b"<!DOCTYPE html>\n" + b"words\n" * 30, "no plain text: .* tags such as <!DOCTYPE html>"),
    "page.txt": (b"<p>\nwords\n</p>\n" * 9, "no plain text: .* tags such as <p>"),
    "wiki_00": (b'<doc id="12" url="u">\n' + b"words\n" * 30, "WikiExtractor --json"),
    "gpt.txt": (b"one\n<|endoftext|>\ntwo\n<|endoftext|>\n", r"lines 2 and 4 are <.endoftext.>, which ends a document"),
    "gpt_cr.txt": (b"one\r<eos>\rtwo\r<eos>\rthree\r", "lines 1 and 1 are <eos>, which ends a document"),
    "other.csv": (b"a,b\n1,2\n", "no column 'text', it has 'a', 'b'"),
    "blank.csv": (b"text,b\n,2\n", "contains no text in text"),
}


def test_errors_name_file_and_line(tmp_path):
    for name, (content, message) in CASES.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}.*{message}"):
            list(read_documents(tmp_path / name))


@pytest.mark.parametrize(("unit", "message"), [(b"x", r"txt\S*, line 3: longer"), (b"a\n", "from line 3 on is larger")])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_large_document_is_refused_in_constant_memory(tmp_path, monkeypatch, suffix, unit, message):
    """50 MB without a blank line, as text or in at most 100 KB. zstandard's decompressor would return them at once."""
    monkeypatch.setattr(input_files, "LARGEST_DOCUMENT_BYTES", 1 << 17)
    path = tmp_path / f"bomb.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"one\n\n" + unit * (50_000_000 // len(unit))))
    assert suffix == "" or path.stat().st_size < 100_000
    message = rf"{message} than 0\.125 MiB.* blank line between documents"
    with at_most(20 << 20), pytest.raises(UserError, match=message):
        list(read_documents(path))


def test_json_of_many_lists_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    """Each takes eighty bytes. A text has few."""
    monkeypatch.setattr(file_kinds, "LARGEST_NUMBER_OF_BRACKETS", 1000)
    path = tmp_path / "lines.jsonl"
    documents = [{"text": "[a text] " * 999}, {"text": "a", "b": [{}] * 999}]
    path.write_text("\n".join(map(json.dumps, documents)))
    for read in (read_documents, lambda path: input_files.TableFile(path).rows()):
        with pytest.raises(UserError, match="line 2: more than 1,000 brackets"):
            list(read(path))


def test_whole_content_has_a_maximum_size(tmp_path):
    path = tmp_path / "small.json.zst"
    path.write_bytes(zstandard.compress(b"x" * 1000))
    assert read_content(path, limit=1000) == b"x" * 1000
    with pytest.raises(UserError, match=r"holds more than .* MiB: divide it"):
        read_content(path, limit=999)


def zstd_with_window(log):
    """A frame by hand: header, window of 2^log bytes, and one last block that repeats "x" 1,000 times."""
    return b"\x28\xb5\x2f\xfd\x00" + bytes([(log - 10) << 3]) + (1 | 1 << 1 | 1000 << 3).to_bytes(3, "little") + b"x"


def xz_with_window(log):
    """A small file whose header asks for a dictionary of 2^log bytes."""
    content = bytearray(lzma.compress(b"x" * 1000))
    content[16] = 2 * (log - 12)
    content[20:24] = zlib.crc32(content[12:20]).to_bytes(4, "little")
    return bytes(content)


@pytest.mark.parametrize(("suffix", "make"), [(".zst", zstd_with_window), (".xz", xz_with_window)])
def test_a_window_has_a_maximum_size(tmp_path, suffix, make):
    """A decompressor allocates the window that a file asks for, before it returns a byte."""
    path = tmp_path / f"text.txt{suffix}"
    path.write_bytes(make(27))
    assert list(read_lines(path)) == [(1, "x" * 1000)]
    for log in (28, 31):
        path.write_bytes(make(log))
        with pytest.raises(UserError, match=rf"text.txt{suffix} was compressed with a window of more than 128 MiB"):
            list(read_lines(path))
