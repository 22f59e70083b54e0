"""Data inside of OUT of a fine-tuning command: when they are made, kept, made again and refused."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.text.prepared_data import prepared_data


class Preparation:
    """Data of one file: its words, each ended by the name of the tokenizer. ``count``: how often they were made."""

    def __init__(self, folder: Path) -> None:
        self.out, self.source, self.count = folder / "out", folder / "train.txt", 0
        self.source.write_text("a b")

    def __call__(self, tokenizer: str = "T", during: Callable[[], Any] = int, **settings: Any) -> str:
        def write(directory: Path) -> None:
            self.count += 1
            directory.joinpath("begun").write_text("")
            during()
            words = self.source.read_text().split()
            directory.joinpath("words").write_text("".join(f"{word}{tokenizer}" for word in words))

        fake: Any = SimpleNamespace(sha256=tokenizer)
        results, sources = ["runs/toy", "results.json"], {"train": self.source}
        folder = prepared_data(self.out, "toy/words", sources, fake, settings, write, results)
        assert folder == self.out / "data" / "toy" / "words"
        return (folder / "words").read_text()

    def files(self) -> set[str]:
        return {str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file()}


@pytest.fixture
def prepare(tmp_path: Path) -> Preparation:
    return Preparation(tmp_path)


COMPLETE = {f"data/toy/words/{name}" for name in ("begun", "words", ".made_from.json")}


def test_made_once_and_again_after_each_change(prepare: Preparation) -> None:
    assert prepare(rows=(1, 2)) == prepare(rows=[1, 2]) == "aTbT"
    assert prepare.count == 1
    assert prepare.files() == COMPLETE
    prepare.source.write_text("c")
    assert prepare(rows=(1, 2)) == "cT"
    assert prepare("U", rows=(1, 2)) == "cU"
    assert prepare("U", rows=3) == "cU"
    assert prepare.count == 4
    assert prepare.files() == COMPLETE


def test_a_source_can_be_a_folder(tmp_path: Path) -> None:
    """As datasets saves tables: a change of a file in it, or of its name, counts."""
    made: list[Path] = []
    (tmp_path / "table").mkdir()

    def number_made() -> int:
        prepared_data(tmp_path / "out", "table", {"train": tmp_path / "table"}, None, {}, made.append, [])
        return len(made)

    for changes in (["a", "1"], ["a", "2"], ["b", "2"]):
        before = number_made()
        (tmp_path / "table" / changes[0]).write_text(changes[1])
        assert [number_made(), number_made()] == [before + 1] * 2


def test_data_with_results_are_not_replaced_by_others(prepare: Preparation) -> None:
    result = "runs/toy"
    prepare()
    before = {path: path.stat().st_mtime_ns for path in prepare.out.rglob("*") if path.is_file()}
    (prepare.out / result).mkdir(parents=True)
    prepare.source.write_text("c")
    with pytest.raises(UserError, match=f"the file train.txt of .* another --out, or delete .*{result} to begin again"):
        prepare()
    assert before == {path: path.stat().st_mtime_ns for path in prepare.out.rglob("*") if path.is_file()}
    prepare.source.write_text("a b")
    assert prepare() == "aTbT"
    assert prepare.count == 1
    # The same data again: they belong to the results.
    (prepare.out / "data/toy/words/words").write_text("aT")
    assert prepare() == "aTbT"
    assert prepare.count == 2
    (prepare.out / result).rmdir()
    prepare.source.write_text("c")
    assert prepare() == "cT"


@pytest.mark.parametrize("split", ["dev", "valid"])
def test_a_dev_file_that_only_one_of_two_commands_has(split: str, tmp_path: Path) -> None:
    """What the message asks for continues with the data that are there."""
    (tmp_path / "a.txt").write_text("a")
    train, made = {"train": tmp_path / "a.txt"}, []
    both = train | {split: tmp_path / "a.txt"}
    for first, then, message in (
        (train, both, r"\(it was made without --dev\), .* those data: leave it out, give another --out, or"),
        (both, train, r"\(it was made with --dev\), .* those data: give it, give another --out, or delete"),
    ):
        out = tmp_path / f"out{len(first)}"
        prepared_data(out, "toy", first, None, {}, made.append, ["runs/toy"])
        (out / "runs" / "toy").mkdir(parents=True)
        with pytest.raises(UserError, match=message):
            prepared_data(out, "toy", then, None, {}, made.append, ["runs/toy"])
        prepared_data(out, "toy", first, None, {}, made.append, ["runs/toy"])
    assert len(made) == 2


def test_a_failure_leaves_the_earlier_data_or_nothing(prepare: Preparation) -> None:
    def fail() -> None:
        raise UserError("train.txt, line 1: no label")

    with pytest.raises(UserError, match="no label"):
        prepare(during=fail)
    assert not prepare.out.exists()
    prepare()
    prepare.source.write_text("c")
    with pytest.raises(UserError, match="no label"):
        prepare(during=fail)
    assert prepare.files() == COMPLETE
    assert (prepare.out / "data/toy/words/words").read_text() == "aTbT"
    assert prepare() == "cT"


def test_a_killed_process_leaves_nothing_that_is_taken_for_data(prepare: Preparation) -> None:
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=prepare, kwargs={"during": lambda: os.kill(os.getpid(), signal.SIGKILL)})
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not (prepare.out / "data/toy/words").exists()
    assert prepare() == "aTbT"
    assert prepare.files() == COMPLETE


def test_other_folders_links_and_bad_records_are_not_replaced(prepare: Preparation, tmp_path: Path) -> None:
    folder = prepare.out / "data/toy/words"
    folder.mkdir(parents=True)
    (folder / "thesis").write_text("all of it")
    with pytest.raises(UserError, match="was not written by this command"):
        prepare()
    (folder / ".made_from.json").write_text("{")
    with pytest.raises(UserError, match=r"made_from.json .*delete .*words and repeat"):
        prepare()
    (folder / ".made_from.json").unlink()
    (folder / ".made_from.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        prepare()
    assert (folder / "thesis").read_text() == "all of it"
