"""Settings of a process (threads, memory), and the versions of its libraries.

* At the end of a parallel loop, GNU's OpenMP lets threads spin until all are done. On a busy machine they spin for as long as
  another program has the core: two threads of ``amos_tiny`` beside two busy programs trained 6,300 tokens/s, and 11,800 when
  they slept instead. On idle cores both trained 25,200.
* glibc returns the freed memory of large tensors to the system, which then clears every page of the next ones.

A user's own settings take precedence. Neither setting changes a result.
"""

import ctypes
import os
import platform
import sys
from importlib import metadata

import amos_fairseq

OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
# Parameters of mallopt(3), <malloc.h>. Up to 2 GiB are kept; tensors below 1 GiB come from the heap, which grows by 64 MiB.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_MALLOC_SETTINGS = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**26, _MMAP_THRESHOLD: 2**30}
# Before glibc 2.35 a larger threshold is refused.
_LARGEST_MMAP_THRESHOLD = 2**25


def wait_passively() -> None:
    """Let idle OpenMP threads of this process, and of those that it starts, sleep; to be called before PyTorch is imported."""
    if not any(name in os.environ for name in OPENMP_VARIABLES):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def keep_freed_memory() -> bool:
    """Let glibc keep the memory that this process frees; return whether it does. Other C libraries are left alone."""
    if sys.platform != "linux" or any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = [mallopt(parameter, value) for parameter, value in _MALLOC_SETTINGS.items()]
    return all(done[:2]) and bool(done[2] or mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; "unknown" if it is on ``PYTHONPATH`` without metadata."""
    if distribution == "amos_fairseq":  # often used from a checkout, without metadata
        return amos_fairseq.__version__
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def describe_versions() -> str:
    libraries = ", ".join(f"{name} {version_of(name)}" for name in ("fairseq-fixed", "torch"))
    return f"amos_fairseq {amos_fairseq.__version__} ({libraries}, Python {platform.python_version()})"
