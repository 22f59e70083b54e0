"""``amos glue``, ``squad``, ``tag`` and ``probe`` on raw files: the data are those of ``amos prepare``, kept in OUT. Nothing is
fine-tuned here: ``tests/train`` does that on such data."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from failures import error_line
from preparing import prepare
from synthetic_glue import write_pretrained_checkpoint, write_raw_glue
from synthetic_squad import make_squad, write_json
from synthetic_tagging import make_sentences, write_columns

from amos_fairseq.cli.main import main
from amos_fairseq.downstream.spans import command as squad
from amos_fairseq.downstream.texts.glue import command as glue
from amos_fairseq.downstream.words import command as tagging
from amos_fairseq.experiments.benchmark import Benchmark

COMMANDS = (glue, squad, tagging)


class Raw:
    """Raw files of a kind, as arguments of the command that fine-tunes and of ``amos prepare``; ``changed``: one of them."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.command = kind, {"tagging": "tag"}.get(kind, kind)
        if kind == "glue":
            write_raw_glue(folder, "CoLA", "RTE")
            self.changed, self.line = folder / "RTE" / "train.tsv", "1\tA ship.\tIt.\tentailment\n"
            self.flags, self.prepare = ["--data", folder, "--tasks", "rte,CoLA"], [folder, "RTE,CoLA"]
            self.kinds, self.tasks = {"RTE", "CoLA"}, {"RTE", "CoLA"}
        elif kind == "squad":
            self.changed, self.line = write_json(folder / "train.json", make_squad()), " "
            dev = folder / "dev.json.gz"
            dev.write_bytes(gzip.compress(json.dumps(make_squad(seed=2)).encode()))
            self.kinds, self.tasks = {"squad"}, {"SQuAD2.0"}
            self.flags, self.prepare = ["--train", self.changed, "--dev", dev], [self.changed, dev]
        else:
            self.changed, self.line = write_columns(folder / "train.txt", make_sentences()), "\nAnna\tnoun\tB-NAME\n"
            dev = write_columns(folder / "dev.txt", make_sentences(10, seed=2))
            own = ["--column", "a", "--columns", "word,a,b"]
            self.kinds, self.tasks = {"tagging"}, {"tagging-a"}
            self.flags, self.prepare = ["--train", self.changed, "--dev", dev, *own], [self.changed, dev, *own]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    write_pretrained_checkpoint(folder)
    return folder


@pytest.fixture
def planned(start: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Benchmark]:
    """A function that calls a command and returns the benchmark that it would run."""

    def plan(command: str, out: Path, *flags: object) -> Benchmark:
        found: list[Benchmark] = []
        with monkeypatch.context() as patched:
            for module in COMMANDS:
                patched.setattr(module, "run_and_print", found.append)
            main([command, "--checkpoint", str(start), "--out", str(out), "--cpu", *map(str, flags)])
        return found[0]

    return plan


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def identities(benchmark: Benchmark) -> dict[str, str]:
    return {name: task.data_sha256 for name, task in benchmark.tasks.items()}


@pytest.mark.parametrize("kind", ["glue", "squad", "tagging"])
def test_raw_files_give_the_bits_of_prepare_and_keep_them(kind, start, planned, tmp_path, capsys) -> None:
    raw, out = Raw(kind, tmp_path), tmp_path / "out"
    prepare(kind)([*raw.prepare, start / "tokenizer", "--out", tmp_path / "prepared"])
    flags = ["--data", tmp_path / "prepared", *raw.flags[2 : 4 * (kind == "glue")]]
    expected = planned(raw.command, tmp_path / "other", *flags)
    capsys.readouterr()
    found = planned(raw.command, out, *raw.flags)
    assert "with the tokenizer of the checkpoint" in capsys.readouterr().err
    made = {folder.name.rpartition("-")[0]: folder for folder in (out / "data").iterdir()}
    assert made.keys() == raw.kinds
    for task, folder in made.items():
        assert contents(folder) == contents(tmp_path / "prepared" / (task if kind == "glue" else "."))
    assert identities(found) == identities(expected)
    assert identities(found).keys() == raw.tasks

    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert identities(planned(raw.command, out, *raw.flags)) == identities(found)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times
    assert capsys.readouterr().err == f"{raw.command}: reading {start}\n"

    raw.changed.write_text(raw.changed.read_text(encoding="utf-8") + raw.line, encoding="utf-8")
    again = planned(raw.command, out, *raw.flags)
    task = sorted(raw.tasks)[-1]
    assert identities(again).items() - identities(found).items() == {(task, again.tasks[task].data_sha256)}
    assert len(list((out / "data").iterdir())) == len(raw.kinds) + 1


def test_tests_sets_of_glue_can_be_added_to_results(planned, tmp_path, capsys) -> None:
    """No score depends on them. AX, which the model of MNLI predicts, is converted with ``--write-test`` alone."""
    raw, out = write_raw_glue(tmp_path / "raw", "MNLI", "diagnostic"), tmp_path / "out"
    tests = {path.name: path.read_bytes() for path in (raw / "MNLI").glob("test*")}
    for name in tests:
        (raw / "MNLI" / name).unlink()
    first = planned("glue", out, "--data", raw)
    assert "not fine-tuned: QQP, QNLI" in capsys.readouterr().err
    assert [path.name.rpartition("-")[0] for path in (out / "data").iterdir()] == ["MNLI"]
    for name, content in tests.items():
        (raw / "MNLI" / name).write_bytes(content)
    second = planned("glue", out, "--data", raw, "--write-test")
    assert second.prepared["MNLI"].ids("test1") == ["8", "7"]
    assert (second.diagnostic.directory / "input1").is_dir()
    assert identities(second) == identities(first)


def test_what_cannot_be_used_is_refused_in_one_line(start, tmp_path, capsys) -> None:
    raw = write_columns(tmp_path / "train.txt", make_sentences())
    few = write_columns(tmp_path / "few.txt", make_sentences(9))
    bare = shutil.copytree(start, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer"))
    of_bare = ["--checkpoint", bare, "--train", raw, "--dev", raw]
    for command, flags, reason in (
        ("tag", of_bare, "bare/tokenizer holds no tokenizer: expected "),
        ("tag", [], "give either raw files as --train FILE [--dev FILE], or prepared ones as --data DIR"),
        ("squad", ["--train", "a"], "give either raw files as --train FILE --dev FILE, or"),
        ("tag", ["--train", few], "few.txt has 9 different sentences, too few to choose dev sentences: give --dev"),
        ("tag", ["--dev", "a"], "give either raw files"),
        ("squad", ["--data", "d", "--train", "a", "--dev", "a"], "give either raw files"),
        ("tag", ["--data", "d", "--column", "a"], "--column is for raw files"),
    ):
        arguments = [command, "--checkpoint", start, "--out", tmp_path / "out", "--cpu", *flags]
        assert reason in error_line(capsys, main, *arguments, reports_progress=True), flags
        assert not (tmp_path / "out").exists()
