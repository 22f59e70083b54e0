"""Every ``autograd.Function`` of this package under torch.compile: values and gradients are those of eager mode.

PyTorch 2.11 gives gradients of 0, without a word, for an in-place operation within ``Function.forward`` (pytorch issue 180642).
"""

import importlib
import pkgutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from amos_fairseq import functional
from amos_fairseq.functional import positions
from amos_fairseq.functional.cpu import _CpuAttention, _CpuDropout
from amos_fairseq.functional.mixture import _LogitsOfEntries, _ScaleGradient, _ZeroTimesEmbedding
from amos_fairseq.functional.output_layer import _OutputLayer, output_layer
from amos_fairseq.functional.positions import _PutRows, _RotateQueriesAndKeys, _TakeRows, pack_lengths
from amos_fairseq.functional.sampling import ReplacementSampler

PACKING = pack_lengths([2, 4, 1], (3, 4), torch.device("cpu"))
TOKENS = torch.tensor([[3, 0, 5], [1, 2, 4]])  # [N=2,J=3]
EMBEDDING = torch.linspace(-1, 1, 7 * 4).view(7, 4).sin()  # [V,E]


def cpu_attention(x: Tensor) -> Tensor:
    return _CpuAttention.apply(x.view(2, 3, 3, 2, 4), x[:36].view(2, 3, 6)[..., :3] * 2, None, 0.0, None)


def nll_of_two_depths(x: Tensor) -> Tensor:
    hidden, bias = x.view(2, 18, 4), x[:14].view(2, 7)
    targets = torch.arange(18) % 7
    nll, _, _ = output_layer(hidden, EMBEDDING, bias, targets, torch.tensor([0]), ReplacementSampler(), False)
    return nll


# Function -> a function of x [144] float32 with it, whose value depends on no random number.
CASES: dict[type[Function], Callable[[Tensor], Tensor]] = {
    _TakeRows: lambda x: PACKING.pack(x.view(3, 4, 12)),
    _PutRows: lambda x: PACKING.unpack(x[:84].view(1, 7, 12) * 2),
    _ScaleGradient: lambda x: _ScaleGradient.apply(x, -3.0),
    _RotateQueriesAndKeys: lambda x: _RotateQueriesAndKeys.apply(
        x.view(2, 3, 3, 2, 4), *positions.rotation(3, 4, 10.0, x.device)
    ),
    _CpuAttention: cpu_attention,
    _ZeroTimesEmbedding: lambda x: _ZeroTimesEmbedding.apply(x[:6].view(2, 3), TOKENS, EMBEDDING),
    _LogitsOfEntries: lambda x: _LogitsOfEntries.apply(
        x[:16].view(2, 2, 4), x[:12].view(2, 3, 2), TOKENS, EMBEDDING, 2.0
    ),
    _OutputLayer: nll_of_two_depths,
}


# It reads the memory of numpy, which torch.compile refuses to trace: compiled layers call PyTorch's dropout instead.
NOT_TRACED = {_CpuDropout}


def functions() -> set[type[Function]]:
    """The subclasses of Function in the modules of ``functional`` that need no GPU."""
    found = set()
    for module in pkgutil.walk_packages(functional.__path__, f"{functional.__name__}."):
        if ".cuda" not in module.name:
            members = vars(importlib.import_module(module.name)).values()
            found |= {each for each in members if isinstance(each, type) and issubclass(each, Function)} - {Function}
    return found


def test_every_function_has_a_case() -> None:
    assert functions() == CASES.keys() | NOT_TRACED


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_compiled_values_and_gradients_are_those_of_eager_mode(function: type[Function]) -> None:
    if function is _OutputLayer and torch.__version__ < "2.12":
        pytest.skip(
            "this torch cannot trace NamedTuple._replace, and says so; no compiled layer contains this function"
        )
    results = []
    for run in (CASES[function], torch.compile(CASES[function], backend="aot_eager")):
        x = torch.linspace(-2, 2, 144).cos().requires_grad_()
        torch.manual_seed(0)
        out = run(x)
        (out * torch.linspace(0, 3, out.numel()).view(out.shape)).sum().backward()
        results.append((out.detach(), x.grad))
    assert results[0][1].abs().max() > 0
    # The compiled operations are the same ones; sums may be taken in another order.
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    torch.compiler.reset()
