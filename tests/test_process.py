"""Waiting threads sleep and freed memory is kept, unless the user has set them."""

import os
import sys

import pytest
from tiny_runs import ROOT, run_process

from amos_fairseq.process import MALLOC_VARIABLES, OPENMP_VARIABLES

# Freed and allocated again, 64 MiB cost 16,384 page faults if glibc has returned them to the system.
ASK_MALLOC = """
import ctypes, resource
{call}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""
CALL = "from amos_fairseq.process import keep_freed_memory; print(keep_freed_memory())"
UNSET = {name: value for name, value in os.environ.items() if name not in (*MALLOC_VARIABLES, *OPENMP_VARIABLES)}


def run(code: str, **variables: str) -> list[str]:
    started = f"import amos_start\n{code}"
    result = run_process([sys.executable, "-c", started], env=UNSET | {"PYTHONPATH": str(ROOT)} | variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_kept():
    (stock,) = run(ASK_MALLOC.format(call=""))
    answer, kept = run(ASK_MALLOC.format(call=CALL))
    assert answer == "True"
    assert int(stock) > 16_000
    assert int(kept) < 100
    assert run(CALL, MALLOC_TOP_PAD_="131072") == ["False"], "what a user sets is left alone"


@pytest.mark.parametrize(("variables", "expected"), [({}, "passive"), ({"GOMP_SPINCOUNT": "100"}, "None")])
def test_threads_wait_passively(variables: dict[str, str], expected: str):
    code = "import os; amos_start.start(); print(os.environ.get('OMP_WAIT_POLICY'))"
    assert run(code, **variables) == [expected]


ASK_IMPORT = """
import logging, os, sys
sys.modules["pyarrow"] = None  # scikit-learn imports it where it is installed, and it starts a thread of its own
before = logging.root.level, logging.root.handlers[:]
import torch
torch._C._cuda_getDeviceCount = None  # to call it would initialize CUDA
import amos_fairseq
amos_fairseq.register()
del torch._C._cuda_getDeviceCount
import torch._dynamo
print(before == (logging.root.level, logging.root.handlers), len(os.listdir("/proc/self/task")), torch.cuda.is_initialized())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_importing_the_plugin_changes_no_logger_and_starts_no_thread():
    """Also not with what a training imports, in the environment of the server that forks the trainings."""
    variables = {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = run_process([sys.executable, "-c", ASK_IMPORT], env=UNSET | variables | {"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "1", "False"]
