"""The scripts a newcomer meets first: what is wrong is said in one line before anything is written, what is done stays.

An installation takes minutes and downloads, tests/run.sh is one; a whole quickstart is run with a few updates only.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from failures import refusal
from tiny_runs import ROOT, environment, run_process

SHELL_TOOLS = ("bash", "cat", "cut", "dirname", "env", "grep", "head", "mkdir", "mv", "rm", "sed", "tail", "uname")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without an environment, in a folder whose name holds a space."""
    copy = tmp_path / "a checkout"
    shutil.copytree(ROOT / "examples", copy / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "setup.py", copy / "setup.py")
    return copy


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder to be the whole PATH: the tools that every machine has, but neither Python nor a compiler."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in SHELL_TOOLS:
        (folder / name).symlink_to(shutil.which(name))
    return folder


def run_bash(checkout: Path, command: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    """Run a bash command in the checkout, with ``path`` as the whole PATH."""
    settings = {"PATH": str(path) if path else os.environ["PATH"], "HOME": str(checkout), **variables}
    return run_process(["bash", "-c", command], checkout, settings)


def assert_one_error_line(result: subprocess.CompletedProcess, *fragments: str) -> None:
    """Exit status 1 and one line on stderr with all fragments."""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    line = refusal(result)
    assert [fragment for fragment in fragments if fragment not in line] == []


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


def test_another_python_is_refused(checkout: Path, tools: Path):
    write_program(tools / "python3", "echo 3.8")
    result = run_bash(checkout, "bash examples/environment.sh", tools)
    assert_one_error_line(result, "needs Python 3.13, 3.12, 3.11, 3.10", "python3 is 3.8", "PYTHON=/path/to/python3")
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(("text", "fragment"), [("echo 3.8", "is 3.8"), ("exit 1", "does not run")])
def test_a_python_that_was_asked_for_is_not_replaced(checkout: Path, tools: Path, text: str, fragment: str):
    write_program(tools / "mine", text)
    write_program(tools / "python3", "echo 3.12")
    result = run_bash(checkout, "bash examples/environment.sh", tools, PYTHON=str(tools / "mine"))
    assert_one_error_line(result, f"PYTHON={tools / 'mine'} {fragment}")
    assert not (checkout / ".venv").exists()


def test_python3_comes_first_and_then_the_newest_that_is_supported(checkout: Path, tools: Path):
    command = "set -euo pipefail; source examples/environment.sh; find_python"
    for name, version in (("python3.10", "3.10"), ("python3.12", "3.12"), ("python3.14", "3.14"), ("python3", "3.14")):
        write_program(tools / name, f"echo {version}")
    assert run_bash(checkout, command, tools).stdout.strip() == "python3.12"
    write_program(tools / "python3", "echo 3.10")
    assert run_bash(checkout, command, tools).stdout.strip() == "python3"


def test_an_environment_of_another_supported_python_is_kept(checkout: Path, tools: Path):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    command = "set -euo pipefail; source examples/environment.sh; python_of_environment"
    write_program(checkout / ".venv" / "bin" / "python", "echo 3.10")
    write_program(tools / "python3", "echo 3.12")
    assert run_bash(checkout, command, tools).stdout.strip() == str(checkout / ".venv" / "bin" / "python")
    other = run_bash(checkout, command, tools, PYTHON=str(tools / "python3"))
    assert_one_error_line(other, "has Python 3.10", f"PYTHON={tools / 'python3'} is 3.12")
    write_program(checkout / ".venv" / "bin" / "python", "echo 3.8")
    assert_one_error_line(run_bash(checkout, command, tools), "has Python 3.8", "remove that folder")


def test_no_python_is_refused(checkout: Path, tools: Path):
    assert_one_error_line(run_bash(checkout, "bash examples/environment.sh", tools), "found none")


def test_missing_compiler_is_refused_before_anything_is_made(checkout: Path, tools: Path):
    # The tests' fastBPE has no wheel for any Python.
    result = run_bash(checkout, "bash examples/environment.sh test", tools, PYTHON=sys.executable)
    assert_one_error_line(result, "no C++ compiler", "g++")
    assert not (checkout / ".venv").exists()


def test_python_without_venv_is_refused(checkout: Path, tools: Path):
    write_program(tools / "c++", "exit 0")
    write_program(tools / "python3", f'case "$*" in *ensurepip*) exit 1 ;; esac; exec "{sys.executable}" "$@"')
    result = run_bash(checkout, "bash examples/environment.sh", tools)
    version = "{}.{}".format(*sys.version_info)
    assert_one_error_line(result, "cannot create environments", f"python{version}-venv")
    assert not (checkout / ".venv").exists()


@pytest.mark.slow
def test_failed_installation_names_the_log(checkout: Path):
    """pip is made to fail at once by a proxy that is not there and an index that is empty."""
    settings = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    result = run_bash(checkout, "bash examples/environment.sh", **settings)
    assert_one_error_line(result, "the installation failed", "install.log")
    assert "No matching distribution" in (checkout / ".venv" / "install.log").read_text(encoding="utf-8")
    assert not (checkout / ".venv" / "amos_fairseq.stamp").exists()


def test_environment_is_up_to_date_only_for_what_its_stamp_names(checkout: Path):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    source = "set -euo pipefail; source examples/environment.sh; "
    run_bash(checkout, source + 'current_stamp > "$ENVIRONMENT_STAMP"')

    def is_ready(extra: str) -> bool:
        return run_bash(checkout, source + f'environment_is_ready "{extra}"').returncode == 0

    assert is_ready("")
    assert not is_ready("test")
    with (checkout / ".venv" / "amos_fairseq.stamp").open("a", encoding="utf-8") as stamp:
        stamp.write("extra test\n")
    assert is_ready("test")
    result = run_bash(checkout, source + "prepare_environment test; command -v python")
    assert (result.returncode, result.stdout.strip()) == (0, str(checkout / ".venv" / "bin" / "python"))

    moved = checkout.with_name("moved")
    checkout.rename(moved)
    assert run_bash(moved, source + 'environment_is_ready ""').returncode == 1
    moved.rename(checkout)
    with (checkout / "setup.py").open("a", encoding="utf-8") as setup:
        setup.write("# one more dependency\n")
    assert not is_ready("")


@pytest.mark.slow
def test_a_moved_checkout_gets_its_environment_again(checkout: Path):
    """By the Python that .venv was made with, although .venv's own link to it is removed meanwhile."""
    make = 'set -euo pipefail; source examples/environment.sh; make_environment "$(python_of_environment)"; '
    first = run_bash(checkout, make + 'current_stamp > "$ENVIRONMENT_STAMP"', PYTHON=sys.executable)
    assert first.returncode == 0, first.stderr
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    second = run_bash(moved, make + '"$ENVIRONMENT/bin/python" -c "import sys; print(sys.prefix)"')
    assert (second.returncode, second.stderr) == (0, "")
    assert "the checkout was moved" in second.stdout
    assert second.stdout.splitlines()[-1] == str(moved / ".venv")


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        (None, ("text.txt: no such file",)),
        (b"", ("text.txt: this file contains no text",)),
        (b" \n\n\t\n", ("text.txt: this file contains no text",)),
        (b"caf\xe9 au lait", ("not UTF-8 at byte 3", "iconv")),
        (b"cut in the middle of a letter: \xc3", ("not UTF-8 at byte 31",)),
    ],
)
def test_a_bad_text_stops_the_quickstart_before_it_begins(
    checkout: Path, content: bytes | None, fragments: tuple[str, ...]
):
    if content is not None:
        (checkout / "text.txt").write_bytes(content)
    before = sorted(checkout.rglob("*"))
    result = run_bash(checkout, "bash examples/quickstart.sh text.txt out", PYTHON=sys.executable)
    assert_one_error_line(result, *fragments)
    assert sorted(path for path in checkout.rglob("*") if "__pycache__" not in path.parts) == before


def test_a_folder_made_from_another_text_is_not_continued(checkout: Path):
    (checkout / "text.txt").write_text("Some text.\n", encoding="utf-8")
    (checkout / "out").mkdir()
    (checkout / "out" / "text.identity").write_text("documentation\n", encoding="utf-8")
    result = run_bash(checkout, 'bash examples/quickstart.sh "$PWD/text.txt" out', PYTHON=sys.executable)
    assert_one_error_line(result, "was made from another text")


@pytest.mark.parametrize(
    ("num_validations", "values"), [(1, ["4.250"]), (2, ["4.750", "4.250"]), (3, ["5.250", "4.250"])]
)
def test_report_shows_first_and_last_validation_beside_the_plateau(
    num_validations: int,
    values: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    records = [
        {"split": "train", "update": 10, "mlm_loss_1": 9.0},
        {"split": "valid", "update": 20, "mlm_loss_1": 5.5, "mlm_loss_2": 5.25, "mixture_1": 0.5, "mixture_2": 0.5},
        {"split": "valid", "update": 30, "mlm_loss_1": 5.0, "mlm_loss_2": 4.75, "mixture_1": 0.2, "mixture_2": 0.8},
        {"split": "valid", "update": 40, "mlm_loss_1": 4.5, "mlm_loss_2": 4.25, "mixture_1": 0.1, "mixture_2": 0.9},
    ]
    records[-1]["unigram_entropy"] = 5.875
    records = [records[0], *records[-num_validations:]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["quickstart_report.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "quickstart_report.py"), run_name="__main__")
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if "MLM loss, depth 2" in line]
    assert len(lines) == 1
    assert [cell.strip() for cell in lines[0].split("│")[2:-1]] == [*values, "5.875"]
    updates = [record["update"] for record in records[1:]]
    assert re.findall(r"update \d+", output) == [
        f"update {update}" for update in dict.fromkeys((updates[0], updates[-1]))
    ]


@pytest.mark.slow
def test_quickstart_from_text_to_pictures_and_nothing_twice(corpus_text: Path, tmp_path: Path):
    """The whole script in the environment of the tests, with six updates; then once more, in a relative OUT_DIR."""
    settings = "optimization.max_update=6 lr_scheduler.warmup_updates=2 dataset.validate_interval_updates=3 "
    settings += "dataset.batch_size=8 dataset.num_workers=0"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = environment({"AMOS_ENVIRONMENT": "active", "PYTHON": sys.executable, "PATH": path})
    command = ["bash", ROOT / "examples/quickstart.sh", corpus_text, "an out", *settings.split()]
    first = run_process(command, tmp_path, variables)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    out = tmp_path / "an out"
    for name in ("data/corpus.json", "run/checkpoint_last.pt", "plots/overview.png", "inspect.html"):
        assert (out / name).stat().st_size > 0
    for name in ("plots/overview.png", "inspect.html"):
        assert f"{out / name}  (" in first.stdout or f"{out / name}\n" in first.stdout
    assert "update 3" in first.stdout
    assert "update 6" in first.stdout
    assert "detection AUC" in first.stdout
    kept = {name: (out / name).stat().st_mtime_ns for name in ("data/corpus.json", "run/checkpoint_last.pt")}

    second = run_process(command, tmp_path, variables)
    assert second.returncode == 0, second.stderr[-3000:]
    assert "nothing to do" in second.stdout + second.stderr
    assert kept == {name: (out / name).stat().st_mtime_ns for name in kept}


def test_settings_are_told_from_mistyped_names(checkout: Path):
    result = run_bash(checkout, "bash examples/quickstart.sh my text.txt out")
    assert_one_error_line(result, "'out' is not KEY=VALUE")
