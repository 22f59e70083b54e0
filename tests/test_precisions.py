"""Which devices support bfloat16 in hardware: CPUs and GPUs of each kind, this machine's flags, GPUs asked from outside."""

import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from amos_fairseq.errors import UserError
from amos_fairseq.precisions import gpus_support_bf16, supports_bf16


@pytest.mark.parametrize(("major", "expected"), [(6, False), (7, False), (8, True), (9, True), (12, True)])
def test_a_gpu_that_emulates_bf16_does_not_support_it(
    major: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ("x86_64", True, False, False, False, False),  # AVX2
        ("x86_64", True, True, False, False, False),  # AVX-512 without bfloat16: oneDNN converts
        ("x86_64", True, True, True, False, True),  # Zen 4
        ("AMD64", True, True, True, False, True),
        ("x86_64", True, True, False, True, True),
        ("x86_64", False, False, True, True, False),
        ("aarch64", True, True, False, False, True),  # Neoverse V1
        ("aarch64", True, False, False, False, False),
        ("arm64", False, False, False, False, False),  # macOS
    ],
)
def test_processors(
    machine: str,
    has_onednn: bool,
    onednn_takes_bf16: bool,
    avx512_bf16: bool,
    amx: bool,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def use_stand_in(answers: Sequence[Callable[[], bool]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let this process and its forks see a GPU for each answer; return the list of those that this process chooses."""
    chosen: list[int] = []

    def is_bf16_supported(including_emulation: bool) -> bool:
        assert not including_emulation
        return answers[chosen[-1]]()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(answers))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    return chosen


@pytest.mark.parametrize(("supported", "expected"), [((True, True), True), ((True, False), False), ((False,), False)])
def test_all_gpus_are_asked_in_another_process(
    supported: tuple[bool, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_here = use_stand_in([lambda answer=answer: answer for answer in supported], monkeypatch)
    assert gpus_support_bf16() is expected
    assert chosen_here == []


def test_a_gpu_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in([lambda: 1 / 0], monkeypatch)
    with pytest.raises(
        UserError, match=r"\(ZeroDivisionError: division by zero\): give --precision float32, free them"
    ):
        gpus_support_bf16()
