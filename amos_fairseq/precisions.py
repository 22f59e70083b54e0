"""The precisions that can be chosen, and whether a device supports bfloat16 in hardware."""

import platform
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from amos_fairseq.errors import UserError

# Values of task.precision and of --precision; `auto` is bf16 where the device supports it in hardware, and float32 elsewhere.
PRECISIONS = ("auto", "float32", "bf16", "fp16")
# fairseq's settings in the section `common`. None of them: float32.
FLAGS = ("fp16", "bf16", "amp")


def precision_of(common: Mapping[str, Any]) -> str:
    """Return the precision that the section ``common`` of a run's settings states: float32 or one of :data:`FLAGS`."""
    return next((flag for flag in FLAGS if common.get(flag) is True), "float32")


def supports_bf16(on_gpu: bool) -> bool:
    """Return whether matrix products in bfloat16 are instructions of the device; emulated ones are slower than float32.

    Args:
        on_gpu: ask the current GPU, which opens a CUDA context on it: in a process that only starts others, ask
            :func:`gpus_support_bf16`.
    """
    import torch  # not needed for the names, which the command line shows

    if on_gpu:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.backends.mkldnn.is_available():  # PyTorch's own kernels use no such instruction
        return False
    # On ARM, oneDNN asks for the instructions. On x86 AVX-512 is enough for it, which converts every operand to float32.
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    # All processors with AMX tiles have amx_bf16.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def gpus_support_bf16() -> bool:
    """Return whether all visible GPUs support bfloat16 in hardware, without opening a CUDA context in this process.

    A forked process, which ends before this function does, asks them.

    Raises:
        UserError: the GPUs cannot be used.
    """
    try:
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            return pool.submit(_each_gpu_supports_bf16).result()
    except Exception as error:  # of the driver, or the end of the process
        reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no reason'])[0]}"
        raise UserError(
            f"the GPUs do not say whether they support bfloat16 in hardware ({reason}): give --precision float32, free them, "
            "or give --cpu"
        ) from error


def _each_gpu_supports_bf16() -> bool:
    import torch

    for index in range(torch.cuda.device_count()):
        torch.cuda.set_device(index)
        if not supports_bf16(on_gpu=True):
            return False
    return True
