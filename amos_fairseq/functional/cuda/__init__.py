"""Kernels in Triton for CUDA; imported where ``model.kernels=triton`` needs them, because Triton is no dependency.

Raises:
    ValueError: at import, where Triton is not installed.
"""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ValueError(
        "model.kernels=triton needs the package triton, which PyTorch's CUDA builds for Linux bring along: install it, or use "
        "model.kernels=fast"
    )
