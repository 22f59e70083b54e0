"""An output distribution that copies its input with some probability (thesis section 5.4.3, All-Tokens MLM)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def copy_cross_entropy(logits: Tensor, copy_logits: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Negative log likelihood of ``targets``, and whether they were the best guess, under

        p(v) = D [v = input] + (1 - D) softmax(logits)_v,   D = sigmoid(copy_logits)

    computed from log D, log (1 - D) and log softmax, so that no probability is rounded to 0 or 1 before its logarithm.

    Args:
        logits: [...,V] float32.
        copy_logits: [...] float32, positive for "copy the input".
        inputs, targets: [...] int64.

    Returns:
        nll [...] float32 in nats; correct [...] bool.
    """
    copied, generated = logsigmoid(copy_logits), logsigmoid(-copy_logits) - logits.logsumexp(-1)

    def log_prob(words: Tensor) -> Tensor:
        from_softmax = generated + logits.gather(-1, words.unsqueeze(-1)).squeeze(-1)
        return torch.where(words == inputs, torch.logaddexp(copied, from_softmax), from_softmax)

    with torch.no_grad():
        best = logits.argmax(-1)
        guess = torch.where(log_prob(inputs) >= log_prob(best), inputs, best)
    return -log_prob(targets), guess.eq(targets)
