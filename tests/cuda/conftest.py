"""Where Triton is installed and no GPU, this process runs its kernels on the CPU, in Triton's interpreter.

With a GPU they are left to tests/gpu, which compiles them: a process does the one or the other.
"""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

if find_spec("triton") is not None and not torch.cuda.is_available():
    # Triton reads the variable when it is imported, which other tests do, too. Processes that tests start do not inherit it.
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("TRITON_INTERPRET", "1")
        for name in ("attention", "output_layer"):
            import_module(f"amos_fairseq.functional.cuda.{name}")
