"""Description of this machine, its matrix product rate and its memory bandwidth."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from amos_fairseq.bench.measurement import sustained_seconds
from amos_fairseq.versions import version_of

# Sizes of the square products: the peak is the fastest of them, because the best size differs between machines.
MATMUL_EDGES = {"cpu": (1024, 2048, 4096), "cuda": (4096, 8192, 16384)}
COPIED_BYTES = {"cpu": 2**28, "cuda": 2**31}  # much larger than every cache
SECONDS = {"cpu": 1.0, "cuda": 2.0}  # for each size and for the copy; a GPU reaches its power limit in the first half
PACKAGES = ("amos_fairseq", "torch", "fairseq-fixed", "transformers", "numpy")


def matmul_peak(device: torch.device, dtype: torch.dtype, edges: tuple[int, ...] | None = None) -> float:
    """Return the FLOP/s of the fastest square matrix product; a multiplication and an addition are two operations.

    This rate is an upper bound for a training step: the sustained median of products of random normal values. A product
    draws more power the more bits change between its operands, and a GPU at its power limit lowers its clock: an H200,
    measured with another program, multiplied 8192 x 8192 matrices in bf16 at 894 TFLOP/s if they were zeros and at 788 if
    they were random. Values in [0, 1) share their sign and most of their exponents. Short bursts end before the clock
    falls, and the best of many bursts is a rate that a training step cannot sustain. float32 is PyTorch's default float32
    (no TF32 unless the caller allowed it).
    """
    peak = 0.0
    for edge in edges or MATMUL_EDGES[device.type]:
        operations = 2 * edge**3
        if peak == 0 or operations / peak < SECONDS[device.type]:  # a slow CPU leaves out the largest product
            peak = max(peak, operations / matmul_seconds(edge, device, dtype))
    return peak


def matmul_seconds(edge: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(edge, edge, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    return sustained_seconds(lambda: torch.mm(left, right, out=product), device, SECONDS[device.type])


def memory_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Return the sustained bytes/s of a copy of ``size`` bytes (a multiple of 8), counting both reads and writes.

    The bytes are random for the same reason as the values of :func:`matmul_peak`.
    """
    source = torch.empty((size or COPIED_BYTES[device.type]) // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / sustained_seconds(lambda: target.copy_(source), device, SECONDS[device.type])


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the hardware for the report."""
    gpu = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": gpu,
    }


def processor_name() -> str:
    """Return the processor model as Linux reports it, or the architecture on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a step uses."""
    found = {"python": platform.python_version()} | {package: version_of(package) for package in PACKAGES}
    return found | {"torch": torch.__version__}  # with the build, such as +cu130
