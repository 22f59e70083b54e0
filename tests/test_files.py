"""Files that replace others whole, when two processes write the same one and when one of them is killed."""

import json
import multiprocessing
import os
import socket
from pathlib import Path

import pytest

from amos_fairseq import files
from amos_fairseq.checkpoint_files import checkpoint_file
from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.files import take_lock, whole_file, whole_folder


def unfinished_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if ".unfinished." in path.name)


def test_each_process_writes_to_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers at once: each takes the place of the target with its own, whole content."""
    path = tmp_path / "page.html"
    with whole_file(str(path)) as first:
        assert first.endswith(".html")
        Path(first).write_text("first")
        # 1 is a process that always runs, so that its file is not taken for one left behind
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with whole_file(str(path)) as second:
            Path(second).write_text("second, longer")
            assert len(unfinished_files(tmp_path)) == 2
        assert path.read_text() == "second, longer"
    assert path.read_text() == "first"
    assert unfinished_files(tmp_path) == []


def test_json_names_a_path_that_is_no_text(tmp_path: Path) -> None:
    """A file name may be any bytes; in the locale C, each letter that is not ASCII is such bytes."""
    path, file = os.fsdecode(b"/data/\xff"), tmp_path / "record.json"
    files.write_text(file, files.json_text({"path": path, "text": "é"}))
    assert json.loads(file.read_text(encoding="utf-8")) == {"path": path, "text": "é"}
    assert files.json_text({"text": "é"}) == '{\n  "text": "é"\n}\n'


def test_messages_are_one_line_that_changes_no_terminal(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit), report_user_errors():
        raise UserError("a\nb \x1b[2Jc \udcff é \x07 日本\r")
    assert capsys.readouterr().err == "amos_fairseq: error: a b \ufffd[2Jc \ufffd é \ufffd 日本\n"
    with pytest.raises(SystemExit), report_user_errors():
        raise UserError(f"a {'x' * 5000}: give b")
    line = capsys.readouterr().err
    assert line.startswith("amos_fairseq: error: a xxx")
    assert line.endswith("xxx: give b\n")
    assert len(line) < 2100


def test_a_lock_says_who_holds_it_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with multiprocessing.get_context("spawn").Pool(1) as other:
        holder = other.apply(hold_until_the_end, (path,))
        with pytest.raises(UserError, match=rf"^OUT is in use \(process {holder} on {socket.gethostname()}\): wait$"):
            take_lock(path, "OUT is in use", "wait")
        other.terminate()
        other.join()
    lock = take_lock(path, "OUT is in use", "wait")
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        take_lock(path, "OUT is in use", "wait")
    lock.release()
    take_lock(path, "", "").release()


def hold_until_the_end(path: Path) -> int:
    held.append(take_lock(path, "", ""))
    return os.getpid()


held: list[object] = []  # a lock is released when nothing refers to it


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_older_file_alone(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("older")

    def write_half() -> None:
        with whole_file(str(path)) as unfinished:
            Path(unfinished).write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "older"


def test_what_a_killed_process_left_goes_with_the_next_writing(tmp_path: Path) -> None:
    """Only of processes of this machine: whether another machine's run goes on cannot be seen from here."""
    path = tmp_path / "checkpoint_last.pt"
    gone = multiprocessing.get_context("fork").Process()
    gone.start()
    gone.join()
    left = tmp_path / f"checkpoint_last.unfinished.{socket.gethostname()}.{gone.pid}.pt"
    elsewhere = tmp_path / f"checkpoint_last.unfinished.another-host.{gone.pid}.pt"
    other_target = tmp_path / f"checkpoint_best.unfinished.{socket.gethostname()}.{gone.pid}.pt"
    for file in (left, elsewhere, other_target):
        file.write_bytes(b"part")
    with whole_file(str(path)) as unfinished:
        Path(unfinished).write_bytes(b"new")
    assert unfinished_files(tmp_path) == sorted([elsewhere.name, other_target.name])
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(("saved", "chosen"), [("1_10 last best", "last"), ("best", "best")])
def test_checkpoint_of_a_folder(saved: str, chosen: str, tmp_path: Path) -> None:
    for name in saved.split():
        (tmp_path / f"checkpoint_{name}.pt").touch()
    assert checkpoint_file(tmp_path) == tmp_path / f"checkpoint_{chosen}.pt"


@pytest.mark.parametrize(
    ("there", "advice"),
    [
        (
            "metrics.jsonl",
            "give a checkpoint or the SAVE_DIR of a run that has saved one; or hf download NAME --local-dir DIR",
        ),
        ("model.pt", "give .*/model.pt"),
        ("run/checkpoint_last.pt", "give .*/run/checkpoint_last.pt"),  # of amos adapt
        ("runs/rte/seed1/checkpoint_last.pt", "fine-tuning results, give one of their runs, such as .*/runs/rte/seed1"),
    ],
)
def test_a_folder_without_a_checkpoint_names_what_it_has(there: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).touch()
    with pytest.raises(UserError, match=rf"checkpoint_last\.pt is missing: .*{advice}$"):
        checkpoint_file(tmp_path)


@pytest.mark.parametrize("kind", ["folder", "file", "link", "broken link"])
def test_a_whole_folder_replaces_what_is_there(kind: str, tmp_path: Path) -> None:
    """A link is replaced, and the folder that it leads to stays."""
    place, other = tmp_path / "place", tmp_path / "other"
    (other if kind == "link" else place if kind == "folder" else tmp_path / "x").mkdir()
    if kind == "file":
        place.touch()
    elif "link" in kind:
        place.symlink_to(other)
    # As left by a process with this id, in a container that is started again.
    (tmp_path / f".place.unfinished.{socket.gethostname()}.{os.getpid()}" / "old").mkdir(parents=True)
    with whole_folder(place, replace=True) as unfinished:
        (unfinished / "new").touch()
    assert sorted(path.name for path in place.iterdir()) == ["new"]
    assert not place.is_symlink()
    assert not any("replaced" in path.name for path in tmp_path.iterdir())
    assert other.is_dir() == (kind == "link")


def test_runs_are_named_by_what_differs(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a/run", "b/run", "c")]
    assert files.distinct_names(paths) == ["a/run", "b/run", f"{tmp_path.name}/c"]
    assert files.distinct_names(paths[1:]) == ["run", "c"]
    assert files.distinct_names(paths[:2]) == ["a", "b"]
    assert files.distinct_names([*paths[:1], "/other/a/run"]) == [tmp_path.name, "other"]
    assert files.distinct_names(paths[:1]) == ["a"]
    assert files.distinct_names([]) == []
