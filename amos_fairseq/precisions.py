"""The precisions that can be chosen, and whether a device multiplies bfloat16."""

import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from amos_fairseq.errors import UserError

# Values of task.precision and of --precision; `auto` is bf16 where the device multiplies it, and float32 elsewhere.
PRECISIONS = ("auto", "float32", "bf16", "fp16")
# fairseq's settings in the section `common`. None of them: float32.
FLAGS = ("fp16", "bf16", "amp")


def precision_of(common: Mapping[str, Any]) -> str:
    """Return the precision that the section ``common`` of a run's settings states: float32 or one of :data:`FLAGS`."""
    return next((flag for flag in FLAGS if common.get(flag) is True), "float32")


def multiplies_bf16(on_gpu: bool) -> bool:
    """Return whether matrix products in bfloat16 are instructions of the device; emulated ones are slower than float32.

    Args:
        on_gpu: ask the current GPU, which opens a CUDA context on it: in a process that only starts others, ask
            :func:`gpus_multiply_bf16`.
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


ASK_ALL_GPUS = """
import sys
sys.path[:] = filter(None, sys.path)  # import nothing from the current folder
import torch
for index in range(torch.cuda.device_count()):
    torch.cuda.set_device(index)
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        sys.exit(3)
"""


def gpus_multiply_bf16() -> bool:
    """Return whether all GPUs that this process sees multiply bfloat16, without opening a CUDA context in this process.

    A process that ends before this function does asks them. It takes as long as an import of PyTorch.

    Raises:
        UserError: the GPUs cannot be used.
    """
    asked = subprocess.run([sys.executable, "-c", ASK_ALL_GPUS], capture_output=True, text=True, check=False)
    if asked.returncode not in (0, 3):
        reason = (asked.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"the GPUs do not say whether they multiply bfloat16 ({reason}): give --precision float32, free them, or give --cpu"
        )
    return asked.returncode == 0
