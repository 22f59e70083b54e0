"""Which devices support bfloat16 in hardware: CPUs and GPUs of each kind, this machine's flags, GPUs asked from outside."""

import platform
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import ROOT, environment, run_process

from amos_fairseq.run.precision import supports_bf16


@pytest.mark.parametrize(
    ("major", "expected"),
    [
        (7, False),
        (8, True),
    ],
)
def test_a_gpu_that_emulates_bf16_does_not_support_it(major, expected, monkeypatch) -> None:
    """Compute capability 8.0 is Ampere; V100 and T4 (7.0, 7.5) make bfloat16 tensors, which PyTorch's default counts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    assert torch.cuda.is_bf16_supported()
    assert supports_bf16(on_gpu=True) is expected


@pytest.mark.parametrize(
    ("machine", "has_onednn", "onednn_takes_bf16", "avx512_bf16", "amx", "expected"),
    [
        ("x86_64", True, True, False, False, False),  # AVX-512 without bfloat16: oneDNN converts
        ("x86_64", True, True, True, False, True),  # Zen 4
        ("x86_64", True, True, False, True, True),
        ("aarch64", True, True, False, False, True),  # Neoverse V1
        ("arm64", False, False, False, False, False),  # macOS
    ],
)
def test_processors(machine, has_onednn, onednn_takes_bf16, avx512_bf16, amx, expected, monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn_takes_bf16)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert supports_bf16(on_gpu=False) is expected


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path("/proc/cpuinfo").is_file(), reason="the flags of Linux on x86"
)
def test_this_processor_against_the_kernel() -> None:
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    assert supports_bf16(on_gpu=False) == bool(flags & {"avx512_bf16", "amx_bf16"})


# Two GPUs: what the driver answers, and the handler that PyTorch registers when it is asked for the first time.
DRIVER = """
import os
from types import SimpleNamespace
import torch

MAJORS = [int(major) for major in os.environ["MAJORS"].split(",")]
forked, current = [], [0]

def device_count():
    os.register_at_fork(after_in_child=lambda: forked.append(True))
    return len(MAJORS)

def set_device(index):
    torch.cuda._lazy_init()
    current[0] = index

def properties(device):
    torch.cuda._lazy_init()
    return SimpleNamespace(major=MAJORS[current[0]])

torch._C._cuda_getDeviceCount, torch._C._cuda_setDevice = device_count, set_device
torch._C._cuda_getDevice, torch._C._cuda_init = lambda: current[0], lambda: None
torch._C._cuda_getCompiledVersion, torch._C._cuda_getArchFlags = lambda: 12040, lambda: ""
torch.cuda._is_compiled = lambda: True
torch.cuda._cudart = object()
torch.cuda._is_in_bad_fork = lambda: bool(forked)
torch.cuda._queued_calls.clear()
torch.cuda.get_device_properties, torch.version.cuda = properties, "12.4"
"""
ASK = """
import torch
from amos_fairseq.run.precision import gpus_support_bf16

assert torch.cuda.is_available()
print(gpus_support_bf16())
assert not torch.cuda.is_initialized()
"""


@pytest.mark.slow
def test_all_gpus_are_asked_in_a_new_process(tmp_path: Path) -> None:
    """After ``torch.cuda.is_available()`` a fork must not use CUDA: PyTorch itself refuses it here, as on a GPU."""
    (tmp_path / "sitecustomize.py").write_text(DRIVER)
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "MAJORS": "8,7"}
    result = run_process([sys.executable, "-c", ASK], tmp_path, environment(variables))
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout == "False\n"
