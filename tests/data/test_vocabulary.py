"""The dictionary and tokenizer of a corpus: compared, refused, copied beside the checkpoints, identified by their sha256."""

import errno
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from synthetic_corpus import make_task, write_corpus

from amos_fairseq.errors import UserError
from amos_fairseq.files import directory_sha256

READY = SimpleNamespace(awaits_token_counts=False, check_ready=lambda: None)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus")


def test_dictionaries_that_differ_are_refused(corpus: Path, tmp_path: Path) -> None:
    other = shutil.copytree(corpus, tmp_path / "other")
    with (other / "dict.txt").open("a") as file:
        file.write("more 1\n")
    with pytest.raises(UserError, match=r"other/dict.txt differs from .*corpus/dict.txt: all shards"):
        make_task(f"{corpus}:{other}")
    with pytest.raises(UserError, match=r"tokenizer/dict.txt differs from .*other/dict.txt: all shards"):
        make_task(other)
    (other / "dict.txt").write_text("no counts here\n")
    shutil.rmtree(other / "tokenizer")
    with pytest.raises(UserError, match=r"other/dict.txt is not a fairseq dictionary"):
        make_task(other)


def test_vocabulary_is_copied_beside_the_checkpoints(corpus: Path, tmp_path: Path) -> None:
    task = make_task(corpus, save_dir=str(tmp_path / "run"))
    task.begin_epoch(1, READY)
    copy = tmp_path / "run" / "tokenizer"
    assert sorted(path.name for path in copy.iterdir()) == ["dict.txt", "tokenizer.json", "tokenizer.settings.json"]
    assert (copy / "dict.txt").read_bytes() == (corpus / "dict.txt").read_bytes()
    assert list((tmp_path / "run").iterdir()) == [copy]
    written = (copy / "dict.txt").stat().st_mtime_ns
    task.begin_epoch(2, READY)
    assert (copy / "dict.txt").stat().st_mtime_ns == written
    state = task.state_dict()
    assert state["dictionary_sha256"] == hashlib.sha256((corpus / "dict.txt").read_bytes()).hexdigest()
    assert state["tokenizer_sha256"] == directory_sha256(corpus / "tokenizer") == directory_sha256(copy)
    assert make_task(copy).state_dict()["dictionary_sha256"] == state["dictionary_sha256"]


def test_directory_hash_depends_on_names_and_contents(tmp_path: Path) -> None:
    def digest(files: dict[str, str]) -> str:
        directory = tmp_path / "hashed"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
        return directory_sha256(directory)

    same = {"a": "xy", "b": "z"}
    assert digest(same) == digest({"b": "z", "a": "xy", ".hidden": "left out"})
    others = [{"a": "x", "b": "yz"}, {"a": "z", "b": "xy"}, {"ab": "xyz"}, {"a": "xy", "c": "z"}, {"a": "xy"}]
    assert len({digest(files) for files in [same, *others]}) == 6


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """``as_rank(r)``: make this process rank r of two; rank 1 receives the broadcasts of rank 0."""
    sent = []

    def broadcast(objects: list, src: int) -> None:
        if torch.distributed.get_rank() == src:
            sent.append(objects[0])
        else:
            objects[0] = sent.pop(0)

    def become(rank: int) -> None:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    return become


def test_save_dir_of_another_vocabulary_is_refused_by_every_rank(corpus, tmp_path, as_rank) -> None:
    other = write_corpus(tmp_path / "other", tokenizer=False)
    with (other / "dict.txt").open("a") as file:
        file.write("more 1\n")
    make_task(other, save_dir=str(tmp_path / "run")).vocabulary.copy_into(str(tmp_path / "run"))
    task = make_task(corpus, save_dir=str(tmp_path / "run"))
    as_rank(0)
    with pytest.raises(UserError, match=r"run/tokenizer is damaged, or belongs to a run with another vocabulary"):
        task.begin_epoch(1, READY)
    as_rank(1)
    with pytest.raises(SystemExit) as ended:
        task.begin_epoch(1, READY)
    assert ended.value.code == 1


def test_a_full_disk_ends_every_rank_and_leaves_nothing(corpus, tmp_path, as_rank, monkeypatch) -> None:
    def write_half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", write_half)
    task = make_task(corpus, save_dir=str(tmp_path / "run"))
    as_rank(0)
    with pytest.raises(UserError, match=r"run/tokenizer cannot be written \(No space left on device\): make room"):
        task.begin_epoch(1, READY)
    assert list((tmp_path / "run").iterdir()) == []
    as_rank(1)
    with pytest.raises(SystemExit):
        task.begin_epoch(1, READY)


def test_checkpoint_of_another_vocabulary_is_refused(corpus: Path, tmp_path: Path) -> None:
    task = make_task(corpus)
    task.load_state_dict(make_task(corpus).state_dict())
    task.load_state_dict({})  # a checkpoint of stock fairseq
    with pytest.raises(UserError, match=r"trained with another dictionary than .*dict.txt"):
        task.load_state_dict({**task.state_dict(), "dictionary_sha256": "0" * 64})
    with pytest.raises(UserError, match=r"trained with another tokenizer"):
        task.load_state_dict({**task.state_dict(), "tokenizer_sha256": "0" * 64})
    assert task.state_dict() == make_task(corpus).state_dict()
