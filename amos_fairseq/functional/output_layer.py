"""Output layer and cross entropy of several depths in chunks of positions, with samples from the same logits; the references.

Shapes: K depths, N positions, n positions of a chunk, E width of the token embeddings, V padded vocabulary size.
"""

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from amos_fairseq.functional.logit_chunks import (
    NEVER_SAMPLED_LOGIT,
    accumulation_dtype,
    add_product,
    chunks,
    target_index,
)

# Up to this size, over all chunks, a CPU caches the softmax of the forward pass, so that the backward pass need not compute it
# again. On a GPU that would save little: a product is as fast there as reading its result.
CPU_CACHE_BYTES = 64 * 2**20

# (logits - their maximum [K,n,V], exp of it [K,n,V], slice of the N positions) -> tensors [n,...]. Tokens that are never
# sampled have NEVER_SAMPLED_LOGIT and 0. The sampler may overwrite the first argument, not the second.
Sampler = Callable[[Tensor, Tensor, slice], tuple[Tensor, ...]]


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


class ChunkSoftmax(NamedTuple):
    """The softmax of a chunk over the whole vocabulary, in parts.

    Tokens that are never sampled have weight 0, and ``max_logit`` is that of the others: their weights do not underflow beside
    a special token whose probability is near 1.
    """

    weights: Tensor  # [K,n,V], exp(logits - max_logit)
    max_logit: Tensor  # [K,n]
    log_sum: Tensor  # [K,n], log of the sum of exp(logits) over all tokens
    never_sampled_logits: Tensor | None  # [K,n,count], the logits of the tokens that are never sampled

    @property
    def overall_max_logit(self) -> Tensor:
        """The largest logit of all tokens: [K,n]."""
        others = self.never_sampled_logits
        return self.max_logit if others is None else torch.maximum(self.max_logit, others.amax(-1))


class OutputLayerResult(NamedTuple):
    nll: Tensor  # [K,N] float32, -log p(target), nats
    correct: Tensor  # [K,N] bool, no token has a larger logit than the target
    samples: tuple[Tensor, ...]  # the sampler's outputs for all positions, [N,...]; no gradient


def output_layer(
    hidden: Tensor,
    weight: Tensor,
    biases: Tensor,
    targets: Tensor,
    never_sampled: Tensor | None = None,
    sampler: Sampler | None = None,
    with_triton: bool = False,
) -> OutputLayerResult:
    """Compute the cross entropy of K depths, and samples, with the memory of a chunk of logits instead of [K,N,V].

    The values are those of ``linear_cross_entropy`` (AMOS Eq. 2, TEAMS Eq. 2). The forward pass saves the log of each
    softmax's denominator. The backward pass computes the logits again, chunk by chunk (unless they were cached), and sums the
    gradients of weight and bias in float32. The softmax of the loss is in float32, over the whole padded vocabulary with its
    special tokens.

    Args:
        hidden: [K,N,E] any float dtype.
        weight: [V,E], the token embeddings.
        biases: [1,V], shared by all depths, or [K,V].
        targets: [N] int64 token ids.
        never_sampled: int64 ids of the tokens that are never sampled; required with a sampler.
        sampler: samples from each chunk's logits.
        with_triton: use ``amos_fairseq.functional.cuda.output_layer``, see ``runs_in_triton``. The ``sampler`` must then
            be a ``amos_fairseq.functional.sampling.MixtureSampler``, as all samplers of that module are.
    """
    device = "cpu" if hidden.is_meta else hidden.device.type  # autocast does not know the meta device
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, biases = (tensor.to(dtype) for tensor in (hidden, weight, biases))
    if not torch.is_grad_enabled():  # inside a Function a parameter would still require a gradient
        hidden, weight, biases = hidden.detach(), weight.detach(), biases.detach()
    with torch.autocast(device, enabled=False):
        layer = triton_kernels().output_layer if with_triton else _OutputLayer.apply
        nll, correct, *samples = layer(hidden, weight, biases, targets, never_sampled, sampler)
    return OutputLayerResult(nll, correct, tuple(samples))


def runs_in_triton(kernels: str, device: torch.device) -> bool:
    """Return whether a model with this ``model.kernels`` runs the output layer in Triton on ``device``.

    kernels    device  implementation
    reference  any     linear_cross_entropy: all logits in memory, float32
    fast       cpu     chunks of 24 MiB of float32 logits; up to 64 MiB of softmax is cached for the backward pass
    fast       cuda    chunks of 128 MiB of float32 logits
    triton     cuda    functional.cuda.output_layer: chunks of 256 MiB of logits in the dtype of the layer, no float32 copy
    triton     cpu     as fast

    Models pass the answer as ``with_triton``. The functions of this module do not check the device, so that tests can run the
    kernels in Triton's interpreter on a CPU.
    """
    return kernels == "triton" and device.type == "cuda"


def triton_kernels() -> ModuleType:
    """Import the module with the Triton kernels, at its first use: only CUDA builds of PyTorch include Triton.

    Raises:
        ValueError: Triton is not installed.
    """
    return importlib.import_module("amos_fairseq.functional.cuda.output_layer")


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    """Compute ``linear_cross_entropy`` with the implementation of ``kernels``."""
    if kernels == "reference":
        return linear_cross_entropy(hidden, weight, bias, targets)
    positions, with_triton = hidden.flatten(0, -2).unsqueeze(0), runs_in_triton(kernels, hidden.device)
    result = output_layer(positions, weight, bias.unsqueeze(0), targets.flatten(), with_triton=with_triton)
    return result.nll.view_as(targets), result.correct.view_as(targets)


@torch.no_grad()
def sampling_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, never_sampled: Tensor, with_triton: bool = False
) -> Tensor:
    """Compute log q(token) of the softmax without the ``never_sampled`` tokens, in chunks and without a gradient.

    Args:
        hidden: [N,E].
        weight: [V,E].
        bias: [V].
        tokens: [N] int64; the result is meaningless where the token itself is never sampled.
        never_sampled: int64 token ids.
        with_triton: as for ``output_layer``.

    Returns:
        [N] float32, nats.
    """
    if with_triton:
        return triton_kernels().sampling_log_probs(hidden, weight, bias, tokens, never_sampled)
    log_probs = []
    for chunk in logit_chunks(hidden.unsqueeze(0), weight):
        logits = chunk_logits(hidden[chunk].unsqueeze(0), weight, bias.unsqueeze(0)).squeeze(0)
        logits.index_fill_(-1, never_sampled, NEVER_SAMPLED_LOGIT)
        log_probs.append(logits.gather(1, tokens[chunk].unsqueeze(1)).squeeze(1) - logits.logsumexp(-1))
    return torch.cat(log_probs)


class _OutputLayer(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        biases: Tensor,
        targets: Tensor,
        never_sampled: Tensor | None,
        sampler: Sampler | None,
    ) -> tuple[Tensor, ...]:
        parts, cache = [], []
        fits = hidden.device.type == "cpu" and 4 * hidden[..., 0].numel() * len(weight) <= CPU_CACHE_BYTES
        caches = fits and any(ctx.needs_input_grad)
        for chunk in logit_chunks(hidden, weight):
            logits = chunk_logits(hidden[:, chunk], weight, biases)  # [K,n,V]
            target_logits = logits.gather(-1, target_index(targets[chunk], len(hidden))).squeeze(-1)
            softmax = chunk_softmax(logits, None if sampler is None else never_sampled)
            samples = () if sampler is None else sampler(logits, softmax.weights, chunk)
            correct = target_logits >= softmax.overall_max_logit
            # Positions first, as in the samples.
            parts.append((softmax.log_sum.T, (softmax.log_sum - target_logits).T, correct.T, *samples))
            cache += softmax if caches else ()
        log_sum, nll, correct, *samples = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, biases, targets, log_sum.T, never_sampled, *cache)
        ctx.mark_non_differentiable(correct, *samples)
        return nll.T.contiguous(), correct.T.contiguous(), *samples

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nll: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, biases, targets, log_sum, never_sampled, *cache = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight, grad_biases = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (weight, biases))
        for number, chunk in enumerate(logit_chunks(hidden, weight)):
            # d nll / d logits = p - onehot(target)
            factor = grad_nll[:, chunk, None]
            if cache:
                size = len(ChunkSoftmax._fields)
                softmax = ChunkSoftmax(*cache[number * size : (number + 1) * size])
                grad_logits = scaled_probabilities(softmax, factor, never_sampled)
            else:
                grad_logits = chunk_logits(hidden[:, chunk], weight, biases)
                grad_logits.sub_(log_sum[:, chunk, None]).exp_().mul_(factor)
            index = target_index(targets[chunk], len(hidden))
            grad_logits.scatter_add_(-1, index, -factor)
            grad_biases += grad_logits.sum(1) if len(biases) > 1 else grad_logits.sum((0, 1))
            rounded = grad_logits.to(weight.dtype).flatten(0, 1)  # [K n,V]
            grad_hidden[:, chunk] = (rounded @ weight).unflatten(0, (len(hidden), -1))
            add_product(grad_weight, rounded.T, hidden[:, chunk].flatten(0, 1))
        return grad_hidden, grad_weight.to(weight.dtype), grad_biases.to(biases.dtype), None, None, None


def logit_chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Split the positions into chunks by the size of their logits in float32."""
    return chunks(hidden.size(1), 4 * len(hidden) * len(weight), hidden.device)


def chunk_logits(hidden: Tensor, weight: Tensor, biases: Tensor) -> Tensor:
    """Compute the logits: [K,n,E] -> [K,n,V] float32, a new tensor."""
    if len(biases) == 1:
        logits = F.linear(hidden, weight, biases[0])
        return logits.to(accumulation_dtype(logits.dtype))
    logits = F.linear(hidden, weight)
    return logits.to(accumulation_dtype(logits.dtype)).add_(biases.unsqueeze(1))


def chunk_softmax(logits: Tensor, never_sampled: Tensor | None) -> ChunkSoftmax:
    """Compute the softmax of ``logits`` [K,n,V], which become logits - max_logit, NEVER_SAMPLED_LOGIT at ``never_sampled``."""
    if never_sampled is None:
        max_logit = logits.amax(-1)
        weights = logits.sub_(max_logit.unsqueeze(-1)).exp()
        return ChunkSoftmax(weights, max_logit, weights.sum(-1).log_() + max_logit, None)
    others = logits.index_select(-1, never_sampled)
    softmax = chunk_softmax(logits.index_fill_(-1, never_sampled, NEVER_SAMPLED_LOGIT), None)
    log_sum = torch.logaddexp(softmax.log_sum, others.logsumexp(-1))
    return softmax._replace(log_sum=log_sum, never_sampled_logits=others)


def scaled_probabilities(softmax: ChunkSoftmax, factor: Tensor, never_sampled: Tensor | None) -> Tensor:
    """Compute the softmax over all tokens times ``factor`` [K,n,1], in place of the weights [K,n,V]."""
    scale = (softmax.max_logit - softmax.log_sum).exp().unsqueeze(-1)
    scaled = softmax.weights.mul_(scale * factor)
    if softmax.never_sampled_logits is None:
        return scaled
    others = (softmax.never_sampled_logits - softmax.log_sum.unsqueeze(-1)).exp() * factor
    return scaled.index_copy_(-1, never_sampled, others)
