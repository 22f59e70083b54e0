"""amos prepare text: bad input in one line with nothing written; full disks, Ctrl-C and kill -9, after which it continues."""

import itertools
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from failures import full_disk
from preparing import prepare
from synthetic_corpus import file_bytes, make_documents, write_text
from tiny_runs import ROOT, wait_until
from tokenizer_text import word_level_directory

from amos_fairseq.errors import UserError
from amos_fairseq.files import take_lock
from amos_fairseq.text import prepare as text
from amos_fairseq.text.encoding import start_encoding_process

main = prepare("text")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Inputs that are bad in some way, beside a text."""
    folder = tmp_path_factory.mktemp("bad")
    contents = {"one.txt": b"one document\n", "lines.jsonl": b'{"body": "words"}\n'}
    contents |= {"broken/tokenizer.json": b"{", "none/notes": b""}
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    word_level_directory(folder / "words", ["one", "two"], absent=["[UNK]"])
    write_text(folder / "text.txt", make_documents(60))
    return folder


# The arguments behind text.txt, and what the refusal says.
BAD = {
    "absent.txt": "no such file",
    ".": "give a file",
    "lines.jsonl": "no column 'text', it has body",
    "--vocab-size 9999": "give at most",
    "--vocab-size 9": "give at least",
    f"--vocab-size {2**31}": "at most 4,194,304",
    "--tokenizer none": "holds no tokenizer",
    "--tokenizer broken": "is not a usable",
    "--tokenizer one.txt --vocabulary one.txt": "line 1 is",
    "--vocabulary one.txt": "--vocabulary needs --tokenizer CODES",
    "--tokenizer words": "the tokenizer cannot encode the text (WordLevel error: Missing [UNK]",
    "--tokenizer words --vocab-size 9": "leave out --vocab-size, --cased and --uncased",
    "--protect <mask>": "--protect '<mask>': give a token without spaces, other than <s>",
    "--protect a▁b": "--protect 'a\\u2581b'",
    "--tokenizer words --protect [E1]": "[E1] is special already, or not in its vocabulary",
    "--shard-megabytes nan": "--shard-megabytes: nan must be at least 1e-06 and at most 1,000,000,000",
    "--valid-share 0": "--valid-share: 0 must be at least 1e-06",
    f"--workers {2**31}": "at most 1,024",
}


def test_bad_input_is_one_line(folder, refused, monkeypatch):
    monkeypatch.chdir(folder)
    for arguments, named in BAD.items():
        assert named in refused("text.txt", *arguments.split(), "--out", "out"), arguments
        assert not Path("out").exists(), arguments


def test_unusable_output_directories_are_refused_and_unchanged(folder, tmp_path, refused):
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "letter.txt").write_text("dear")
    for out, message in {
        "foreign": "is not empty",
        "a:b/c": "has a colon, by which fairseq separates",
        "foreign/letter.txt": "is not empty",
    }.items():
        assert message in refused(folder / "text.txt", "--out", tmp_path / out)
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["letter.txt"]
    (tmp_path / "out" / ".prepare").mkdir(parents=True)
    lock = take_lock(tmp_path / "out" / ".prepare" / "lock", "", "")
    assert "another amos prepare is writing" in refused(folder / "text.txt", "--out", tmp_path / "out")
    lock.release()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "left"), [("split_corpus", None), ("encode_file", {"text", "tokenizer"})])
def test_full_disk(corpus, tmp_path, monkeypatch, refused, name, left):
    """From the call of a function on. Only whole parts remain, and the next run gives the corpus."""
    expected, flags = corpus
    out, original = tmp_path / "corpus", getattr(text, name)
    with monkeypatch.context() as patch, ExitStack() as disk:

        def fill_disk(*arguments, **keywords):
            disk.enter_context(full_disk(300))
            return original(*arguments, **keywords)

        patch.setattr(text, name, fill_disk)
        assert "no space left" in refused(*flags, "--out", out, "--workers", "1")
    if left is None:
        assert not out.exists()
    else:
        assert {path.name for path in (out / ".prepare").iterdir()} - {"made_of", "lock"} == left
    main([*flags, "--out", out, "--workers", "2"])
    assert file_bytes(out) == file_bytes(expected)


def test_killed_while_publishing(corpus, tmp_path, monkeypatch):
    """The last step moves files one by one; the next run completes it."""
    expected, flags = corpus
    original, count = os.replace, itertools.count()

    def replace(source, target):
        if ".prepare" not in str(target) and next(count) == 3:
            raise SystemError("killed here")
        return original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(SystemError, match="killed here"):
            main([*flags, "--out", tmp_path / "corpus", "--workers", "1"])
    assert not (tmp_path / "corpus" / "corpus.json").exists()
    main([*flags, "--out", tmp_path / "corpus", "--workers", "1"])
    assert file_bytes(tmp_path / "corpus") == file_bytes(expected)


def test_finished_parts_are_not_made_again(corpus, tmp_path, monkeypatch, refused):
    """Killed at the fifth file of text; other settings are refused, and a damaged part is noticed."""
    expected, flags = corpus
    command = [*flags, "--out", tmp_path / "corpus", "--workers", "1"]
    original, done = text.encode_file, []

    def encode(path):
        done.append(path.name)
        if len(done) == 5:
            raise SystemError("killed here")
        return original(path)

    monkeypatch.setattr(text, "encode_file", encode)
    with pytest.raises(SystemError, match="killed here"):
        main(command)
    assert done == ["valid.txt", "00000.txt", "00001.txt", "00002.txt", "00003.txt"]
    line = refused(*command, "--seed", "2")
    assert "is not empty, and was not made of these inputs and settings" in line
    monkeypatch.setattr(text, "learn_tokenizer", None)
    monkeypatch.setattr(text, "split_corpus", None)
    main(command)
    assert done[5] == "00003.txt"
    assert file_bytes(tmp_path / "corpus") == file_bytes(expected)


def test_a_damaged_part_is_noticed(corpus, tmp_path):
    out, _ = corpus
    (tmp_path / "text").mkdir()
    source = write_text(tmp_path / "text" / "00000.txt", make_documents(9))
    start_encoding_process(out / "tokenizer")
    text.encode_file(source)
    part = text.encoded_file(source)
    assert text.join_encoded([part], tmp_path / "whole", 204)["documents"] == 9
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (content, content[:-30]):
        part.write_bytes(damaged)
        with pytest.raises(UserError, match=r"00000.npz is damaged .*: what is unfinished was removed, repeat"):
            text.join_encoded([part], tmp_path / "whole", 204)


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def start_and_end(command: list[str], out: Path, end: signal.Signals, cwd: Path) -> None:
    """Start amos prepare, and end it when it has encoded another part: no process remains, nor anything but finished parts."""

    def parts() -> set[Path]:
        return set((out / ".prepare" / "text").glob("0*.npz"))

    before = parts()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PATH": path}
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=cwd, env=variables)
    wait_until(lambda: parts() - before or run.poll() is not None)
    assert run.poll() is None, run.stderr.read()
    is_ctrl_c = end == signal.SIGINT  # which reaches the whole group
    (os.killpg if is_ctrl_c else os.kill)(run.pid, end)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == (130 if is_ctrl_c else -end), errors
    assert ("interrupted: repeat the command" in errors) == is_ctrl_c
    assert "Traceback" not in errors
    wait_until(lambda: group_is_gone(run.pid))
    assert {path.name for path in out.iterdir()} == {".prepare"}


@pytest.mark.slow
def test_interrupted_and_killed_runs_continue(tmp_path):
    """By Ctrl-C and by kill -9; the third run finishes.

    The working directory holds a package of the same name, which must not be imported instead of ours.
    """
    (tmp_path / "preprocess").mkdir()
    (tmp_path / "preprocess" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    source = write_text(tmp_path / "text.txt", make_documents(6_000))
    flags = [str(source), "--vocab-size", "150", "--shard-megabytes", "0.1", "--workers", "2"]
    out = tmp_path / "out"
    script = ["bash", str(ROOT / "preprocess" / "pretraining" / "prepare.sh"), *flags, "--out", str(out)]
    start_and_end(script, out, signal.SIGINT, tmp_path)
    command = [sys.executable, "-m", "amos_start", "prepare", *flags, "--out", str(out)]
    start_and_end(command, out, signal.SIGKILL, ROOT)
    main([*flags, "--out", out])
    main([*flags, "--out", tmp_path / "uninterrupted", "--workers", "1"])
    assert file_bytes(out) == file_bytes(tmp_path / "uninterrupted")
