"""Modules whose kernels Triton's interpreter runs on the CPU, and what their attention is compared with."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from amos_fairseq.functional.attention import MASKED_SCORE, AttentionBias, reference_attention
from amos_fairseq.functional.relative_position import toeplitz


def interpreted(name: str) -> Iterator[ModuleType]:
    """For a fixture: the module ``amos_fairseq.functional.cuda.NAME``, whose kernels Triton interprets (tests/conftest.py)."""
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
            pytest.skip(
                f"Triton {triton.__version__} cannot interpret with numpy {np.__version__}: install numpy 2.3.5"
            )
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("TRITON_INTERPRET", "1")  # Triton imports some of itself at the first launch
        yield module


def attention_by_definition(
    heads: Tensor, bias: Tensor | None, padding: Tensor | None, side: str, positions: Tensor | None = None
) -> Tensor:
    """[B,T,H,d] of heads [B,T,3,H,d], biases by distance [H,2T-1] and padding [B,T], or at positions [B,M]."""
    places = torch.arange(heads.size(1), device=heads.device)
    ahead = places - places[:, None]
    forbidden = None if padding is None else padding[:, None, None, :]
    if side != "all":
        wrong_side = (ahead > 0 if side == "past" else ahead < 0)[None, None]
        forbidden = wrong_side if forbidden is None else wrong_side | (forbidden & (ahead != 0))
    fixed = None if forbidden is None else forbidden.to(heads.dtype) * MASKED_SCORE
    mixed = reference_attention(heads, AttentionBias(None if bias is None else toeplitz(bias), fixed), 0.0)
    if positions is None:
        return mixed
    return mixed.gather(1, positions[:, :, None, None].expand(-1, -1, *mixed.shape[2:]))
