"""Which devices have fast bfloat16 products: CPUs and GPUs of each kind, this machine's flags, GPUs asked from outside."""

import platform
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from amos_fairseq.run import precision
from amos_fairseq.run.precision import gpus_support_bf16, supports_bf16


@pytest.mark.parametrize(("major", "expected"), [(7, False), (8, True)])
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
        ("x86_64", True, True, True, False, False),  # slower than float32
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


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").is_file(), reason="for Linux on x86")
def test_this_processor_against_the_kernel() -> None:
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    assert supports_bf16(on_gpu=False) == ("amx_bf16" in flags)


class Asked:
    """A pool whose process has the GPUs of a test."""

    capabilities: tuple[tuple[int, int], ...] = ()

    def __init__(self, *arguments: object) -> None: ...

    def __enter__(self) -> "Asked":
        return self

    def __exit__(self, *raised: object) -> None: ...

    def submit(self, function: object, *number: int) -> SimpleNamespace:
        answer = self.capabilities[number[0]] if number else len(self.capabilities)
        return SimpleNamespace(result=lambda: answer)


def test_all_gpus_are_asked_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "ProcessPoolExecutor", Asked)
    for Asked.capabilities, expected in (((8, 0), (9, 0)), True), (((8, 0), (7, 5)), False):
        assert gpus_support_bf16() is expected
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert gpus_support_bf16()  # of no GPUs; the process starts and answers
