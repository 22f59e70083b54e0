"""AMOS_ENVIRONMENT=active: the checkout is used as it is, and what the environment lacks is named in one line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELL_TOOLS = ("bash", "cat", "dirname", "env", "mkdir", "sed", "tail")
# Run by every Python at its start: modules are then as if they were not installed.
BLOCKER = "import os, sys\nfor name in os.environ['BLOCKED'].split():\n    sys.modules[name] = None\n"


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine with Python under no other name than ``python3``, without console scripts and network."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in SHELL_TOOLS:
        (tools / name).symlink_to(shutil.which(name))
    (tools / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python3").chmod(0o755)
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return {
        **proxies,
        "AMOS_ENVIRONMENT": "active",
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "MPLCONFIGDIR": str(tmp_path),
    }


def run_bash(folder: Path, command: str, variables: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [shutil.which("bash"), "-c", command], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "script",
    [
        "examples/quickstart.sh",
        "tests/run.sh",
        "preprocess/pretraining/prepare.sh --help",
        "preprocess/glue/prepare.sh --help",
        "examples/pretraining/train.sh amos_tiny DATA RUN",
        "examples/multi_node/torchrun.sh amos_tiny DATA",
        "examples/comparison/run.sh --help",
    ],
)
def test_missing_dependencies_are_one_line(script: str, machine: dict[str, str], tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    variables = machine | {"PYTHONPATH": str(tmp_path), "BLOCKED": "zstandard omegaconf"}
    result = run_bash(tmp_path, f'bash "{ROOT}"/{script}', variables)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("amos_fairseq: error: ")
    assert " lacks zstandard, omegaconf: " in line
    assert line.endswith("-m pip install --no-build-isolation 'zstandard' 'omegaconf==2.3.0'")
    assert not (tmp_path / "quickstart_out").exists()


def test_a_torch_that_is_too_old_is_one_line(machine: dict[str, str], tmp_path: Path):
    described = tmp_path / "torch-2.5.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.0\n")
    result = run_bash(tmp_path, f'bash "{ROOT}/examples/quickstart.sh"', machine | {"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("amos_fairseq: error: ")
    assert " has versions that are too old: torch 2.5.0 (torch>=2.6" in line


@pytest.mark.slow
def test_commands_come_from_the_checkout(machine: dict[str, str], tmp_path: Path):
    command = f'set -euo pipefail; source "{ROOT}/examples/environment.sh"; prepare_environment; '
    command += 'amos --help; fairseq-preprocess --help; python -c "import amos_fairseq; print(amos_fairseq.__file__)"'
    result = run_bash(tmp_path, command, machine)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "usage: amos" in result.stdout
    assert "--only-source" in result.stdout
    assert result.stdout.splitlines()[-1] == str(ROOT / "amos_fairseq" / "__init__.py")


@pytest.mark.slow
def test_text_is_prepared_and_trained_on_offline(corpus_text: Path, machine: dict[str, str], tmp_path: Path):
    """Also with a folder "preprocess" in the current one."""
    (tmp_path / "preprocess").mkdir()
    prepare = f'bash "{ROOT}/preprocess/pretraining/prepare.sh" "{corpus_text}" --out data --vocab-size 120'
    result = run_bash(tmp_path, f"{prepare} --bpe sentencepiece --cased --workers 1", machine)
    assert result.returncode == 0, result.stderr[-3000:]
    flags = "--tokens-per-sample 32 --max-positions 32 --batch-size 8 --update-freq 1 --max-update 2 --num-workers 0"
    train = f'bash "{ROOT}/examples/pretraining/train.sh" amos_tiny data run {flags} --cpu --disable-validation'
    result = run_bash(tmp_path, train, machine)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "run" / "checkpoint_last.pt").is_file()
