"""Damaged and foreign files of a corpus, noticed before the first update, and by ``amos verify``."""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from saved_models import small_tokenizer
from synthetic_corpus import make_task, write_corpus, write_split

from amos_fairseq.cli.main import main
from amos_fairseq.data.corpus import check_prepared, verify_files
from amos_fairseq.errors import UserError
from amos_fairseq.files import sample_sha256
from amos_fairseq.text.prepare import file_hashes


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """One shard with the part of ``corpus.json`` that amos prepare stores for these checks."""
    directory = write_corpus(tmp_path / "corpus", tokenizer=False)
    tokenizer = small_tokenizer()
    tokenizer.save(directory / "tokenizer")
    shutil.copy(directory / "tokenizer" / "dict.txt", directory)
    shard = {"directory": ".", **file_hashes(directory)}
    manifest = {"tokenizer": {"sha256": tokenizer.sha256}, "shards": [shard]}
    (directory / "corpus.json").write_text(json.dumps(manifest))
    return directory


def change(path: Path, offset: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    path.write_bytes(content)


def cut(path: Path, by: int = 1) -> None:
    path.write_bytes(path.read_bytes()[:-by])


# name -> (what happens to DIR/train.bin or .idx, the reason that is given without corpus.json, or None)
DAMAGE: dict[str, tuple[Callable[[Path], None], str | None]] = {
    "text cut": (lambda d: cut(d / "train.bin", 100), "train.bin has .* bytes, its index describes"),
    "text longer": (lambda d: (d / "train.bin").open("ab").write(b"xx"), "train.bin has .* bytes, its index describes"),
    "index cut": (lambda d: cut(d / "train.idx"), "train.idx has .* bytes, its 60 lines need"),
    "index of three bytes": (lambda d: (d / "train.idx").write_bytes(b"MMI"), "train.idx is not an index of fairseq"),
    "index empty": (lambda d: (d / "train.idx").write_bytes(b""), "train.idx is not an index of fairseq"),
    "another magic": (lambda d: change(d / "train.idx", 0, b"X"), "train.idx is not an index of fairseq"),
    "another version": (lambda d: change(d / "train.idx", 9, b"\7"), "train.idx is not an index of fairseq"),
    "another dtype": (lambda d: change(d / "train.idx", 17, b"\4"), "train.bin has .* bytes, its index describes"),
    "no dtype": (lambda d: change(d / "train.idx", 17, b"\x63"), "train.idx is not an index of fairseq"),
    "more lines": (lambda d: change(d / "train.idx", 18, struct.pack("<Q", 2**62)), "train.idx has .* bytes"),
    "another length": (lambda d: change(d / "train.idx", 26, b"\x7f"), "lengths of its lines do not add up"),
    "a negative length": (lambda d: change(d / "train.idx", 26, b"\xff\xff\xff\xff"), "do not add up"),
    "other ids": (lambda d: change(d / "train.bin", 10, b"\5\0\6\0"), None),
    "another corpus": (lambda d: write_split(d, "train", 60, seed=7), None),
}


@pytest.mark.parametrize("with_hashes", [True, False])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed_before_training(corpus: Path, name: str, with_hashes: bool) -> None:
    harm, reason = DAMAGE[name]
    make_task(corpus).load_dataset("train")
    harm(corpus)
    if not with_hashes:
        (corpus / "corpus.json").unlink()
        if reason is None:  # a whole text of another corpus
            return
    expected = reason if reason and "add up" not in reason else "train.... is not the file that amos prepare"
    with pytest.raises(UserError, match=expected if with_hashes else reason):
        make_task(corpus).load_dataset("train")


@pytest.mark.parametrize("with_hashes", [True, False])
def test_a_cut_tokenizer_is_noticed_before_training(corpus: Path, with_hashes: bool) -> None:
    if not with_hashes:
        (corpus / "corpus.json").unlink()
    (corpus / "tokenizer" / "notes.txt").write_text("mine")  # no part of the tokenizer
    make_task(corpus)
    files = [path for path in (corpus / "tokenizer").iterdir() if path.name not in ("dict.txt", "notes.txt")]
    cut(max(files, key=lambda path: path.stat().st_size), 200)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a usable tokenizer\.json"):
        make_task(corpus)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"shards": 3, "tokenizer": {"sha256": ""}}', "\0", "[" * 9999])
def test_a_damaged_manifest_is_one_line(corpus: Path, content: str) -> None:
    (corpus / "corpus.json").write_text(content)
    with pytest.raises(UserError, match=r"corpus\.json .*is damaged, or was not written by amos prepare"):
        make_task(corpus)


def test_a_dictionary_that_is_not_utf8_is_one_line(corpus: Path) -> None:
    shutil.rmtree(corpus / "tokenizer")
    (corpus / "dict.txt").write_bytes(b"\xff\xfe 1\n")
    with pytest.raises(UserError, match=r"dict\.txt is not a fairseq dictionary"):
        make_task(corpus)


def test_verify_reads_everything(corpus: Path, capsys: pytest.CaptureFixture) -> None:
    """A byte between the samples of a large file, which training does not read."""
    assert main(["verify", str(corpus)]) == 0
    size = sum(path.stat().st_size for path in corpus.glob("*.[bi]*"))
    assert f"the {size:,} bytes in 1 shard and the tokenizer are as amos prepare wrote them" in capsys.readouterr().out
    change(corpus / "valid.bin", 4, b"\x09")
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(corpus)])
    assert ended.value.code == 1
    assert "valid.bin is missing, or not the file that amos prepare wrote" in capsys.readouterr().err
    (corpus / "corpus.json").unlink()
    with pytest.raises(UserError, match=r"has no corpus\.json: only a corpus of amos prepare can be verified"):
        verify_files([corpus])
    shutil.rmtree(corpus / "tokenizer")
    with pytest.raises(SystemExit):
        main(["verify", str(corpus)])
    assert f"{corpus}: the corpus has no folder tokenizer: copy that folder again" in capsys.readouterr().err


def test_a_sample_has_both_ends_and_the_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3_000_000))
    whole = sample_sha256(path)
    for offset, is_seen in ((0, True), (2_999_999, True), (100_000, False)):
        change(path, offset, b"x")
        assert (sample_sha256(path) != whole) is is_seen
        change(path, offset, b"\0")
    cut(path)
    assert sample_sha256(path) != whole


def test_prepared_files_are_all_there_and_unchanged(tmp_path: Path) -> None:
    """A missing second text would turn a task on pairs into one on first texts."""
    contents = {"input0/train.bin": b"0", "input1/train.bin": b"1", "input1/valid.bin": b"2", "dict.txt": b"3"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    manifest = tmp_path / "task.json"
    manifest.write_text(json.dumps({"sha256": hashes}))
    check_prepared(tmp_path, "task.json", "train")
    (tmp_path / "input1/valid.bin").unlink()
    check_prepared(tmp_path, "task.json", "train")
    (tmp_path / "input1/train.bin").unlink()
    for _ in range(2):
        with pytest.raises(UserError, match=r"input1/train\.bin is missing, or not the file that amos prepare wrote"):
            check_prepared(tmp_path, "task.json", "train")
        (tmp_path / "input1/train.bin").write_bytes(b"4")
