"""Dropout from few random numbers: its probability, scale and gradient."""

import math

import pytest
import torch
from torch import nn

from amos_fairseq.functional.cpu import dropout, dropped_levels, keep_scale, sample_keep_mask
from amos_fairseq.modules.encoder import make_dropout

COUNT = 2**20


def assert_share(values: torch.Tensor, probability: float) -> None:
    """Of independent samples; six standard deviations are left on one seed in five hundred million."""
    count = values.numel()
    deviation = math.sqrt(count * probability * (1 - probability))
    assert abs(int(values.sum()) - count * probability) < 6 * deviation


@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.75])
def test_every_lane_of_a_random_number_drops_with_its_probability(probability: float) -> None:
    torch.manual_seed(0)
    kept = sample_keep_mask((COUNT // 4, 4), probability)
    assert kept.dtype == torch.bool
    for lane in kept.t():
        assert_share(lane, 1 - dropped_levels(probability) / 2**16)


def test_neighbours_are_independent() -> None:
    """Both of two neighbours remain in a quarter of the cases, within a random number and across random numbers."""
    torch.manual_seed(1)
    kept = sample_keep_mask((COUNT,), 0.5)
    for distance in (1, 2, 3, 4, 5):
        assert_share((kept & kept.roll(distance))[:: distance + 1], 0.25)


@pytest.mark.parametrize("probability", [1e-9, 1e-5, 0.1, 1 / 3, 0.9, 1 - 1e-9])
def test_probability_in_effect_is_near_and_the_scale_fits_it(probability: float) -> None:
    effective = dropped_levels(probability) / 2**16
    assert abs(effective - probability) < 2**-16
    assert effective < 1
    assert keep_scale(probability) * (1 - effective) == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 5, 11), (0, 4), (64, 64)])
def test_values_and_gradients_are_zero_or_scaled_together(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    out = dropout(x, 0.25)
    assert out.dtype == dtype
    assert set(out.detach().unique().tolist()) <= {0.0, torch.tensor(4 / 3, dtype=dtype).item()}
    assert out.numel() < 100 or 0 < int(out.eq(0).sum()) < out.numel()
    out.backward(torch.ones_like(out))
    assert torch.equal(x.grad, out)


def test_module_drops_only_in_training_and_reference_is_pytorchs() -> None:
    x = torch.ones(1000)
    for kernels in ("fast", "reference"):
        module = make_dropout(0.5, kernels)
        assert not torch.equal(module(x), x)
        assert torch.equal(module.eval()(x), x)
        assert torch.equal(make_dropout(0.0, kernels)(x), x)
    torch.manual_seed(0)
    expected = nn.functional.dropout(x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(make_dropout(0.5, "reference")(x), expected)


def test_compiled_dropout_is_one_graph() -> None:
    """In one graph, which the fast kernel would break; the compiler samples its own mask, so values are compared, not bits."""
    torch.manual_seed(0)
    out = torch.compile(lambda x: dropout(x, 0.5), backend="aot_eager", fullgraph=True)(torch.ones(1000))
    assert set(out.unique().tolist()) == {0.0, 2.0}
