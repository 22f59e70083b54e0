"""The precision of a run: every case of the choice, in launcher and ranks, and over a resume; which devices have fast bf16."""

import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from omegaconf import OmegaConf
from rank_functions import succeed_on_two_ranks

from amos_fairseq.errors import UserError
from amos_fairseq.recipes.composition import compose_recipe
from amos_fairseq.run import hooks, precision
from amos_fairseq.run.precision import (
    Precision,
    Saved,
    gpus_support_bf16,
    saved_precision,
    set_precision,
    supports_bf16,
)


def configuration(named: str | None = None, optimizer: str = "grouped_adam", **common: Any) -> Any:
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.optimizer = {"_name": optimizer}
    cfg.task = {"_name": "text_pretraining", "precision": named}
    for name, value in common.items():
        cfg.common[name] = value
    return cfg


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, bool], None]:
    """``hardware(has_gpu, supported)``: what this process finds."""

    def use(has_gpu: bool, supported: bool) -> None:
        monkeypatch.setattr(precision, "visible_gpus", lambda cfg: int(has_gpu))

        def answer(on_gpu: bool) -> bool:
            assert on_gpu is has_gpu
            return supported

        monkeypatch.setattr(precision, "supports_bf16", answer)

    return use


CPU, GPU = False, True
NO = "has no fast bfloat16 products"
TABLE = [
    # task.precision, flag of fairseq, on a GPU, has fast bfloat16 products, continued run -> precision, reason in the log
    ("auto", None, CPU, True, None, "bf16", "auto: this processor has fast bfloat16 products"),
    ("auto", None, CPU, False, None, "float32", f"auto: this processor {NO}"),
    ("auto", None, GPU, True, None, "bf16", "auto: this GPU has fast bfloat16 products"),
    ("auto", None, GPU, False, None, "float32", f"auto: this GPU {NO}"),
    ("auto", None, GPU, True, "float32", "float32", "auto: as in last.pt"),
    ("auto", None, CPU, False, "bf16", "bf16", f"auto: as in last.pt, slower than float32: this processor {NO}"),
    ("auto", "bf16", CPU, False, None, "bf16", f"slower than float32: this processor {NO}"),
    ("auto", "fp16", GPU, True, None, "fp16", ""),
    ("bf16", None, CPU, True, None, "bf16", ""),
    ("fp16", None, GPU, False, "bf16", "fp16", ""),  # they have the same masters
    ("bf16", None, CPU, True, "fp16", "bf16", ""),
    (None, None, GPU, True, None, "float32", ""),
    (None, "bf16", GPU, True, None, "bf16", ""),
]


@pytest.mark.parametrize(("named", "flag", "has_gpu", "supported", "before", "expected", "reason"), TABLE)
def test_every_choice(named, flag, has_gpu, supported, before, expected, reason, hardware, caplog) -> None:
    hardware(has_gpu, supported)
    cfg = configuration(named, **({flag: True} if flag else {}))
    Precision().before_launch(cfg)
    with caplog.at_level("INFO", precision.__name__):
        assert set_precision(cfg, has_gpu, before and Saved(before, "last.pt")) == expected
    assert caplog.messages == [f"precision: {expected}{f' ({reason})' if reason else ''}"]
    assert {name: cfg.common[name] for name in precision.FLAGS} == {name: name == expected for name in precision.FLAGS}
    # What a checkpoint says: the choice, or that fairseq's flags made it.
    assert cfg.task.precision == (None if named is None else expected)
    # fairseq's flat float32 masters lose the groups; bf16 is never flat, for any setting.
    assert cfg.common.fp16_no_flatten_grads == (expected == "fp16")
    # A second trainer of the process finds the same, and with fairseq's Adam the masters are flat.
    cfg.optimizer._name, cfg.common.fp16_no_flatten_grads = "adam", False
    assert set_precision(cfg, has_gpu, before and Saved(before, "last.pt")) == expected
    assert not cfg.common.fp16_no_flatten_grads


@pytest.mark.parametrize(
    ("named", "common", "has_gpu", "message"),
    [
        (None, {"fp16": True}, CPU, r"^--fp16 needs a GPU: train in bf16 or float32$"),
        ("fp16", {}, CPU, r"^task\.precision=fp16 needs a GPU: train in bf16 or float32$"),
        (None, {"fp16": True, "bf16": True}, GPU, "^--fp16 and --bf16: give one of"),
        (None, {"amp": True}, GPU, "^--amp: give one of"),
        ("float32", {"bf16": True}, GPU, r"--bf16 and task\.precision=float32: give one of"),
        (None, {"fp16": True, "memory_efficient_fp16": True}, GPU, "^--memory-efficient-fp16 and --fp16: give one of"),
    ],
)
def test_settings_that_are_refused_before_the_launch(named, common, has_gpu, message, hardware) -> None:
    hardware(has_gpu, True)
    with pytest.raises(UserError, match=message):
        Precision().before_launch(configuration(named, **common))


@pytest.mark.parametrize(
    ("named", "has_gpu", "supported", "before", "message"),
    [
        ("bf16", GPU, False, None, rf"^task\.precision=bf16 needs .* this GPU {NO}: train in fp16 or float32$"),
        ("auto", GPU, False, "bf16", rf"^last\.pt was trained in bf16, .* {NO}: give task\.precision=fp16"),
        ("auto", CPU, True, "fp16", r"trained in fp16, and fp16 needs a GPU: give task\.precision=bf16"),
        ("float32", CPU, True, "bf16", r"in bf16 and has no state .* in float32: keep .*precision=bf16\)"),
    ],
)
def test_what_the_device_or_the_continued_run_excludes(named, has_gpu, supported, before, message, hardware):
    hardware(has_gpu, supported)
    with pytest.raises(UserError, match=message):
        set_precision(configuration(named), has_gpu, before and Saved(before, "last.pt"))


@pytest.mark.parametrize("setting", ["task.precision=auto", "common.bf16=true"])
def test_the_launcher_opens_no_cuda_context(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs in exclusive-process mode: a rank is started on each, and asks its own."""
    asked: list[str] = []

    def question(including_emulation: bool = True) -> bool:
        asked.append("bf16")
        return not including_emulation

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: asked.append("context"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", question)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: asked.append("properties"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: asked.append("capability"))
    cfg = compose_recipe("amos_tiny", ["distributed_training.distributed_world_size=2", setting])
    launched: list[Any] = []
    hooks.call_main(lambda cfg, main: launched.append(cfg), cfg, None)
    assert launched == [cfg]
    assert asked == []
    Precision().before_trainer(cfg)
    assert asked == ["bf16"]
    assert cfg.common.bf16 is True


def unlike_ranks(rank: int) -> None:
    """Rank 1 emulates bfloat16. The first rank decides, and reads what the run continues."""
    precision.supports_bf16 = lambda on_gpu: rank == 0
    assert set_precision(configuration("auto"), on_gpu=False) == "bf16"
    precision.supports_bf16 = lambda on_gpu: rank == 1
    with pytest.raises(UserError if rank == 0 else SystemExit):
        set_precision(configuration("bf16"), on_gpu=True)
    lines: list[str] = []
    precision.logger.info = lines.append
    precision.supports_bf16 = lambda on_gpu: True
    precision.running_scripts = lambda: [None]
    precision.saved_precision = lambda cfg: Saved("float32", "last.pt") if rank == 0 else 1 / 0
    cfg = configuration("auto", cpu=True)
    Precision().before_trainer(cfg)
    assert (cfg.task.precision, lines[-1]) == ("float32", "precision: float32 (auto: as in last.pt)")


@pytest.mark.slow
def test_unlike_ranks_agree() -> None:
    succeed_on_two_ranks(unlike_ranks)


def write(path: Path, flags: Sequence[str] = (), updates: int = 1, **changes: Any) -> None:
    content = {"cfg": {"common": {name: name in flags for name in precision.FLAGS}}, "model": {}}
    content |= {"optimizer_history": [{"num_updates": updates}]}
    content |= {"last_optimizer_state": {"state": {}, "param_groups": [{}]}}
    torch.save(content | changes, path)


def settings(folder: Path, **changes: Any) -> Any:
    cfg = OmegaConf.structured(FairseqConfig).checkpoint
    cfg.save_dir = str(folder)
    for name, value in changes.items():
        cfg[name] = value
    return cfg


def test_precision_of_the_continued_run(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other.pt"
    run.mkdir()
    assert saved_precision(settings(run)) is None
    write(other, ["fp16"])
    assert saved_precision(settings(run, finetune_from_model=str(other))) is None
    assert saved_precision(settings(run, restore_file=str(other))) == Saved("fp16", str(other))
    assert saved_precision(settings(run, restore_file=str(other), reset_optimizer=True)) is None
    last = run / "checkpoint_last.pt"
    for flags, expected in (([], "float32"), (["bf16"], "bf16")):
        write(last, flags)
        assert saved_precision(settings(run)) == Saved(expected, str(last))
        assert saved_precision(settings(run, finetune_from_model=str(other))) == Saved(expected, str(last))
    write(last, ["bf16"], last_optimizer_state=None)  # weights alone
    assert saved_precision(settings(run)) is None
    write(last, ["bf16"], cfg=None)  # an old checkpoint of stock fairseq
    assert saved_precision(settings(run)) is None


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
    ("machine", "has_onednn", "onednn_takes_bf16", "avx512_bf16", "amx", "is_amd", "expected"),
    [
        ("x86_64", True, True, False, False, True, False),  # AVX-512 without bfloat16: oneDNN converts
        ("x86_64", True, True, True, False, False, False),  # slower than float32
        ("x86_64", True, True, True, False, True, True),
        ("x86_64", True, True, False, True, False, True),
        ("aarch64", True, True, False, False, False, True),  # Neoverse V1
        ("arm64", False, False, False, False, False, False),  # macOS
    ],
)
def test_processors(machine, has_onednn, onednn_takes_bf16, avx512_bf16, amx, is_amd, expected, monkeypatch) -> None:
    monkeypatch.setattr(precision, "is_from_amd", lambda: is_amd)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn_takes_bf16)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert supports_bf16(on_gpu=False) is expected


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").is_file(), reason="for Linux on x86")
def test_this_processor_against_the_kernel() -> None:
    info = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^flags\s*:(.*)$", info, re.MULTILINE)[1].split())
    of_amd = "avx512_bf16" in flags and re.search(r"^vendor_id\s*: AuthenticAMD$", info, re.MULTILINE) is not None
    assert supports_bf16(on_gpu=False) == (of_amd or "amx_bf16" in flags)


def test_all_gpus_are_asked_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        assert gpus_support_bf16()  # of no GPUs; the process starts and answers
    monkeypatch.setattr(precision, "ProcessPoolExecutor", lambda number, context: ThreadPoolExecutor(number))
    for capabilities, expected in (([(8, 0), (9, 0)], True), ([(8, 0), (7, 5)], False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda each=capabilities: len(each))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
        assert gpus_support_bf16() is expected
