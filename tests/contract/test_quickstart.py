"""The scripts a newcomer meets first: a mistake is one line before anything is written, and what is done stays.

An installation takes minutes and downloads; tests/run.sh is one. With AMOS_ENVIRONMENT=active the environment is used as it is.
The quickstart is run with a few updates only.
"""

import os
import shlex
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


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!{shutil.which('bash')}\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


WITHOUT_VENV = f'case "$*" in *ensurepip*) exit 1 ;; esac; exec "{sys.executable}" "$@"'


@pytest.mark.parametrize(
    ("programs", "asked_for", "named"),
    [
        ({}, None, "found none"),
        ({"python3": "echo 3.8"}, None, "python3 is 3.8"),
        ({"mine": "echo 3.8", "python3": "echo 3.12"}, "mine", "is 3.8"),
        ({"mine": "exit 1", "python3": "echo 3.12"}, "mine", "does not run"),
        ({"mine": "echo 3.11"}, "mine", "no C++ compiler"),  # PyPI has fairseq built for 3.12 alone
        ({"c++": "exit 0", "python3": WITHOUT_VENV}, None, "cannot create environments"),
    ],
)
def test_what_the_machine_lacks_is_one_line(checkout: Path, tools: Path, programs, asked_for, named: str):
    for name, text in programs.items():
        write_program(tools / name, text)
    chosen = {} if asked_for is None else {"PYTHON": str(tools / asked_for)}
    result = run_bash(checkout, "bash examples/environment.sh test", tools, **chosen)
    assert result.stderr.count("\n") == 1
    assert named in refusal(result)
    assert not (checkout / ".venv").exists()


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
    with (checkout / "setup.py").open("a", encoding="utf-8") as setup:
        setup.write("# one more dependency\n")
    assert not is_ready("")


@pytest.mark.parametrize(
    ("arguments", "content", "named"),
    [
        ("text.txt out", None, "text.txt: no such file"),
        ("text.txt out", b" \n\n\t\n", "text.txt: this file contains no text"),
        ("text.txt out", b"caf\xe9 au lait", "not UTF-8 at byte 3"),
        ("my text.txt out", b"Some text.", "'out' is not KEY=VALUE"),
        ("text.txt made", b"Some text.", "was made from another text"),
    ],
)
def test_a_mistake_stops_the_quickstart_before_it_begins(checkout: Path, arguments: str, content, named: str):
    if content is not None:
        (checkout / "text.txt").write_bytes(content)
    (checkout / "made").mkdir()
    (checkout / "made" / "text.identity").write_text("documentation\n", encoding="utf-8")
    before = sorted(checkout.rglob("*"))
    result = run_bash(checkout, f"bash examples/quickstart.sh {arguments}", PYTHON=sys.executable)
    assert result.stderr.count("\n") == 1
    assert named in refusal(result)
    assert sorted(path for path in checkout.rglob("*") if "__pycache__" not in path.parts) == before


@pytest.mark.slow
def test_quickstart_from_text_to_pictures_and_nothing_twice(checkout: Path, corpus_text: Path, tmp_path: Path):
    """The whole script in the environment of the tests, with six updates; then once more, with commands that only say how they
    were called. OUT_DIR is relative."""
    settings = "optimization.max_update=6 lr_scheduler.warmup_updates=2 dataset.validate_interval_updates=3 "
    settings += "dataset.batch_size=8 dataset.num_workers=0"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = environment({"AMOS_ENVIRONMENT": "active", "PYTHON": sys.executable, "PATH": path})
    command = ["bash", ROOT / "examples/quickstart.sh", corpus_text, "an out", *settings.split()]
    first = run_process(command, tmp_path, variables)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    out = tmp_path / "an out"
    for name in ("data/corpus.json", "run/checkpoint_last.pt", "figures/overview.png", "report.html"):
        assert (out / name).stat().st_size > 0
    for shown in ("update 3", "update 6", "detection AUC"):
        assert shown in first.stdout
    for name in ("amos", "python"):
        (checkout / "examples/commands" / name).unlink()
        write_program(checkout / "examples/commands" / name, f'echo "called: {name} $1"')
    second = run_process(["bash", checkout / "examples/quickstart.sh", *command[2:]], tmp_path, variables)
    assert second.returncode == 0, second.stderr[-3000:]
    called = [line for line in second.stdout.splitlines() if line.startswith("called: ")]
    table = "called: python examples/quickstart_report.py"
    assert called == ["called: amos train", table, "called: amos report"]


# Run by every Python at its start: modules are then as if they were not installed.
BLOCKER = "import os, sys\nfor name in os.environ['BLOCKED'].split():\n    sys.modules[name] = None\n"


@pytest.fixture
def machine(tools: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of a machine with Python under no other name than ``python3``, without console scripts and network."""
    write_program(tools / "python3", f'exec "{sys.executable}" "$@"')
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    folders = {"PATH": str(tools), "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    return {**proxies, **folders, "AMOS_ENVIRONMENT": "active", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "script", ["tests/run.sh", "preprocess/glue/prepare.sh --help", "examples/multi_node/torchrun.sh amos_tiny DATA"]
)
def test_missing_dependencies_are_one_line(script: str, machine: dict[str, str], tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    variables = machine | {"PYTHONPATH": str(tmp_path), "BLOCKED": "zstandard omegaconf"}
    result = run_process(["bash", "-c", f'bash "{ROOT}"/{script}'], tmp_path, variables)
    assert result.stderr.count("\n") == 1
    line = refusal(result)
    assert " lacks zstandard, omegaconf: " in line
    assert line.endswith("-m pip install --no-build-isolation 'zstandard' 'omegaconf==2.3.0'")
    assert not (tmp_path / "quickstart_out").exists()


def test_a_torch_that_is_too_old_is_one_line(machine: dict[str, str], tmp_path: Path):
    described = tmp_path / "torch-2.5.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.0\n")
    script = ["bash", ROOT / "examples/quickstart.sh"]
    result = run_process(script, tmp_path, machine | {"PYTHONPATH": str(tmp_path)})
    assert result.stderr.count("\n") == 1
    assert " has versions that are too old: torch 2.5.0 (torch>=2.6" in refusal(result)


@pytest.mark.slow
def test_training_needs_no_network(binarized_corpus: Path, machine: dict[str, str], tmp_path: Path):
    flags = "--tokens-per-sample 32 --max-positions 32 --batch-size 8 --update-freq 1 --max-update 2 --num-workers 0"
    train = shlex.split(f"amos_tiny {binarized_corpus} run {flags} --cpu --disable-validation")
    result = run_process(["bash", ROOT / "examples/pretraining/train.sh", *train], tmp_path, machine)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "run" / "checkpoint_last.pt").is_file()
