"""Modules whose kernels Triton's interpreter runs on the CPU."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch


def interpreted(name: str) -> Iterator[ModuleType]:
    """For a fixture: the module ``amos_fairseq.functional.cuda.NAME``, whose kernels Triton interprets (tests/conftest.py).

    The test is skipped where the interpreter does not run.
    """
    if torch.cuda.is_available():
        pytest.skip("a process with a GPU compiles the kernels: tests/gpu")
    import triton

    module = importlib.import_module(f"amos_fairseq.functional.cuda.{name}")
    attention = importlib.import_module("amos_fairseq.functional.cuda.attention")
    assert type(triton.language.sum).__name__ == "InterpretedFunction", "Triton was imported before tests/conftest.py"
    assert attention.IS_INTERPRETED
    try:
        int(np.ones(1))
    except TypeError:
        if int(triton.__version__.split(".")[1]) < 9:
            pytest.skip("the interpreter of this Triton does not run with this numpy (seen: 3.6.0 with 2.4.6)")
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("TRITON_INTERPRET", "1")  # Triton imports some of itself at the first launch
        yield module
