"""Linear layers as convolutions: the values and gradients of the definition, and when they are taken."""

import pytest
import torch
from torch.nn import functional

from amos_fairseq.functional.cpu import linear as module
from amos_fairseq.functional.cpu.linear import linear, uses_convolution
from amos_fairseq.modules.encoder import make_linear


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_MULTIPLICATIONS", 0)


def leaves(*leading: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x [...,5], weight [7,5], bias [7]."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((*leading, 5), (7, 5), (7,))
    ]


@pytest.mark.parametrize("leading", [(1,), (9,), (2, 3), (3, 1), (2, 3, 4)], ids=str)
@pytest.mark.usefixtures("every_size")
def test_values_and_gradients_match_float64(leading: tuple[int, ...]) -> None:
    """Sums of at most 24 products of size 1 in float32: 1e-5."""
    x, weight, bias = leaves(*leading)
    assert uses_convolution(x, weight)
    result = linear(x, weight, bias)
    assert result.shape == (*leading, 7)
    assert result.is_contiguous()
    by_result = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
    expected = exact[0] @ exact[1].T + exact[2]
    got = torch.autograd.grad(result, (x, weight, bias), by_result)
    wanted = torch.autograd.grad(expected, exact, by_result.double())
    for ours, definition in zip((result, *got), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours.double(), definition, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("every_size")
def test_strided_input() -> None:
    """Every second token, as a slice leaves them."""
    x, weight, bias = leaves(2, 6)
    torch.testing.assert_close(linear(x[:, ::2], weight, bias), functional.linear(x[:, ::2], weight, bias))


def test_only_large_float32_products_of_a_cpu_become_convolutions() -> None:
    """2^27 multiplications: 2,048 tokens x 256 x 256."""
    weight = torch.empty(256, 256)
    assert uses_convolution(torch.empty(2048, 256), weight)
    assert not uses_convolution(torch.empty(2047, 256), weight)
    assert not uses_convolution(torch.empty(2048, 256, dtype=torch.bfloat16), weight.bfloat16())
    assert not uses_convolution(torch.empty(2048, 256, dtype=torch.float64), weight.double())
    assert not uses_convolution(torch.empty(2048, 256, device="meta"), weight.to("meta"))


def test_the_reference_is_pytorchs_own_layer() -> None:
    assert type(make_linear(5, 7, "reference")) is torch.nn.Linear
    assert type(make_linear(5, 7, "fast")) is not torch.nn.Linear
