"""The copy mechanism against the distribution itself, written out in float64."""

import pytest
import torch

from amos_fairseq.functional.cross_entropy import copy_cross_entropy

VOCABULARY = 7


def written_out(logits: torch.Tensor, copy_logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """p(v) = D [v = input] + (1 - D) softmax(v): [N,V]."""
    d = copy_logits.sigmoid().unsqueeze(-1)
    return d * torch.nn.functional.one_hot(inputs, VOCABULARY) + (1 - d) * logits.softmax(-1)


@pytest.fixture
def given() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, VOCABULARY, generator=generator, dtype=torch.float64) * 2
    copy_logits = torch.randn(40, generator=generator, dtype=torch.float64) * 2
    inputs, targets = (torch.randint(VOCABULARY, (40,), generator=generator) for _ in range(2))
    targets[::2] = inputs[::2]  # half of the inputs are originals
    return logits, copy_logits, inputs, targets


def test_losses_gradients_and_predictions_match_the_distribution(given) -> None:
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
def test_certain_copies_give_finite_losses(certainty: float) -> None:
    """In float32 D is 0 or 1 there; the loss of the token that is not copied is about 200 nats, as in float64."""
    logits, copy_logits = (
        torch.zeros(2, VOCABULARY, requires_grad=True),
        torch.full((2,), certainty, requires_grad=True),
    )
    nll, _ = copy_cross_entropy(logits, copy_logits, torch.tensor([1, 1]), torch.tensor([1, 2]))
    uniform = torch.log(torch.tensor(7.0)).item()
    expected = [0.0, 200.0 + uniform] if certainty > 0 else [uniform, uniform]
    assert nll.tolist() == pytest.approx(expected, abs=1e-4)
    nll.sum().backward()
    assert logits.grad.isfinite().all()
    assert copy_logits.grad.isfinite().all()
