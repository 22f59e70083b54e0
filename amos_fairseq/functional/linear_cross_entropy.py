"""Output layer and cross entropy of a masked language model."""

import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of ``targets`` under softmax(hidden weight^T + bias), and whether they were the best guess.

    The plain reference: it holds all logits. The softmax runs over every row, special tokens included, in float32.

    Args:
        hidden: [..., D] any float dtype.
        weight: [V, D], usually the token embeddings.
        bias: [V].
        targets: [...] int64 rows of ``weight``.

    Returns:
        nll: [...] float32 in nats; correct: [...] bool, the target has the largest logit.
    """
    logits = F.linear(hidden, weight, bias).float()
    nll = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)
    return nll, logits.detach().argmax(-1).eq(targets)
