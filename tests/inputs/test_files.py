"""Lines and documents of every kind of file against the list that was written, in bounded memory."""

import gzip
import lzma
import tracemalloc
import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import zstandard
from synthetic_corpus import make_documents, write_jsonl, write_text

from amos_fairseq.errors import UserError
from amos_fairseq.inputs import files
from amos_fairseq.inputs.documents import DocumentFile
from amos_fairseq.inputs.files import SHOWN_CHARACTERS, kind_of, print_what_was_read, read_content, read_lines
from amos_fairseq.inputs.raw_words import is_blank

DOCUMENTS = make_documents(40)
EXPECTED = ["".join(f"{paragraph}\n" for paragraph in document).encode("utf-8") for document in DOCUMENTS]


COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": partial(lzma.compress, preset=0), ".zst": zstandard.compress}


def test_the_suffix_decides():
    kinds = {"a.tsv": files.TSV, "a.CSV.gz": files.CSV, "a.json.zst": files.JSONL, "a.parquet": files.PARQUET}
    kinds |= dict.fromkeys(("a.txt", "a", "a.html", "a.tsv.txt", "a.csv.bz2", "part-0001.gz"), files.TEXT)
    assert {name: kind_of(Path("/nowhere", name)) for name in kinds} == kinds


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_all_formats_give_the_same_documents(tmp_path, kind, suffix):
    """Compressed files may be concatenated with `cat`."""
    content = (write_text if kind == ".txt" else write_jsonl)(tmp_path / f"plain{kind}", DOCUMENTS).read_bytes()
    path, cut = tmp_path / f"corpus{kind}{suffix}", len(content) // 3
    path.write_bytes(COMPRESS[suffix](content[:cut]) + COMPRESS[suffix](content[cut:]))
    sizes = []
    assert list(DocumentFile(path).read(sizes.append)) == EXPECTED
    assert sum(sizes) == path.stat().st_size


def test_what_an_editor_shows_is_not_blank():
    assert not any(map(is_blank, [".", "a", "\u00a0a", "\u200b中", "\u0301", "\U0001f600", "\u200d_", "-"]))
    assert all(
        map(is_blank, ["", " \t", "\0", *"\u00a0\u3000\u200b\ufeff\u2060\u3164\u180e", "\u2003\u2009", "\ufe0f"])
    )


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
    with at_most(6 * files.BUFFER_BYTES):
        assert sum(1 for _ in DocumentFile(path).read()) == 12_000


@pytest.mark.parametrize(("unit", "message"), [(b"x", "txt.*, line 3: longer"), (b"a\n", "from line 3 on: longer")])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_large_document_is_refused_in_constant_memory(tmp_path, monkeypatch, suffix, unit, message):
    """50 MB without a blank line, as text or in at most 100 KB. zstandard's decompressor would return them at once."""
    monkeypatch.setattr(files, "LARGEST_DOCUMENT_BYTES", 1 << 17)
    path = tmp_path / f"bomb.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](b"one\n\n" + unit * (50_000_000 // len(unit))))
    assert suffix == "" or path.stat().st_size < 100_000
    message = rf"{message} than 0\.125 MiB.* blank line between documents"
    with at_most(20 << 20), pytest.raises(UserError, match=message):
        list(DocumentFile(path).read())


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
        with pytest.raises(UserError, match=rf"text.txt{suffix} .* compressed with a window of more than 128 MiB"):
            list(read_lines(path))


def test_kind_columns_counts_and_the_first_row(capsys):
    left_out = {"without label": 3, "without text": 0}
    print_what_was_read(Path("reviews.tsv"), "TSV", ["text", "label"], 1200, left_out, "good\tfilm -> pos", "classify")
    assert capsys.readouterr().err == (
        "classify: reviews.tsv: TSV, columns text, label: 1,200 rows; left out: 3 without label\n"
        "classify: reviews.tsv: the first: good film -> pos\n"
    )
    print_what_was_read(Path("a.txt"), "text", [], 1, {}, "x" * 999, what="lines")
    assert capsys.readouterr().err == (
        f"prepare: a.txt: text: 1 lines\nprepare: a.txt: the first: {'x' * SHOWN_CHARACTERS} ...\n"
    )
