"""Cross entropies of output layers with all logits in memory: plain, and with a copy mechanism.

:mod:`amos_fairseq.functional.output_layer` computes the plain one in chunks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute -log p(target) with p = softmax(hidden weight^T + bias): p_MLM of AMOS Eq. 2, P_G of TEAMS Eq. 2.

    The reference implementation. The softmax is in float32, over the whole padded vocabulary with its special tokens.

    Departures: the papers' equations have no bias; BERT's output layer has one.

    Args:
        hidden: [..., D] any float dtype.
        weight: [V, D], usually the token embeddings.
        bias: [V].
        targets: [...] int64 token ids.

    Returns:
        nll: [...] float32 in nats; correct: [...] bool, the target has the largest logit.
    """
    logits = F.linear(hidden, weight, bias).float()
    nll = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view_as(targets)
    return nll, logits.detach().argmax(-1).eq(targets)


def copy_cross_entropy(logits: Tensor, copy_logits: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute -log p(target) of an output layer with a copy mechanism (thesis section 5.4.3, All-Tokens MLM):

        p(v) = D [v = input] + (1 - D) softmax(logits)_v,   D = sigmoid(copy_logits)

    computed from log D, log (1 - D) and log softmax, so that no probability is rounded to 0 or 1 before its logarithm.

    Args:
        logits: [...,V] float32.
        copy_logits: [...] float32, positive for "copy the input".
        inputs: [...] int64, the input tokens, which may be copied.
        targets: [...] int64, the tokens to predict.

    Returns:
        nll: [...] float32 in nats; correct: [...] bool, the target is the most likely token.
    """
    log_copy, log_generate = F.logsigmoid(copy_logits), F.logsigmoid(-copy_logits) - logits.logsumexp(-1)

    def log_prob(tokens: Tensor) -> Tensor:
        from_softmax = log_generate + logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return torch.where(tokens == inputs, torch.logaddexp(log_copy, from_softmax), from_softmax)

    with torch.no_grad():
        best = logits.argmax(-1)
        prediction = torch.where(log_prob(inputs) >= log_prob(best), inputs, best)
    return -log_prob(targets), prediction.eq(targets)
