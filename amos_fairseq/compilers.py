"""Test whether torch.compile and Triton work on this machine, before a run depends on them."""

import importlib
import time

import torch

from amos_fairseq.errors import UserError

# What torch.compile needs on each type of device.
COMPILERS = {
    "cpu": "a C++ compiler (g++ or clang++; CXX names another one)",
    "cuda": "the Triton that belongs to this PyTorch, and a C compiler (gcc; CC names another one)",
}


def require_compiler(device: torch.device) -> None:
    """Compile a small function on ``device``.

    Raises:
        UserError: PyTorch finds no working compiler, or does not support compilation on this Python.
    """
    new = time.time()  # otherwise the result may come from a cache file of a time when there was a compiler

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x * new).sin()

    try:
        torch.compile(scaled)(torch.ones(64, device=device))
    except Exception as error:  # the compiler, and whatever starts it, may raise any exception
        # "backend='inductor' raised:" is a line by itself, followed by the reason.
        reasons = [line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
        raise UserError(
            f"model.compile=true does not work on this machine ({reasons[0] if reasons else repr(error)}): install "
            f"{COMPILERS.get(device.type, 'what PyTorch needs to compile')}, or train with model.compile=false (without "
            "--compile)"
        ) from error


def require_triton(device: torch.device) -> None:
    """Run the attention of ``model.kernels=triton`` once, forward and backward.

    Raises:
        UserError: Triton is not installed, or does not compile here.
    """
    try:
        attention = importlib.import_module("amos_fairseq.functional.cuda.attention")
    except ValueError as error:
        raise UserError(str(error)) from error
    heads = torch.randn(1, 16, 3, 1, 16, device=device, dtype=torch.float16, requires_grad=True)
    try:
        attention.triton_attention(heads).sum().backward()
    except Exception as error:  # the compiler, and whatever starts it, may raise any exception
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise UserError(
            f"model.kernels=triton does not work on this machine ({reason}): install {COMPILERS['cuda']}, or train with "
            "model.kernels=fast"
        ) from error
