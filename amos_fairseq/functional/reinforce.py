"""REINFORCE with a learned baseline: a gradient for a generator that samples discrete tokens (thesis section 5.3.4)."""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid


def policy_losses(log_probs: Tensor, rewards: Tensor, baseline_logits: Tensor) -> Tensor:
    """Compute -(R - b) log q(sample), elementwise: its mean over samples has the gradient of -E[R] in expectation.

    b = -log sigmoid(baseline_logits) changes the variance, never the expectation, as long as it does not depend on the
    sample. Neither the reward nor the baseline receives a gradient.

    Args:
        log_probs: [...] float32, log q of the sampled tokens, with the gradient of the sampler.
        rewards: [...] float32, R >= 0 in nats.
        baseline_logits: [...] float32.
    """
    advantages = rewards.detach() + logsigmoid(baseline_logits.detach())
    return -advantages * log_probs


def baseline_losses(baseline_logits: Tensor, rewards: Tensor) -> Tensor:
    """Compute the cross entropy of sigmoid(baseline_logits) with target exp(-R), elementwise; its minimum is at b = R.

    R is a negative log probability, so exp(-R) is a probability. Arguments as for :func:`policy_losses`.
    """
    return binary_cross_entropy_with_logits(baseline_logits, (-rewards.detach()).exp(), reduction="none")
