"""The cross entropy of the MLM head against loops over positions and rows, and the copy mechanism against its distribution."""

import math

import pytest
import torch

from amos_fairseq.functional.output_layer import copy_cross_entropy, linear_cross_entropy


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 8), (20, 8), (20,)))
    return [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)]


TARGETS = torch.tensor([[0, 5, 19], [7, 7, 3]])
PLACES = [(b, m) for b in range(2) for m in range(3)]


def row_logits(hidden, weight, bias, b: int, m: int) -> list[float]:
    h = hidden[b, m].tolist()
    return [sum(x * w for x, w in zip(h, weight[v].tolist(), strict=True)) + bias[v].item() for v in range(len(bias))]


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


def test_bfloat16_inputs_give_a_float32_loss_of_float32_softmax():
    """Logits are rounded to 8 bits (at most 2^-8 of 20), the softmax over them is not."""
    exact = linear_cross_entropy(*[tensor.to(torch.bfloat16).float() for tensor in inputs()], TARGETS)[0]
    nll, _ = linear_cross_entropy(*inputs(torch.bfloat16), TARGETS)
    assert nll.dtype == torch.float32
    assert (nll - exact).abs().max() < 20 * 2**-8
    assert not torch.equal(nll, nll.to(torch.bfloat16).float())


VOCABULARY = 7


def written_out(logits: torch.Tensor, copy_logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """p(v) = D [v = input] + (1 - D) softmax(v): [N,V]."""
    d = copy_logits.sigmoid().unsqueeze(-1)
    return d * torch.nn.functional.one_hot(inputs, VOCABULARY) + (1 - d) * logits.softmax(-1)


@pytest.fixture
def copy_inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, VOCABULARY, generator=generator, dtype=torch.float64) * 2
    copy_logits = torch.randn(40, generator=generator, dtype=torch.float64) * 2
    inputs, targets = (torch.randint(VOCABULARY, (40,), generator=generator) for _ in range(2))
    targets[::2] = inputs[::2]  # half of the inputs are originals
    return logits, copy_logits, inputs, targets


def test_losses_gradients_and_predictions_match_the_distribution(copy_inputs) -> None:
    logits, copy_logits, inputs, targets = copy_inputs
    ours, theirs = ([leaf.clone().requires_grad_() for leaf in (logits, copy_logits)] for _ in range(2))
    nll, correct = copy_cross_entropy(*ours, inputs, targets)
    probabilities = written_out(*theirs, inputs)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(40, dtype=torch.float64))
    expected = -probabilities.gather(1, targets[:, None])[:, 0].log()
    torch.testing.assert_close(nll, expected)
    assert correct.tolist() == probabilities.argmax(-1).eq(targets).tolist()
    assert {True, False} == set(correct.tolist())
    nll.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close([leaf.grad for leaf in ours], [leaf.grad for leaf in theirs])


@pytest.mark.parametrize("certainty", [-200.0, 200.0])
def test_certain_copies_give_finite_losses(certainty: float) -> None:
    """In float32 D is 0 or 1 there; the loss of the token that is not copied is about 200 nats, as in float64."""
    logits = torch.zeros(2, VOCABULARY, requires_grad=True)
    copy_logits = torch.full((2,), certainty, requires_grad=True)
    nll, _ = copy_cross_entropy(logits, copy_logits, torch.tensor([1, 1]), torch.tensor([1, 2]))
    uniform = torch.log(torch.tensor(7.0)).item()
    expected = [0.0, 200.0 + uniform] if certainty > 0 else [uniform, uniform]
    assert nll.tolist() == pytest.approx(expected, abs=1e-4)
    nll.sum().backward()
    assert logits.grad.isfinite().all()
    assert copy_logits.grad.isfinite().all()
