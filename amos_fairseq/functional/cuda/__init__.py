"""Triton kernels for CUDA. Imported only if ``model.kernels=triton`` needs them, because Triton is an optional dependency.

Raises:
    ValueError: at import, if Triton is not installed.
"""

from importlib.util import find_spec

if find_spec("triton") is None:
    raise ValueError(
        "model.kernels=triton needs the package triton, which PyTorch's CUDA builds for Linux bring along: install it, or use "
        "model.kernels=fast"
    )
