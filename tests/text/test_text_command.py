"""amos prepare: errors in one line with nothing written, Ctrl-C and kill -9."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from preparing import prepare
from synthetic_corpus import file_bytes, make_documents, write_text
from tiny_runs import ROOT
from waiting import wait_until

main = prepare("text")


def text(directory: Path) -> Path:
    return write_text(directory / "text.txt", make_documents(60))


def tokenizer_directory(directory: Path) -> Path:
    """A tokenizer as amos prepare leaves it."""
    main([text(directory), "--out", directory / "made", "--vocab-size", "150", "--workers", "1"])
    return directory / "made" / "tokenizer"


def mismatched(directory: Path) -> Path:
    tokenizer = tokenizer_directory(directory)
    dictionary = tokenizer / "dict.txt"
    first, second, *rest = dictionary.read_text(encoding="utf-8").split("\n")
    dictionary.write_text("\n".join([second, first, *rest]), encoding="utf-8")
    return tokenizer


def with_tokenizer(directory: Path, tokenizer: Path) -> list[object]:
    return [text(directory), "--tokenizer", tokenizer]


def written(directory: Path, name: str, content: bytes) -> Path:
    (directory / name).write_bytes(content)
    return directory / name


BAD = {
    "no such file": (lambda d: [d / "absent.txt"], "absent.txt: no such file"),
    "directory": (lambda d: [d], "is not a file: give the files themselves"),
    "archive": (lambda d: [text(d), written(d, "wiki.xml.bz2", b"BZh9")], "wiki.xml.bz2: .bz2 files are not supported"),
    "empty": (lambda d: [text(d), written(d, "empty.txt", b"")], "empty.txt is empty"),
    "latin": (lambda d: [text(d), written(d, "latin.txt", b"good\n\ncaf\xe9\n")], "line 3, byte 9: not UTF-8"),
    "twice": (lambda d: [text(d), text(d)], "given twice"),
    "one document": (lambda d: [written(d, "one.txt", b"one\ndocument\n")], "too small to leave a validation document"),
    "too many pieces": (lambda d: [text(d), "--vocab-size", 9999], "larger than the text allows: give at most"),
    "too few pieces": (lambda d: [text(d), "--vocab-size", 9], "give at least"),
    "too many codes": (lambda d: [text(d), "--bpe", "fastbpe", "--vocab-size", 9999], "larger than the text allows"),
    "no pieces": (lambda d: [text(d), "--vocab-size", 0], "must be greater than 0"),
    "no tokenizer": (lambda d: with_tokenizer(d, d / "absent"), "absent is not a directory"),
    "no model": (lambda d: with_tokenizer(d, d / "absent.model"), "absent.model: no such file"),
    "broken model": (lambda d: with_tokenizer(d, written(d, "given.model", b"\xff\xfe")), "not a SentencePiece model"),
    "empty tokenizer": (lambda d: with_tokenizer(d, d), "holds no tokenizer"),
    "broken tokenizer": (lambda d: with_tokenizer(d, written(d, "tokenizer.json", b"{").parent), "is not a usable"),
    "other dictionary": (lambda d: with_tokenizer(d, mismatched(d)), "in the same directory: they differ from line 1"),
    "both": (lambda d: [*with_tokenizer(d, tokenizer_directory(d)), "--vocab-size", 9], "cannot be combined with"),
    "share": (lambda d: [text(d), "--valid-share", 1], "--valid-share 1.0 must be between 0 and 1"),
    "shard": (lambda d: [text(d), "--shard-megabytes", 0], "--shard-megabytes 0.0 must be a finite number greater th"),
    "workers": (lambda d: [text(d), "--workers", 0], "--workers 0 must be at least 1"),
    "many workers": (lambda d: [text(d), "--workers", 2**31], "too many processes: give at most 1,024"),
    "many pieces": (lambda d: [text(d), "--vocab-size", 2**31], "is too large: give at most 4,194,304"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(tmp_path, refused, name):
    arguments, message = BAD[name]
    assert message in refused(*arguments(tmp_path), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unusable_output_directories_are_refused_and_unchanged(tmp_path, refused):
    source = text(tmp_path)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("dear")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "corpus.json").write_text("[]")
    messages = {
        foreign: "is not empty",
        tmp_path / "program": "was not written by amos prepare",
        tmp_path / "text.txt": "is not a directory",
        Path("/dev/full"): "is not a directory",
        tmp_path / "a:b": "by colons",
        tmp_path / "text.txt" / "below": "Not a directory",
    }
    for out, message in messages.items():
        assert message in refused(source, "--out", out)
    assert [path.name for path in foreign.iterdir()] == ["letter.txt"]


def test_second_run_on_the_same_directory_is_refused(tmp_path, refused):
    out = tmp_path / "out"
    (out / ".prepare").mkdir(parents=True)
    lock = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True)"
    command = [sys.executable, "-c", f"{lock}; time.sleep(60)", str(out / ".prepare" / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        line = refused(text(tmp_path), "--out", out, "--vocab-size", 150)
        other.kill()
    assert "another amos prepare is writing" in line


def wait_for_another_shard(out: Path, process: subprocess.Popen) -> None:
    def shards() -> set[Path]:
        return set((out / ".prepare").glob("shard*"))

    before = shards()
    wait_until(lambda: shards() - before or process.poll() is not None)
    assert process.poll() is None, process.stderr.read()


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_interrupted_and_killed_runs_continue(tmp_path):
    """Ctrl-C after the first of 15 shards, kill -9 after another one: no process remains, and the third run finishes.

    The working directory holds a package of the same name, which must not be imported instead of ours.
    """
    (tmp_path / "preprocess").mkdir()
    (tmp_path / "preprocess" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    source = write_text(tmp_path / "text.txt", make_documents(4000))
    flags = [str(source), "--vocab-size", "150", "--shard-megabytes", "0.1", "--workers", "2"]
    out = tmp_path / "out"

    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.Popen(
        ["bash", str(ROOT / "preprocess" / "pretraining" / "prepare.sh"), *flags, "--out", str(out)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=tmp_path,
        env={**os.environ, "VIRTUAL_ENV": sys.prefix, "PATH": path},
    )
    wait_for_another_shard(out, run)
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert "interrupted: repeat the command" in errors
    assert "Traceback" not in errors
    wait_until(lambda: group_is_gone(run.pid))
    assert {path.name for path in out.iterdir()} == {".prepare"}

    command = [sys.executable, "-m", "amos_start", "prepare", *flags, "--out", str(out)]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT)
    wait_for_another_shard(out, run)
    run.kill()
    run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL
    wait_until(lambda: group_is_gone(run.pid))
    assert {path.name for path in out.iterdir()} == {".prepare"}

    main([*flags, "--out", out])
    main([*flags, "--out", tmp_path / "uninterrupted", "--workers", "1"])
    assert file_bytes(out) == file_bytes(tmp_path / "uninterrupted")
