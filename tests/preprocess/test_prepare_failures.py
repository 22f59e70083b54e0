"""prepare.sh's program with a full disk and killed at any stage: it goes on, to the bytes of an undisturbed run."""

import itertools
import os
import resource

import pytest
from pretraining_corpus import FLAGS, file_bytes

from preprocess.pretraining import encoding, prepare, vocabulary
from preprocess.pretraining.workspace import Workspace


def limit_file_size(monkeypatch, module, name: str, size: int) -> None:
    """From the call of ``module.name`` on no file may grow beyond ``size``: what a full disk looks like."""
    original = getattr(module, name)

    def limited(*arguments, **keywords):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return original(*arguments, **keywords)

    monkeypatch.setattr(module, name, limited)


@pytest.fixture
def restore_file_size():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("module", "name", "kept"),
    [
        (prepare, "split_corpus", None),
        (prepare, "in_own_process", {"text"}),
        (encoding, "encode_files", {"text", "tokenizer"}),
        (Workspace, "save_counts", {"text", "tokenizer"}),
        (Workspace, "publish", {"text", "tokenizer", "shard0", "shard1", "shard2"}),
    ],
)
def test_full_disk(reference, tmp_path, monkeypatch, refused, restore_file_size, module, name, kept):
    """One line at every stage, only whole parts stay, and with room again the corpus is that of an easy run."""
    easy, flags = reference
    out = tmp_path / "corpus"
    with monkeypatch.context() as patch:
        limit_file_size(patch, module, name, 300)
        line = refused(*flags, "--out", out)
    restore_file_size()
    assert "no space left" in line
    assert "make room" in line
    if kept is None:
        assert not out.exists()
    else:
        assert {path.name for path in out.iterdir()} == {".prepare"}
        parts = {path.name for path in (out / ".prepare").iterdir()} - {"identity.json", "lock"}
        assert kept == parts - {"shard3", "shard4"}
    prepare.main([*flags, "--out", str(out), "--workers", "2"])
    assert file_bytes(out) == file_bytes(easy)


@pytest.mark.parametrize("moves", [1, 4, 8])
def test_killed_while_publishing(reference, tmp_path, monkeypatch, moves):
    """The last step moves files one by one; wherever it ends, the next run ends it."""
    easy, flags = reference
    original, count = os.replace, itertools.count()

    def replace(source, target):
        if ".prepare" not in str(target) and next(count) == moves:
            raise SystemError("killed here")
        return original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(SystemError, match="killed here"):
            prepare.main([*flags, "--out", str(tmp_path / "corpus"), "--workers", "1"])
    assert not (tmp_path / "corpus" / "corpus.json").exists()
    prepare.main([*flags, "--out", str(tmp_path / "corpus"), "--workers", "1"])
    assert file_bytes(tmp_path / "corpus") == file_bytes(easy)


def test_finished_shards_are_not_made_again(reference, tmp_path, monkeypatch):
    easy, flags = reference
    done = []
    original = encoding.encode_files

    def encode(paths, prefix, *arguments):
        if len(done) == 3:
            raise SystemError("killed here")
        done.append(f"{prefix.parent.name}/{prefix.name}")
        return original(paths, prefix, *arguments)

    command = [*flags, "--out", str(tmp_path / "corpus"), "--workers", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "encode_files", encode)
        with pytest.raises(SystemError, match="killed here"):
            prepare.main(command)
    assert done == ["shard0.unfinished/train", "shard0.unfinished/valid", "shard1.unfinished/train"]
    left = []
    monkeypatch.setattr(encoding, "encode_files", lambda *a: (left.append(a[1].parent.name), original(*a))[1])
    monkeypatch.setattr(vocabulary, "learn_tokenizer", None)
    monkeypatch.setattr(prepare, "split_corpus", None)
    prepare.main(command)
    assert left[0] == "shard2.unfinished"
    assert file_bytes(tmp_path / "corpus") == file_bytes(easy)


def test_unfinished_corpus_of_other_settings_is_kept(inputs, tmp_path, monkeypatch, refused):
    out = tmp_path / "corpus"
    with monkeypatch.context() as patch:
        patch.setattr(encoding, "encode_files", lambda *a: (_ for _ in ()).throw(SystemError("killed here")))
        with pytest.raises(SystemError, match="killed here"):
            prepare.main([*inputs, *FLAGS, "--out", str(out)])
    assert "unfinished corpus of other inputs or settings" in refused(*inputs, *FLAGS, "--seed", "2", "--out", out)
    assert (out / ".prepare" / "tokenizer" / "dict.txt").is_file()
