"""The precision of a run: ``task.precision``, or fairseq's flags; and whether a device has fast bfloat16 products.

``auto`` is bf16 where the device of the first rank has fast bfloat16 products, and float32 elsewhere; a run that continues
keeps its own. The choice is made in the rank, since asking a GPU opens a CUDA context on it: in a launcher, that would keep
the ranks off a GPU that admits one process. It is logged, and stored in the checkpoint as the settings that fairseq reads
(``common.bf16``, ``common.fp16``) and as ``task.precision``.

Stock fairseq, as observed: ``--fp16`` on a CPU fails inside CUDA. Under
``--fp16`` fairseq merges all float32 master weights into one flat tensor, which cannot keep the parameter groups of this
package's optimizers, and asks the user for another flag.
"""

import logging
import platform
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Optional  # fairseq reads the types of config classes in this spelling

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.optim import OPTIMIZER_REGISTRY

from amos_fairseq.checkpoint_files import read_header, settings_in
from amos_fairseq.compat.distribution import from_first_rank, visible_gpus
from amos_fairseq.compat.patching import running_scripts
from amos_fairseq.errors import UserError
from amos_fairseq.recipes import PRECISIONS
from amos_fairseq.run.hook import Hook
from amos_fairseq.run.resume import checkpoint_to_load
from amos_fairseq.setting_checks import setting

logger = logging.getLogger(__name__)

FLAGS = ("fp16", "bf16")  # fairseq's settings in the section `common`; none of them is float32
# fp16 and bf16 have the same master weights: a run of one continues in the other. fairseq refuses any other change.
WITH_STATE_OF = {"float32": "float32", "bf16": "fp16", "fp16": "fp16"}


class Saved(NamedTuple):
    """The run that is continued: its precision, float32 or one of fairseq's flags, and its checkpoint."""

    precision: str
    path: str


class Device(NamedTuple):
    """What a run trains on; ``reason`` says whether it supports bfloat16."""

    on_gpu: bool
    supports_bf16: bool = True  # also where the precision does not depend on it
    reason: str = ""


@dataclass
class PrecisionSettings(FairseqDataclass):
    precision: Optional[ChoiceEnum(PRECISIONS)] = setting(  # noqa: UP045
        None,
        "auto: bf16 where the device of the first rank has fast bfloat16 products, else "
        "float32; a run that continues keeps its own (default: --bf16 or --fp16, else float32)",
    )


class Precision(Hook):
    """Refuse before the launch what no device, or no CPU, can do, without asking a GPU; choose in the ranks, where the devices
    are known."""

    def before_launch(self, cfg: Any) -> None:
        choose(*requested_precision(cfg), Device(visible_gpus(cfg) > 0), None)

    def before_trainer(self, cfg: Any) -> None:
        # A program that has a trainer without fairseq's script continues no run.
        saved = from_first_rank(lambda: saved_precision(cfg.checkpoint)) if running_scripts() else None
        set_precision(cfg, visible_gpus(cfg) > 0, saved)


def requested_precision(cfg: Any) -> tuple[str, str]:
    """Return what the settings ask for, a value of ``task.precision``, and the setting that says so, with ``auto`` a flag."""
    named = getattr(cfg.task, "precision", None)
    settings = {f"--{flag}": flag for flag in FLAGS if getattr(cfg.common, flag)}
    if named is not None and not (settings and str(named) == "auto"):
        settings[f"task.precision={named}"] = str(named)
    # --memory-efficient-*: our optimizers update float32 weights, which such a run does not keep.
    others = ["amp", *(f"memory_efficient_{flag}" for flag in FLAGS if _has_our_optimizer(cfg))]
    others = [f"--{name.replace('_', '-')}" for name in others if getattr(cfg.common, name)]
    if others or len(set(settings.values())) > 1:
        raise UserError(
            f"{' and '.join([*others, *settings])}: give one of --bf16 (common.bf16=true), --fp16, or task.precision "
            "(--precision) alone"
        )
    return next(((name, setting) for setting, name in settings.items()), ("float32", ""))


def set_precision(cfg: Any, on_gpu: bool, saved: Saved | None = None) -> str:
    """Set the precision that the settings ask for on the device of the first rank, log and return it. A collective operation.
    ``saved``: what the run continues."""
    request, setting = requested_precision(cfg)

    def choose_here() -> tuple[str, str]:
        if request not in ("auto", "bf16"):
            return choose(request, setting, Device(on_gpu), saved)
        supported = supports_bf16(on_gpu)
        reason = f"this {'GPU' if on_gpu else 'processor'} has{'' if supported else ' no'} fast bfloat16 products"
        return choose(request, setting, Device(on_gpu, supported, reason), saved)

    name, reason = from_first_rank(choose_here)
    for flag in FLAGS:
        setattr(cfg.common, flag, flag == name)
    if getattr(cfg.task, "precision", None) is not None:
        cfg.task.precision = name
    if name == "fp16" and _has_our_optimizer(cfg):
        cfg.common.fp16_no_flatten_grads = True
    logger.info(f"precision: {name}{f' ({reason})' if reason else ''}")
    return name


def choose(request: str, setting: str, device: Device, saved: Saved | None) -> tuple[str, str]:
    """Return the precision of a run and the reason for it; refuse what the device cannot do. All cases are decided here.

    ``request``: a value of ``task.precision``, which ``setting`` asks for, in messages. ``saved``: the run that is continued. A
    CPU trains in bf16 also without fast products.
    """
    name, reasons = request, []
    if request == "auto":
        name = saved.precision if saved else "bf16" if device.supports_bf16 else "float32"
        reasons.append(f"auto: as in {saved.path}" if saved else f"auto: {device.reason}")
    if saved and WITH_STATE_OF[name] != WITH_STATE_OF[saved.precision]:
        raise UserError(
            f"{saved.path} was trained in {saved.precision} and has no state to continue in {name}: keep {saved.precision} "
            f"(task.precision={saved.precision}), or start a new run from its weights (--finetune-from-model {saved.path}, "
            "another --save-dir)"
        )
    is_slow = name == "bf16" and not device.supports_bf16
    if (is_slow and device.on_gpu) or (name == "fp16" and not device.on_gpu):
        needs = f"needs bfloat16 products, and {device.reason}" if is_slow else "needs a GPU"
        other = "fp16" if device.on_gpu else "bf16"
        what = f"{saved.path} was trained in {saved.precision}, and {name}" if saved else setting
        advice = (
            f"give task.precision={other} to continue with its master weights"
            if saved
            else f"train in {other} or float32"
        )
        raise UserError(f"{what} {needs}: {advice}")
    if is_slow:
        reasons.append(f"slower than float32: {device.reason}")
    return name, ", ".join(reasons)


def saved_precision(cfg: Any) -> Saved | None:
    """Return the precision of the run that is continued with its optimizer; None for a new run, which keeps nothing of the one
    whose weights it begins with. ``cfg``: the section ``checkpoint``."""
    path = checkpoint_to_load(cfg)
    if path is None or path == cfg.finetune_from_model or cfg.reset_optimizer:
        return None
    header = read_header(path)
    common = settings_in(header, "common")
    is_continued = common and header.get("last_optimizer_state")
    return Saved(precision_of(common), path) if is_continued else None  # else of another program, or weights alone


def precision_of(common: Mapping[str, Any]) -> str:
    """Return the precision that the section ``common`` of a run's settings states: float32 or one of :data:`FLAGS`."""
    return next((flag for flag in FLAGS if common.get(flag) is True), "float32")


def supports_bf16(on_gpu: bool) -> bool:
    """Return whether the device has instructions with which matrix products in bfloat16 are faster than in float32. Asking a
    GPU opens a CUDA context on it: in a process that only starts others, see :func:`gpus_support_bf16`."""
    if on_gpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # PyTorch's own kernels use no such instruction
        return False
    # On ARM, oneDNN asks for the instructions. On x86 AVX-512 is enough for it, which converts every operand to float32, and
    # with Intel's AVX512_BF16 alone training was slower than in float32, with AMD's twice as fast (docs/precision.md). Those
    # with AMX tiles have amx_bf16.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and is_from_amd())


def is_from_amd() -> bool:
    info = Path("/proc/cpuinfo")
    return info.is_file() and "AuthenticAMD" in info.read_text(encoding="utf-8", errors="replace")


def gpus_support_bf16() -> bool:
    """Return whether all visible GPUs have fast bfloat16 products. A new process asks them, which imports PyTorch alone: a fork
    of this one must not use CUDA once ``torch.cuda.is_available()`` was called."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            # As torch.cuda.is_bf16_supported without emulation, for any GPU and not the current one.
            numbers = range(process.submit(torch.cuda.device_count).result())
            capabilities = [process.submit(torch.cuda.get_device_capability, number).result() for number in numbers]
    except Exception as error:  # of the driver, or the end of the process
        raise UserError(
            f"the GPUs do not say whether they have fast bfloat16 products ({type(error).__name__}: {error}): give "
            "--precision float32, free them, or give --cpu"
        ) from error
    return torch.version.hip is not None or all(major >= 8 for major, _ in capabilities)


def _has_our_optimizer(cfg: Any) -> bool:
    """Return whether the optimizer is of this package: only those need parameter groups and float32 weights."""
    optimizer = OPTIMIZER_REGISTRY.get(getattr(cfg.optimizer, "_name", None))
    return optimizer is not None and optimizer.__module__.startswith("amos_fairseq.")
