"""Triton compiles the kernels for an A100 and an H100 without a GPU, and their tiles fit into shared memory."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_runs import run_process

# Shared memory that one program can have, in bytes, from the tables of compute capabilities in CUDA's programming guide:
# 163 KiB and 227 KiB.
LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_compile_and_fit() -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    result = run_process([sys.executable, script])
    assert result.returncode == 0, result.stderr[-3000:]
    shared = json.loads(result.stdout.splitlines()[-1])
    assert len(shared) == 2 * (4 + 4) + 6
    for name, used in shared.items():
        assert 0 <= used <= LIMITS[name.split()[-1]], name
