"""The output layer in Triton: :func:`amos_fairseq.functional.output_layer.output_layer` without a float32 copy of a chunk.

Passes over all logits, in the dtype of the layer. Forward: the product writes them, the summary loads them. Backward: the
product writes them again, the gradient kernel loads and overwrites them, the products with weights and hidden states load the
gradient. Sampling loads a part: S BLOCK_ROWS logits of V, a quarter of a pass for the 128 samples of AMOS at V = 32,768.

Shapes: K depths, N positions, n positions of a chunk, E width of the token embeddings, V padded vocabulary size, G blocks of
BLOCK_ROWS tokens, S samples, X tokens of each position that are excluded from sampling.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from amos_fairseq.functional.cuda.logits import (
    BLOCK_ROWS,
    gradient_of_logits,
    pick_rows,
    summarize_blocks,
    summarize_logits,
)
from amos_fairseq.functional.logit_chunks import accumulation_dtype, add_product, equal_parts, target_index
from amos_fairseq.functional.sampling import MixtureSampler, mix, pick, uniform

# Size of the logits of a chunk, in the dtype of the layer. No other tensor of that size is allocated, so this is less than the
# peak of the PyTorch path, about three times its 128 MiB. Larger chunks make fewer float32 additions to the weights' gradient:
# 300 MB of traffic per chunk at V = 32,768 and E = 768, where the gradient kernel moves 537 MB per chunk.
CHUNK_BYTES = 256 * 2**20


def output_layer(
    hidden: Tensor,
    weight: Tensor,
    biases: Tensor,
    targets: Tensor,
    never_sampled: Tensor | None,
    sampler: MixtureSampler | None,
) -> tuple[Tensor, ...]:
    """Return the tensors of :class:`amos_fairseq.functional.output_layer.OutputLayerResult`; same arguments, of one dtype."""
    return _OutputLayer.apply(hidden, weight, biases, targets, never_sampled, sampler)


def sampling_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, never_sampled: Tensor) -> Tensor:
    """Compute :func:`amos_fairseq.functional.output_layer.sampling_log_probs`."""
    never_sampled_mask, log_probs = token_mask(never_sampled, len(weight)), []
    for chunk in logit_chunks(hidden[None], weight):
        logits = chunk_logits(hidden[None, chunk], weight, bias[None])
        depth_weights = torch.ones(len(tokens[chunk]), 1, device=hidden.device)
        block_sums = summarize_logits(logits, depth_weights, never_sampled_mask)[2:]
        mixture = TritonMixture.of(logits, depth_weights, never_sampled_mask, block_sums)
        token_logits = logits.gather(-1, target_index(tokens[chunk], 1)).flatten().float()
        log_probs.append(token_logits - (mixture.max_logit + mixture.total.log()).squeeze(1))
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
        sampler: MixtureSampler | None,
    ) -> tuple[Tensor, ...]:
        never_sampled_mask = None if sampler is None else token_mask(never_sampled, len(weight))
        parts = [
            predict_chunk(hidden[:, chunk], weight, biases, targets[chunk], never_sampled_mask, sampler, chunk)
            for chunk in logit_chunks(hidden, weight)
        ]
        log_sum, nll, correct, *samples = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, biases, targets, log_sum.T)
        ctx.mark_non_differentiable(correct, *samples)
        return nll.T.contiguous(), correct.T.contiguous(), *samples

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_nll: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, biases, targets, log_sum = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight, grad_biases = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (weight, biases))
        for chunk in logit_chunks(hidden, weight):
            grad_logits, grad_bias = gradient_of_chunk(
                hidden[:, chunk], weight, biases, targets[chunk], log_sum[:, chunk], grad_nll[:, chunk]
            )
            grad_biases += grad_bias
            grad_hidden[:, chunk] = (grad_logits @ weight).unflatten(0, (len(hidden), -1))
            add_product(grad_weight, grad_logits.T, hidden[:, chunk].flatten(0, 1))
            del grad_logits  # before the logits of the next chunk are allocated
        return grad_hidden, grad_weight.to(weight.dtype), grad_biases.to(biases.dtype), None, None, None


def predict_chunk(
    hidden: Tensor,
    weight: Tensor,
    biases: Tensor,
    targets: Tensor,
    never_sampled_mask: Tensor | None,
    sampler: MixtureSampler | None,
    chunk: slice,
) -> tuple[Tensor, ...]:
    """Compute a chunk: log of the softmax denominator, nll, whether the target has the largest logit, [n,K]; samples, [n,...].

    Arguments are those of :func:`output_layer` at the n positions ``chunk``; ``never_sampled_mask`` is [V] bool.
    """
    logits = chunk_logits(hidden, weight, biases)  # [K,n,V]
    depth_weights = None if sampler is None else sampler.depth_weights(chunk, hidden.device)
    part_max, part_sum, *block_sums = summarize_logits(logits, depth_weights, never_sampled_mask)
    largest = part_max.amax(-1)
    log_sum = (part_sum * (part_max - largest.unsqueeze(-1)).exp_()).sum(-1).log_() + largest
    target_logits = logits.gather(-1, target_index(targets, len(hidden))).squeeze(-1).float()
    samples = ()
    if sampler is not None:
        samples = sampler.sample(TritonMixture.of(logits, depth_weights, never_sampled_mask, block_sums), chunk)
    return log_sum.T, (log_sum - target_logits).T, (target_logits >= largest).T, *samples


def gradient_of_chunk(
    hidden: Tensor, weight: Tensor, biases: Tensor, targets: Tensor, log_sum: Tensor, grad_nll: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the logits, [K n,V] in the dtype of the layer, and of the biases, [1 or K,V] float32.

    ``log_sum`` and ``grad_nll`` are [K,n] float32; the other arguments are those of :func:`predict_chunk`.
    """
    logits = chunk_logits(hidden, weight, biases)
    sums = gradient_of_logits(logits, log_sum.contiguous(), targets, grad_nll.contiguous())  # [groups,K,V]
    grad_bias = sums.sum(0) if len(biases) > 1 else sums.sum((0, 1)).unsqueeze(0)
    return logits.flatten(0, 1), grad_bias


@dataclass
class TritonMixture:
    """:class:`amos_fairseq.functional.sampling.ChunkMixture` by the kernels of :mod:`amos_fairseq.functional.cuda.logits`."""

    logits: Tensor  # [K,n,V]
    depth_weights: Tensor  # gamma [n,K] float32
    never_sampled_mask: Tensor  # [V] bool
    block_max: Tensor  # [n,G] float32, the mixture's largest logit of each block, of the tokens that may be sampled
    block_sum: Tensor  # [n,G] float32, the sum of exp(logit - block_max) of these tokens
    excluded: Tensor  # [n,X] int64

    @classmethod
    def of(
        cls, logits: Tensor, depth_weights: Tensor, never_sampled_mask: Tensor, block_sums: list[Tensor]
    ) -> "TritonMixture":
        excluded = torch.empty(len(depth_weights), 0, dtype=torch.int64, device=logits.device)
        return cls(logits, depth_weights, never_sampled_mask, *block_sums, excluded)

    @property
    def max_logit(self) -> Tensor:
        """The largest logit of each position: [n,1] float32."""
        return self.block_max.amax(-1, keepdim=True)

    @property
    def block_weights(self) -> Tensor:
        """Each block's sum of exp(logit - max_logit): [n,G] float32."""
        return self.block_sum * (self.block_max - self.max_logit).exp_()

    @property
    def total(self) -> Tensor:
        return self.block_weights.sum(-1, keepdim=True)

    def sample(self, num_samples: int) -> tuple[Tensor, Tensor]:
        weights = self.block_weights
        blocks, points = pick(weights, uniform(weights, num_samples)), uniform(weights, num_samples)
        return pick_rows(self.logits, self.depth_weights, self.never_sampled_mask, self.excluded, blocks, points)

    def exclude(self, tokens: Tensor) -> None:
        tokens = tokens.unsqueeze(1)
        self.excluded, blocks = torch.cat([self.excluded, tokens], dim=1), tokens // BLOCK_ROWS
        # Computed again: a subtraction would leave a rounding error where no weight is left.
        block_max, total = summarize_blocks(
            self.logits, self.depth_weights, self.never_sampled_mask, self.excluded, blocks
        )
        self.block_max.scatter_(1, blocks, block_max)
        self.block_sum.scatter_(1, blocks, total)

    def weights(self, num_positions: int) -> Tensor:
        """Convert the logits of these positions to float32, so only a few should be requested."""
        mixed = mix(self.logits[:, :num_positions].float(), self.depth_weights[:num_positions])
        weights = mixed.sub_(self.max_logit[:num_positions]).exp_().masked_fill_(self.never_sampled_mask, 0.0)
        return weights.scatter_(1, self.excluded[:num_positions], 0.0)

    def most_likely(self, num_tokens: int) -> Tensor:
        lowest = -float("inf")
        (logits,) = self.logits.masked_fill_(self.never_sampled_mask, lowest)
        return logits.scatter_(1, self.excluded, lowest).topk(num_tokens).indices


def logit_chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Split the positions into chunks by the size of their logits in the dtype of the layer."""
    bytes_per_position = len(hidden) * len(weight) * weight.element_size()
    return equal_parts(hidden.size(1), CHUNK_BYTES // bytes_per_position)


def chunk_logits(hidden: Tensor, weight: Tensor, biases: Tensor) -> Tensor:
    """Compute the logits: [K,n,E] -> [K,n,V] in the dtype of the layer, rounded once, after the bias is added; a new tensor.

    :func:`torch.nn.functional.linear` of a non-contiguous [K,n,E], such as the positions of a chunk, computes the product and
    then adds the bias in a second pass over the logits. ``addmm`` adds it in the same pass.

    Departures: with a bias for each depth, the PyTorch path adds the bias and the rounded product in float32; here the sum is
    rounded to the dtype of the layer.
    """
    if len(biases) == 1:
        return torch.addmm(biases[0], hidden.flatten(0, 1), weight.T).unflatten(0, hidden.shape[:2])
    logits = torch.empty(*hidden.shape[:2], len(weight), dtype=weight.dtype, device=weight.device)
    for depth_logits, depth_hidden, bias in zip(logits, hidden, biases, strict=True):
        torch.addmm(bias, depth_hidden, weight.T, out=depth_logits)
    return logits


def token_mask(tokens: Tensor, vocabulary_size: int) -> Tensor:
    """Return True at ``tokens``, int64: [vocabulary_size] bool. The kernels load a flag for each token of a tile."""
    return torch.zeros(vocabulary_size, dtype=torch.bool, device=tokens.device).index_fill_(0, tokens, True)
