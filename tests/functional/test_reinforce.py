"""REINFORCE: against the exact gradient, enumerated over a vocabulary of five tokens."""

import math

import pytest
import torch
from small_models import electra_criterion, small_electra

from amos_fairseq.functional.replaced_token_detection import baseline_losses, policy_losses
from amos_fairseq.models.pretraining import PretrainingBatch

VOCABULARY = 5


def exact_gradient(logits: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Of -E[R] = -sum_v q(v) R(v): written out, -q(v) (R(v) - E[R])."""
    q = logits.softmax(-1)
    return -q * (rewards - (q * rewards).sum())


@pytest.mark.parametrize("baseline", [-3.0, 0.0, 4.0])
def test_expected_gradient_does_not_depend_on_the_baseline(baseline: float) -> None:
    """sum_v q(v) grad(policy loss of v), no sampling at all: b drops out of the sum."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True)
    rewards = torch.rand(VOCABULARY, generator=generator, dtype=torch.float64) * 3
    losses = policy_losses(logits.log_softmax(-1), rewards, torch.full((VOCABULARY,), baseline, dtype=torch.float64))
    (logits.detach().softmax(-1) * losses).sum().backward()
    torch.testing.assert_close(logits.grad, exact_gradient(logits.detach(), rewards))


def test_losses_by_hand() -> None:
    """b = -log sigmoid(0) = log 2; -(R - b) log q; the baseline's target is exp(-R)."""
    reward, log_prob = torch.tensor([1.5]), torch.tensor([-0.7])
    assert policy_losses(log_prob, reward, torch.zeros(1)).item() == pytest.approx((1.5 - math.log(2)) * 0.7)
    target, predicted = math.exp(-1.5), 1 / (1 + math.exp(-0.4))
    expected = -target * math.log(predicted) - (1 - target) * math.log(1 - predicted)
    assert baseline_losses(torch.tensor([0.4]), reward).item() == pytest.approx(expected)


def test_rewards_and_baseline_of_the_policy_loss_receive_no_gradient() -> None:
    log_probs, rewards, logits = (torch.rand(3, requires_grad=True) for _ in range(3))
    policy_losses(log_probs, rewards, logits).sum().backward()
    assert rewards.grad is None
    assert logits.grad is None
    baseline_losses(logits, rewards).sum().backward()
    assert rewards.grad is None
    assert logits.grad is not None


def test_gradient_of_the_model_matches_the_enumerated_expectation() -> None:
    """The whole step: 4,000 copies of one text with one masked token, against every token in its place.

    Compared is the gradient of the generator's output bias, within 4 standard errors that follow from the enumeration too;
    some of its parts are more than 8 errors from 0, so neither no gradient nor its reverse would pass.
    """
    copies, position = 4_000, 3
    model = small_electra(num_tokens=VOCABULARY, adversarial=True)
    tokens = torch.tensor([[0, 4, 6, 5, 8, 2]])
    masked = tokens.clone()
    masked[0, position] = 4 + VOCABULARY
    net_input = {"tokens": tokens, "masked_tokens": masked, "masked_positions": torch.tensor([[position]])}
    net_input["masked_weights"] = torch.ones(1, 1)
    criterion = electra_criterion()

    def sample(rows: int) -> dict:
        inputs = {name: value.expand(rows, -1) for name, value in net_input.items()}
        return {"net_input": inputs, "ntokens": rows * 6, "nsentences": rows, "num_masked": rows}

    tokens = torch.arange(4, 4 + VOCABULARY).unsqueeze(1)
    sample_tokens = model.sample
    model.sample = lambda logits: tokens
    with torch.no_grad():
        output = model(PretrainingBatch(**sample(VOCABULARY)["net_input"]))
        rewards = criterion.rewards(output, PretrainingBatch(**sample(VOCABULARY)["net_input"]))[:, 0]
        q = output.sampled_log_probs[:, 0].exp()
        b = -torch.nn.functional.logsigmoid(output.baseline_logits[0, 0])
    assert q.sum().item() == pytest.approx(1)
    assert rewards.max() - rewards.min() > 0.1  # tokens differ, or there would be nothing to learn
    per_token = -(rewards - b).unsqueeze(1) * (torch.eye(VOCABULARY) - q)  # [sampled, bias of]
    expected = q @ per_token
    torch.testing.assert_close(expected, exact_gradient(q.log(), rewards))
    error = ((q @ per_token.square() - expected.square()) / copies).sqrt()

    model.sample = sample_tokens
    torch.manual_seed(1)
    batch = PretrainingBatch(**sample(copies)["net_input"])
    loss, log = criterion.generator_loss(model(batch), batch, "1")
    loss.backward()
    got = model.mlm_head.bias.grad / copies
    assert got[4 : 4 + VOCABULARY].sub(expected).abs().le(4 * error).all()
    assert expected.abs().gt(8 * error).any()
    assert got[:4].eq(0).all()  # special tokens are never sampled: nothing pushes them
    assert got[4 + VOCABULARY :].eq(0).all()
    assert log["reward"].item() / copies == pytest.approx((q @ rewards).item(), abs=4 * rewards.std().item() / 60)
