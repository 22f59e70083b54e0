"""amos prepare text --shard: the parts that several machines make are, together, the corpus of one run, byte for byte."""

import json
import shutil
from pathlib import Path

import pytest
from preparing import prepare
from synthetic_corpus import DOCUMENTS, FLAGS, file_bytes, make_task, write_text

from amos_fairseq.data.corpus import corpus_directories
from amos_fairseq.errors import UserError
from amos_fairseq.text import prepare as text

main = prepare("text")


def binarized(out: Path) -> dict[str, bytes]:
    return {name: content for name, content in file_bytes(out).items() if name != "corpus.json"}


def make_parts(folder: Path, flags: list[str], number: int) -> list[Path]:
    outs = [folder / f"part{index}" for index in range(number)]
    for index, out in enumerate(outs):
        main([*flags, "--out", out, "--workers", "1", "--shard", f"{index}/{number}"])
    return outs


def check_parts(outs: list[Path], expected: Path) -> None:
    """Every file of the corpus is in one part, but for the vocabulary, which is in all."""
    found: dict[str, bytes] = {}
    for out in outs:
        files = binarized(out)
        assert all(name.startswith("tokenizer/") for name in files.keys() & found.keys())
        found |= files
    assert found == binarized(expected)
    manifests = [json.loads((out / "corpus.json").read_text(encoding="utf-8")) for out in [expected, *outs]]
    whole, *parts = [manifest["shards"] for manifest in manifests]
    assert [record for part in parts for record in part] == whole


@pytest.fixture(scope="module")
def halves(corpus, tmp_path_factory) -> list[Path]:
    return make_parts(tmp_path_factory.mktemp("halves"), corpus[1], 2)


def test_parts_of_several_files_are_the_corpus_of_one_run(corpus, halves):
    check_parts(halves, corpus[0])
    task, whole = make_task(":".join(map(str, halves))), make_task(corpus[0])
    for each in (task, whole):
        each.load_dataset("valid")
    assert len(task.dataset("valid")) == len(whole.dataset("valid"))
    assert task.count_training_tokens().equal(whole.count_training_tokens())


def test_parts_of_one_file(tmp_path):
    flags = [write_text(tmp_path / "text.txt", DOCUMENTS), *FLAGS]
    main([*flags, "--out", tmp_path / "whole", "--workers", "1"])
    check_parts(make_parts(tmp_path, flags, 3), tmp_path / "whole")


def test_a_killed_part_continues(corpus, halves, tmp_path, monkeypatch, refused):
    """Killed at its third file: the others are not encoded again, and another part cannot continue there."""
    out, flags = corpus
    command = [*flags, "--out", tmp_path / "killed", "--workers", "1", "--shard", "1/2"]
    original, done = text.encode_file, []

    def encode(path):
        done.append(path.name)
        if len(done) == 3:
            raise SystemError("killed here")
        return original(path)

    monkeypatch.setattr(text, "encode_file", encode)
    with pytest.raises(SystemError, match="killed here"):
        main(command)
    assert "was not made of these inputs and settings" in refused(*command[:-1], "0/2")
    monkeypatch.setattr(text, "split_corpus", None)
    main(command)
    assert len(done) == len(set(done)) + 1
    check_parts([halves[0], tmp_path / "killed"], out)


def test_what_is_not_a_whole_corpus_is_refused(corpus, halves, tmp_path, refused):
    one, two = halves
    manifest = (two / "corpus.json").read_text(encoding="utf-8")
    others = []
    changes = {"seed": ('"seed": 1', '"seed": 2'), "tokenizer": ('"kind": "', '"kind": "other ')}
    for name, (before, after) in changes.items():
        assert before in manifest
        others.append(shutil.copytree(two, tmp_path / name))
        (others[-1] / "corpus.json").write_text(manifest.replace(before, after), encoding="utf-8")
    for given in ([one], [two, one], [one, one], *([one, other] for other in others), [one, two, two]):
        with pytest.raises(UserError, match="is not the whole corpus: give the directories of all parts"):
            corpus_directories(given)
    for value, message in {"2/2": "give I/N", "-1/2": "give I/N", "0": "give I/N", "3/99": "the text has"}.items():
        assert f"--shard {value}: {message}" in refused(*corpus[1], "--out", tmp_path / "no", f"--shard={value}")
    assert not (tmp_path / "no").exists()
