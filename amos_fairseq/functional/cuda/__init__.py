"""Triton kernels for CUDA. Imported only if ``model.kernels=triton`` needs them, because Triton is an optional dependency.

Raises:
    ValueError: at import, if Triton is not installed, or older than the kernels need.
"""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ValueError("the package triton, which PyTorch's CUDA builds for Linux bring along, is missing")

import triton

# The compiler of 3.2, the one of torch 2.6, aborts the process when it compiles the backward pass of attention.
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
    raise ValueError(f"it needs Triton 3.3 or newer, which torch 2.7 brings along, and found {triton.__version__}")
