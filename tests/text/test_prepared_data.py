"""Folders of prepared data: named by their content in OUT of a fine-tuning command, and OUT of amos prepare."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.text.prepared_data import description_of, fill_out, prepared_data, read_manifest, write_manifest


class Preparation:
    """Data of one file: its words, each ended by the name of the tokenizer. ``count``: how often they were made."""

    def __init__(self, folder: Path) -> None:
        self.out, self.source, self.count = folder / "out", folder / "train.txt", 0
        self.source.write_text("a b")

    def describe(self, tokenizer: str = "T", **settings: Any) -> dict[str, Any]:
        fake: Any = SimpleNamespace(sha256=tokenizer)
        return description_of({"train": self.source}, fake, settings)

    def __call__(self, tokenizer: str = "T", during: Callable[[], Any] = int, **settings: Any) -> Path:
        def write(directory: Path) -> None:
            self.count += 1
            directory.joinpath("begun").write_text("")
            during()
            words = self.source.read_text().split()
            directory.joinpath("words").write_text("".join(f"{word}{tokenizer}" for word in words))

        return prepared_data(self.out, "toy", self.describe(tokenizer, **settings), write)

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.out / "data").iterdir())


@pytest.fixture
def prepare(tmp_path: Path) -> Preparation:
    return Preparation(tmp_path)


def words(folder: Path) -> str:
    return (folder / "words").read_text()


def test_each_content_has_its_folder_which_is_made_once(prepare: Preparation) -> None:
    first = prepare(rows=(1, 2))
    assert prepare(rows=[1, 2]) == first
    assert (prepare.count, words(first)) == (1, "aTbT")
    prepare.source.write_text("c")
    others = [prepare(rows=(1, 2)), prepare("U", rows=(1, 2)), prepare("U", rows=3)]
    assert list(map(words, others)) == ["cT", "cU", "cU"]
    prepare.source.write_text("a b")
    assert prepare(rows=(1, 2)) == first
    assert prepare.count == 4
    assert prepare.folders() == sorted(folder.name for folder in (first, *others))
    assert all(folder.parent == prepare.out / "data" and folder.name.startswith("toy-") for folder in others)


def test_a_source_can_be_a_folder(prepare: Preparation, tmp_path: Path) -> None:
    """As datasets saves tables: a change of a file in it, or of its name, counts."""
    prepare.source = tmp_path / "table"
    prepare.source.mkdir()
    described = []
    for name, content in (("a", "1"), ("a", "2"), ("b", "2")):
        (prepare.source / name).write_text(content)
        described.append(json.dumps(prepare.describe()))
    assert len(set(described)) == 3


def test_sources_are_there_and_have_names_in_utf_8(prepare: Preparation, tmp_path: Path) -> None:
    for name in ("absent", "b\udce9"):
        prepare.source = tmp_path / name
        with pytest.raises(UserError, match=r"no such file, or a name that is not UTF-8"):
            prepare.describe()


def test_a_failure_leaves_nothing(prepare: Preparation) -> None:
    def fail() -> None:
        raise UserError("train.txt, line 1: no label")

    with pytest.raises(UserError, match="no label"):
        prepare(during=fail)
    assert not prepare.out.exists()
    folder = prepare()
    with pytest.raises(UserError, match="no label"):
        prepare(during=fail, rows=3)
    assert prepare.folders() == [folder.name]


def in_another_process(prepare: Preparation, **options: Any) -> int:
    child = multiprocessing.get_context("fork").Process(target=prepare, kwargs=options)
    child.start()
    child.join()
    return child.exitcode


def test_a_killed_process_leaves_nothing_that_is_taken_for_data(prepare: Preparation) -> None:
    assert in_another_process(prepare, during=lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
    folder = prepare()
    assert (words(folder), prepare.folders()) == ("aTbT", [folder.name])


def test_of_two_commands_at_once_the_second_uses_what_the_first_made(prepare: Preparation) -> None:
    """Each writes its own folder; the other one is finished when this one is renamed."""
    folder = prepare(during=lambda: in_another_process(prepare))
    (made,) = (prepare.out / "data").iterdir()
    assert (folder, words(made)) == (made, "aTbT")


def test_out_of_prepare_is_empty_or_finished_or_refused(prepare: Preparation, tmp_path: Path) -> None:
    def fill(out: Path, **settings: Any) -> bool:
        description = prepare.describe(**settings)
        return fill_out(out, description, "toy.json", lambda folder: write_manifest(folder / "toy.json", description))

    out = tmp_path / "prepared"
    out.mkdir()
    assert [fill(out, rows=3), fill(out, rows=3)] == [True, False]
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "thesis").write_text("all of it")
    for other, settings in ((out, {"rows": 4}), (tmp_path / "letters", {}), (prepare.source, {})):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        with pytest.raises(UserError, match=r"^OUT .* is not empty, and was not made of .*: give another folder$"):
            fill(other, **settings)
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_manifest_is_read_back_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    with pytest.raises(UserError, match=r"toy\.json is missing: give a folder that amos prepare wrote"):
        read_manifest(path)
    write_manifest(path, {"rows": 3})
    assert read_manifest(path)["rows"] == 3
    for text, message in (
        ("{", "is not JSON"),
        ('{"format": 0}', "is not readable as prepared data: prepare the data"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_manifest(path)
