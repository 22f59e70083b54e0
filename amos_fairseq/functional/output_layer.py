"""Output layer and cross entropy of several depths at once, some positions at a time, with samples from the same logits.

Shapes: K depths, N positions, n positions of a chunk, E width of the token embeddings, V rows of the vocabulary.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

# Logits of a chunk, in bytes; about three times as much is alive with what is made of them. On a GPU enough rows (1,024 at
# V = 32,768) for a product that keeps every multiprocessor busy. On a CPU below the 32 MB from which on glibc maps each tensor
# anew: with 64 MB the page faults made a pass of 320 positions in bfloat16 a third slower.
CHUNK_BYTES = {"cuda": 128 * 2**20}
CHUNK_BYTES_ELSEWHERE = 24 * 2**20

# So much of what forward made of the logits is kept, all chunks together, and backward need not make it again. On a GPU that
# would gain little: there a product is as fast as reading its result.
KEPT_BYTES_OF_CPU = 64 * 2**20

# The logit of a row that is never sampled. Finite, so that 0 times it, in a mixture of depths, is not nan.
FORBIDDEN = -1e30

# (logits - their maximum [K,n,V], exp of it [K,n,V], which of the N positions) -> tensors [n,...]. Rows that are not sampled
# have FORBIDDEN and 0. The first may be overwritten, not the second.
Sampler = Callable[[Tensor, Tensor, slice], tuple[Tensor, ...]]


class Softmax(NamedTuple):
    """The softmax of a chunk over every row, in parts.

    Where rows are unsampled, their weights are 0 and ``best`` is the largest logit of the others: words do not vanish beside
    a special token that the generator is sure of.
    """

    weights: Tensor  # [K,n,V], exp(logits - best)
    best: Tensor  # [K,n]
    log_sum: Tensor  # [K,n], log of the sum of exp(logits) over every row
    apart: Tensor | None  # [K,n,rows], the logits of the unsampled rows

    @property
    def largest(self) -> Tensor:
        """The largest logit of all rows: [K,n]."""
        return self.best if self.apart is None else torch.maximum(self.best, self.apart.amax(-1))


class Guesses(NamedTuple):
    nll: Tensor  # [K,N] float32, -log p(target), nats
    correct: Tensor  # [K,N] bool, no row has a larger logit than the target
    drawn: tuple[Tensor, ...]  # what the sampler returned for all positions, [N,...]; no gradient


def output_layer(
    hidden: Tensor,
    weight: Tensor,
    biases: Tensor,
    targets: Tensor,
    unsampled: Tensor | None = None,
    sampler: Sampler | None = None,
    with_triton: bool = False,
) -> Guesses:
    """What :func:`linear_cross_entropy` says of K depths, and samples, in memory of a chunk of logits instead of [K,N,V].

    Forward keeps the log of each softmax' denominator; backward computes the logits again, chunk by chunk (unless there are so
    few that they can be kept), and sums the gradients of weight and bias in float32. The softmax of the loss runs over every
    row, in float32.

    Args:
        hidden: [K,N,E] any float dtype.
        weight: [V,E], the token embeddings.
        biases: [1,V], shared by all depths, or [K,V].
        targets: [N] int64 rows of ``weight``.
        unsampled: int64 indices of the rows that are never sampled; needed with a sampler.
        sampler: draws from each chunk's logits.
        with_triton: use :mod:`amos_fairseq.functional.cuda.output_layer`; see :func:`runs_in_triton`. The ``sampler`` is then a
            :class:`~amos_fairseq.functional.replacements.MixtureSampler`, as all of that module are.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, biases = (tensor.to(dtype) for tensor in (hidden, weight, biases))
    if not torch.is_grad_enabled():  # a parameter would still ask for a gradient inside of a Function
        hidden, weight, biases = hidden.detach(), weight.detach(), biases.detach()
    with torch.autocast(device, enabled=False):
        layer = triton_kernels().output_layer if with_triton else _OutputLayer.apply
        nll, correct, *drawn = layer(hidden, weight, biases, targets, unsampled, sampler)
    return Guesses(nll, correct, tuple(drawn))


def runs_in_triton(kernels: str, device: torch.device) -> bool:
    """Whether a model with this ``model.kernels`` runs the output layer in Triton: with ``triton``, on a CUDA device.

    On a CPU such a model runs the chunks in PyTorch, as with ``fast``. Models pass the answer as ``with_triton``; the functions
    of this module do not look at the device, so that tests can run the kernels in Triton's interpreter on a CPU.
    """
    return kernels == "triton" and device.type == "cuda"


def triton_kernels() -> ModuleType:
    """The module with the Triton kernels, imported at the first use: only CUDA builds of PyTorch bring Triton along.

    Raises:
        ValueError: Triton is not installed.
    """
    return importlib.import_module("amos_fairseq.functional.cuda.output_layer")


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, with_triton: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`output_layer` with the arguments and results of :func:`linear_cross_entropy`: one depth, any leading shape."""
    positions = hidden.flatten(0, -2).unsqueeze(0)
    guesses = output_layer(positions, weight, bias.unsqueeze(0), targets.flatten(), with_triton=with_triton)
    return guesses.nll.view_as(targets), guesses.correct.view_as(targets)


@torch.no_grad()
def word_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, unsampled: Tensor, with_triton: bool = False
) -> Tensor:
    """log q(token) of the softmax over all rows but the ``unsampled`` ones, in chunks and without a gradient.

    Args:
        hidden: [N,E].
        weight: [V,E].
        bias: [V].
        tokens: [N] int64; without meaning where the token is unsampled itself.
        unsampled: int64 indices of rows.
        with_triton: as for :func:`output_layer`.

    Returns:
        [N] float32, nats.
    """
    if with_triton:
        return triton_kernels().word_log_probs(hidden, weight, bias, tokens, unsampled)
    found = []
    for places in logit_chunks(hidden.unsqueeze(0), weight):
        logits = chunk_logits(hidden[places].unsqueeze(0), weight, bias.unsqueeze(0)).squeeze(0)
        logits.index_fill_(-1, unsampled, FORBIDDEN)
        found.append(logits.gather(1, tokens[places].unsqueeze(1)).squeeze(1) - logits.logsumexp(-1))
    return torch.cat(found)


def chunks(num_positions: int, bytes_per_position: int, device: torch.device) -> Iterator[slice]:
    """Equal parts of the positions, the last one maybe smaller, of at most CHUNK_BYTES each (but of one position at least)."""
    return equal_parts(num_positions, CHUNK_BYTES.get(device.type, CHUNK_BYTES_ELSEWHERE) // bytes_per_position)


def equal_parts(num_positions: int, most: int) -> Iterator[slice]:
    """Parts of at most ``most`` positions (but of one at least), one part where there is no position."""
    at_once = max(1, most)
    at_once = max(1, math.ceil(num_positions / max(1, math.ceil(num_positions / at_once))))
    return (slice(start, min(start + at_once, num_positions)) for start in range(0, max(1, num_positions), at_once))


class _OutputLayer(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        biases: Tensor,
        targets: Tensor,
        unsampled: Tensor | None,
        sampler: Sampler | None,
    ) -> tuple[Tensor, ...]:
        parts, kept = [], []
        keeps = any(ctx.needs_input_grad) and can_be_kept(hidden, weight)
        for places in logit_chunks(hidden, weight):
            logits = chunk_logits(hidden[:, places], weight, biases)  # [K,n,V]
            of_target = logits.gather(-1, target_index(targets[places], len(hidden))).squeeze(-1)
            softmax = softmax_parts(logits, None if sampler is None else unsampled)
            drawn = () if sampler is None else sampler(logits, softmax.weights, places)
            # Positions first, like what is drawn.
            parts.append((softmax.log_sum.T, (softmax.log_sum - of_target).T, (of_target >= softmax.largest).T, *drawn))
            kept += softmax if keeps else ()
        log_sum, nll, correct, *drawn = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, biases, targets, log_sum.T, unsampled, *kept)
        ctx.mark_non_differentiable(correct, *drawn)
        return nll.T.contiguous(), correct.T.contiguous(), *drawn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_nll: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, biases, targets, log_sum, unsampled, *kept = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden)
        by_weight, by_biases = (torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for tensor in (weight, biases))
        for number, places in enumerate(logit_chunks(hidden, weight)):
            # d nll / d logits = p - onehot(target)
            factor = by_nll[:, places, None]
            if kept:
                parts = Softmax(*kept[number * len(Softmax._fields) : (number + 1) * len(Softmax._fields)])
                by_logits = scaled_probabilities(parts, factor, unsampled)
            else:
                by_logits = chunk_logits(hidden[:, places], weight, biases)
                by_logits.sub_(log_sum[:, places, None]).exp_().mul_(factor)
            index = target_index(targets[places], len(hidden))
            by_logits.scatter_add_(-1, index, -factor)
            by_biases += by_logits.sum(1) if len(biases) > 1 else by_logits.sum((0, 1))
            rounded = by_logits.to(weight.dtype).flatten(0, 1)  # [K n,V]
            by_hidden[:, places] = (rounded @ weight).unflatten(0, (len(hidden), -1))
            add_product(by_weight, rounded.T, hidden[:, places].flatten(0, 1))
        return by_hidden, by_weight.to(weight.dtype), by_biases.to(biases.dtype), None, None, None


def can_be_kept(hidden: Tensor, weight: Tensor) -> bool:
    return hidden.device.type == "cpu" and 4 * hidden[..., 0].numel() * len(weight) <= KEPT_BYTES_OF_CPU


def logit_chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Chunks of positions by the size of their logits in float32."""
    return chunks(hidden.size(1), 4 * len(hidden) * len(weight), hidden.device)


def chunk_logits(hidden: Tensor, weight: Tensor, biases: Tensor) -> Tensor:
    """[K,n,E] -> [K,n,V] float32; a new tensor."""
    if len(biases) == 1:
        logits = linear(hidden, weight, biases[0])
        return logits.to(wide(logits.dtype))
    logits = linear(hidden, weight)
    return logits.to(wide(logits.dtype)).add_(biases.unsqueeze(1))


def softmax_parts(logits: Tensor, unsampled: Tensor | None) -> Softmax:
    """The softmax of [K,n,V], which becomes logits - best; ``unsampled`` rows first become FORBIDDEN in it."""
    if unsampled is None:
        best = logits.amax(-1)
        weights = logits.sub_(best.unsqueeze(-1)).exp()
        return Softmax(weights, best, weights.sum(-1).log_() + best, None)
    apart = logits.index_select(-1, unsampled)
    words = softmax_parts(logits.index_fill_(-1, unsampled, FORBIDDEN), None)
    return words._replace(log_sum=torch.logaddexp(words.log_sum, apart.logsumexp(-1)), apart=apart)


def scaled_probabilities(parts: Softmax, factor: Tensor, unsampled: Tensor | None) -> Tensor:
    """The softmax over every row times ``factor`` [K,n,1], in the place of the weights [K,n,V]."""
    scale, log_sum = (parts.best - parts.log_sum).exp().unsqueeze(-1), parts.log_sum.unsqueeze(-1)
    scaled = parts.weights.mul_(scale * factor)
    return scaled if parts.apart is None else scaled.index_copy_(-1, unsampled, (parts.apart - log_sum).exp() * factor)


def target_index(targets: Tensor, num_depths: int) -> Tensor:
    """[n] -> [K,n,1], to gather from or scatter into [K,n,V]."""
    return targets.view(1, -1, 1).expand(num_depths, -1, -1)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right; rounded sums of chunks would lose what a chunk adds, so ``total`` may have the wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, what it is otherwise."""
    return torch.promote_types(dtype, torch.float32)
