"""Where Triton is installed, this process runs its kernels on the CPU, in Triton's interpreter."""

from importlib import import_module
from importlib.util import find_spec

import pytest

if find_spec("triton") is not None:
    # Triton reads the variable when it is imported, which other tests do, too. Processes that tests start do not inherit it.
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("TRITON_INTERPRET", "1")
        for name in ("attention", "output_layer"):
            import_module(f"amos_fairseq.functional.cuda.{name}")
