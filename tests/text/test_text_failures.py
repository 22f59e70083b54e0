"""amos prepare's program with a full disk or killed at any stage: the next run gives the bytes of an uninterrupted one."""

import itertools
import os
from contextlib import ExitStack

import pytest
from failures import full_disk
from preparing import prepare
from synthetic_corpus import FLAGS, file_bytes

from amos_fairseq.text import encoding as text_encoding
from amos_fairseq.text import prepare as text
from amos_fairseq.text.text_workspace import TextWorkspace

main = prepare("text")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "parts"),
    [
        (text, "split_corpus", None),
        (text, "in_own_process", {"text"}),
        (text_encoding, "encode_files", {"text", "tokenizer"}),
        (TextWorkspace, "save_counts", {"text", "tokenizer"}),
        (TextWorkspace, "publish", {"text", "tokenizer", "shard0", "shard1", "shard2"}),
    ],
)
def test_full_disk(reference, tmp_path, monkeypatch, refused, module, name, parts):
    """From the call of ``module.name`` on. Only whole parts remain, and the next run gives the corpus."""
    expected, flags = reference
    out, original = tmp_path / "corpus", getattr(module, name)
    with monkeypatch.context() as patch, ExitStack() as disk:

        def fill_disk(*arguments, **keywords):
            disk.enter_context(full_disk(300))
            return original(*arguments, **keywords)

        patch.setattr(module, name, fill_disk)
        line = refused(*flags, "--out", out)
    assert "no space left" in line
    assert "make room" in line
    if parts is None:
        assert not out.exists()
    else:
        assert {path.name for path in out.iterdir()} == {".prepare"}
        found = {path.name for path in (out / ".prepare").iterdir()} - {"identity.json", "lock"}
        assert parts == found - {"shard3", "shard4"}
    main([*flags, "--out", out, "--workers", "2"])
    assert file_bytes(out) == file_bytes(expected)


@pytest.mark.parametrize("moves", [1, 4, 8])
def test_killed_while_publishing(reference, tmp_path, monkeypatch, moves):
    """The last step moves files one by one; the next run completes it after any of them."""
    expected, flags = reference
    original, count = os.replace, itertools.count()

    def replace(source, target):
        if ".prepare" not in str(target) and next(count) == moves:
            raise SystemError("killed here")
        return original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(SystemError, match="killed here"):
            main([*flags, "--out", tmp_path / "corpus", "--workers", "1"])
    assert not (tmp_path / "corpus" / "corpus.json").exists()
    main([*flags, "--out", tmp_path / "corpus", "--workers", "1"])
    assert file_bytes(tmp_path / "corpus") == file_bytes(expected)


def test_finished_shards_are_not_written_again(reference, tmp_path, monkeypatch):
    expected, flags = reference
    done = []
    original = text_encoding.encode_files

    def encode(paths, prefix, *arguments):
        if len(done) == 3:
            raise SystemError("killed here")
        done.append(f"{prefix.parent.name}/{prefix.name}")
        return original(paths, prefix, *arguments)

    command = [*flags, "--out", tmp_path / "corpus", "--workers", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(text_encoding, "encode_files", encode)
        with pytest.raises(SystemError, match="killed here"):
            main(command)
    assert done == ["shard0.unfinished/train", "shard0.unfinished/valid", "shard1.unfinished/train"]
    left = []
    monkeypatch.setattr(text_encoding, "encode_files", lambda *a: (left.append(a[1].parent.name), original(*a))[1])
    monkeypatch.setattr(text, "learn_tokenizer", None)
    monkeypatch.setattr(text, "split_corpus", None)
    main(command)
    assert left[0] == "shard2.unfinished"
    assert file_bytes(tmp_path / "corpus") == file_bytes(expected)


def test_unfinished_corpus_of_other_settings_is_refused(inputs, tmp_path, monkeypatch, refused):
    out = tmp_path / "corpus"
    with monkeypatch.context() as patch:
        patch.setattr(text_encoding, "encode_files", lambda *a: (_ for _ in ()).throw(SystemError("killed here")))
        with pytest.raises(SystemError, match="killed here"):
            main([*inputs, *FLAGS, "--out", out])
    assert "unfinished corpus of other inputs or settings" in refused(*inputs, *FLAGS, "--seed", "2", "--out", out)
    assert (out / ".prepare" / "tokenizer" / "dict.txt").is_file()
