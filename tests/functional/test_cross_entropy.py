"""Output layer and cross entropy of the MLM head against loops over positions and rows in float64."""

import math

import pytest
import torch

from amos_fairseq.functional.cross_entropy import linear_cross_entropy


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 8), (20, 8), (20,)))
    return [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]


TARGETS = torch.tensor([[0, 5, 19], [7, 7, 3]])
PLACES = [(b, m) for b in range(2) for m in range(3)]


def row_logits(hidden, weight, bias, b: int, m: int) -> list[float]:
    return [
        sum(hidden[b, m, d].item() * weight[v, d].item() for d in range(8)) + bias[v].item() for v in range(len(bias))
    ]


def test_values_match_a_loop():
    hidden, weight, bias = inputs()
    targets = TARGETS.clone()
    for b, m in PLACES[:3]:  # half of the targets are the best prediction
        logits = row_logits(hidden, weight, bias, b, m)
        targets[b, m] = logits.index(max(logits))
    nll, correct = linear_cross_entropy(hidden, weight, bias, targets)
    assert nll.shape == correct.shape == (2, 3)
    assert correct.tolist() == [[True] * 3, [False] * 3]
    for b, m in PLACES:
        logits = row_logits(hidden, weight, bias, b, m)
        expected = math.log(sum(math.exp(x) for x in logits)) - logits[targets[b, m]]
        assert nll[b, m].item() == pytest.approx(expected, rel=1e-5)


def test_gradients_are_probability_minus_target():
    """d nll / d logits = p - onehot, carried to hidden, weight and bias by hand; every row takes part, also row 0."""
    hidden, weight, bias = inputs()
    upstream = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))
    linear_cross_entropy(hidden, weight, bias, TARGETS)[0].backward(upstream)
    by_bias, by_weight = torch.zeros(20).double(), torch.zeros(20, 8).double()
    for b, m in PLACES:
        logits = torch.tensor(row_logits(hidden, weight, bias, b, m), dtype=torch.float64)
        by_logits = (logits.exp() / logits.exp().sum()) * upstream[b, m].item()
        by_logits[TARGETS[b, m]] -= upstream[b, m].item()
        assert torch.allclose(hidden.grad[b, m].double(), by_logits @ weight.detach().double(), atol=1e-5)
        by_bias += by_logits
        by_weight += torch.outer(by_logits, hidden[b, m].detach().double())
    assert torch.allclose(bias.grad.double(), by_bias, atol=1e-5)
    assert torch.allclose(weight.grad.double(), by_weight, atol=1e-5)
    assert bias.grad.abs().min() > 0


def test_bfloat16_inputs_give_a_float32_loss_of_float32_softmax():
    """Logits are rounded to 8 bits (at most 2^-8 of 20), the softmax over them is not."""
    exact = linear_cross_entropy(*[tensor.to(torch.bfloat16).float() for tensor in inputs()], TARGETS)[0]
    nll, _ = linear_cross_entropy(*inputs(torch.bfloat16), TARGETS)
    assert nll.dtype == torch.float32
    assert (nll - exact).abs().max() < 20 * 2**-8
    assert not torch.equal(nll, nll.to(torch.bfloat16).float())
