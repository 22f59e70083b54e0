"""AMOS_ENVIRONMENT=active: the checkout is used as it is, and what the environment lacks is named in one line."""

import shlex
import shutil
import sys
from pathlib import Path

import pytest
from failures import refusal
from tiny_runs import ROOT, run_process

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
