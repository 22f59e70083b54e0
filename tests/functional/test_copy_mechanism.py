"""The copy mechanism against the distribution itself, written out in float64."""

import pytest
import torch

from amos_fairseq.functional.cross_entropy import copy_cross_entropy

WORDS = 7


def written_out(logits: torch.Tensor, copy_logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """p(v) = D [v = input] + (1 - D) softmax(v): [N,V]."""
    d = copy_logits.sigmoid().unsqueeze(-1)
    return d * torch.nn.functional.one_hot(inputs, WORDS) + (1 - d) * logits.softmax(-1)


@pytest.fixture
def given() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(40, WORDS, generator=draw, dtype=torch.float64) * 2
    copy_logits = torch.randn(40, generator=draw, dtype=torch.float64) * 2
    inputs, targets = (torch.randint(WORDS, (40,), generator=draw) for _ in range(2))
    targets[::2] = inputs[::2]  # half of the inputs are originals
    return logits, copy_logits, inputs, targets


def test_losses_gradients_and_guesses_are_those_of_the_distribution(given) -> None:
    logits, copy_logits, inputs, targets = given
    ours = [logits.clone().requires_grad_(), copy_logits.clone().requires_grad_()]
    theirs = [logits.clone().requires_grad_(), copy_logits.clone().requires_grad_()]
    nll, correct = copy_cross_entropy(*ours, inputs, targets)
    probabilities = written_out(*theirs, inputs)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(40, dtype=torch.float64))
    expected = -probabilities.gather(1, targets[:, None])[:, 0].log()
    torch.testing.assert_close(nll, expected)
    assert correct.tolist() == probabilities.argmax(-1).eq(targets).tolist()
    assert {True, False} == set(correct.tolist())
    nll.sum().backward()
    expected.sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("certainty", [-200.0, 200.0])
def test_certainty_is_no_infinity(certainty: float) -> None:
    """In float32 D is 0 or 1 there; the loss of the word that is not copied is about 200 nats, as in float64."""
    logits, copy_logits = torch.zeros(2, WORDS, requires_grad=True), torch.full((2,), certainty, requires_grad=True)
    nll, _ = copy_cross_entropy(logits, copy_logits, torch.tensor([1, 1]), torch.tensor([1, 2]))
    uniform = torch.log(torch.tensor(7.0)).item()
    expected = [0.0, 200.0 + uniform] if certainty > 0 else [uniform, uniform]
    assert nll.tolist() == pytest.approx(expected, abs=1e-4)
    nll.sum().backward()
    assert logits.grad.isfinite().all()
    assert copy_logits.grad.isfinite().all()
