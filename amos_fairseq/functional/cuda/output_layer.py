"""The output layer in Triton: :func:`amos_fairseq.functional.output_layer.output_layer` without a float32 copy of a chunk.

Passes over all logits, in the dtype of the layer. Forward: the product writes them, the summary reads them. Backward: the
product writes them again, the gradient reads and writes them, the products with weights and hidden states read it. Drawing
reads a part: S BLOCK_ROWS logits of V, a quarter of a pass for the 128 draws of AMOS at V = 32,768.

Shapes: K depths, N positions, n positions of a chunk, E width of the token embeddings, V rows of the vocabulary, G blocks of
BLOCK_ROWS rows, S draws, X rows of each position that are excluded from drawing.
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
from amos_fairseq.functional.drawing import pick, uniform
from amos_fairseq.functional.output_layer import add_product, equal_parts, target_index, wide
from amos_fairseq.functional.replacements import MixtureSampler, mix

# Logits of a chunk, in bytes, in the dtype of the layer. No other tensor of that size is alive, so this is less than the peak
# of the PyTorch path, about three times its 128 MiB. Larger chunks make fewer float32 additions to the weights' gradient:
# 300 MB of traffic per chunk at V = 32,768 and E = 768, where the gradient kernel moves 537 MB per chunk.
CHUNK_BYTES = 256 * 2**20


def output_layer(
    hidden: Tensor,
    weight: Tensor,
    biases: Tensor,
    targets: Tensor,
    unsampled: Tensor | None,
    sampler: MixtureSampler | None,
) -> tuple[Tensor, ...]:
    """The tensors of :class:`amos_fairseq.functional.output_layer.Guesses`; arguments as there, of one dtype."""
    return _OutputLayer.apply(hidden, weight, biases, targets, unsampled, sampler)


def word_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, unsampled: Tensor) -> Tensor:
    """:func:`amos_fairseq.functional.output_layer.word_log_probs`."""
    is_unsampled, found = row_mask(unsampled, len(weight)), []
    for places in logit_chunks(hidden[None], weight):
        logits = chunk_logits(hidden[None, places], weight, bias[None])
        alone = torch.ones(len(tokens[places]), 1, device=hidden.device)
        words = TritonMixture.of(logits, alone, is_unsampled, summarize_logits(logits, alone, is_unsampled)[2:])
        of_token = logits.gather(-1, target_index(tokens[places], 1)).flatten().float()
        found.append(of_token - (words.best + words.total.log()).squeeze(1))
    return torch.cat(found)


class _OutputLayer(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        biases: Tensor,
        targets: Tensor,
        unsampled: Tensor | None,
        sampler: MixtureSampler | None,
    ) -> tuple[Tensor, ...]:
        is_unsampled = None if sampler is None else row_mask(unsampled, len(weight))
        parts = [
            guess_chunk(hidden[:, places], weight, biases, targets[places], is_unsampled, sampler, places)
            for places in logit_chunks(hidden, weight)
        ]
        log_sum, nll, correct, *drawn = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, biases, targets, log_sum.T)
        ctx.mark_non_differentiable(correct, *drawn)
        return nll.T.contiguous(), correct.T.contiguous(), *drawn

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_nll: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, biases, targets, log_sum = ctx.saved_tensors
        by_hidden = torch.empty_like(hidden)
        by_weight, by_biases = (torch.zeros_like(tensor, dtype=wide(tensor.dtype)) for tensor in (weight, biases))
        for places in logit_chunks(hidden, weight):
            by_logits, of_biases = gradient_of_chunk(
                hidden[:, places], weight, biases, targets[places], log_sum[:, places], by_nll[:, places]
            )
            by_biases += of_biases
            by_hidden[:, places] = (by_logits @ weight).unflatten(0, (len(hidden), -1))
            add_product(by_weight, by_logits.T, hidden[:, places].flatten(0, 1))
            del by_logits  # before the logits of the next chunk are there
        return by_hidden, by_weight.to(weight.dtype), by_biases.to(biases.dtype), None, None, None


def guess_chunk(
    hidden: Tensor,
    weight: Tensor,
    biases: Tensor,
    targets: Tensor,
    is_unsampled: Tensor | None,
    sampler: MixtureSampler | None,
    places: slice,
) -> tuple[Tensor, ...]:
    """log of the softmax' denominator, nll and whether the target is a best guess, [n,K], and what is drawn, [n,...].

    Args:
        hidden: [K,n,E].
        weight: [V,E].
        biases: [1 or K,V].
        targets: [n] int64.
        is_unsampled: [V] bool; with a sampler.
        sampler: None where nothing is drawn.
        places: which of the N positions these are.
    """
    logits = chunk_logits(hidden, weight, biases)  # [K,n,V]
    depth_weights = None if sampler is None else sampler.depth_weights(places, hidden.device)
    part_best, part_sum, *of_blocks = summarize_logits(logits, depth_weights, is_unsampled)
    largest = part_best.amax(-1)
    log_sum = (part_sum * (part_best - largest.unsqueeze(-1)).exp_()).sum(-1).log_() + largest
    of_target = logits.gather(-1, target_index(targets, len(hidden))).squeeze(-1).float()
    drawn = ()
    if sampler is not None:
        drawn = sampler.draw(TritonMixture.of(logits, depth_weights, is_unsampled, of_blocks), places)
    return log_sum.T, (log_sum - of_target).T, (of_target >= largest).T, *drawn


def gradient_of_chunk(
    hidden: Tensor, weight: Tensor, biases: Tensor, targets: Tensor, log_sum: Tensor, by_nll: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the logits, [K n,V] in the dtype of the layer, and of the biases, [1 or K,V] float32.

    ``log_sum`` and ``by_nll`` are [K,n] float32; the other arguments are those of :func:`guess_chunk`.
    """
    logits = chunk_logits(hidden, weight, biases)
    sums = gradient_of_logits(logits, log_sum.contiguous(), targets, by_nll.contiguous())  # [groups,K,V]
    of_biases = sums.sum(0) if len(biases) > 1 else sums.sum((0, 1)).unsqueeze(0)
    return logits.flatten(0, 1), of_biases


@dataclass
class TritonMixture:
    """:class:`amos_fairseq.functional.replacements.ChunkMixture` by the kernels of :mod:`amos_fairseq.functional.cuda.logits`.

    Attributes:
        logits: [K,n,V].
        depth_weights: gamma [n,K] float32.
        is_unsampled: [V] bool.
        block_best: [n,G] float32, the mixture's largest logit of each block, of the rows that can be drawn.
        block_sum: [n,G] float32, the sum of exp(logit - block_best) of these rows.
        excluded: [n,X] int64.
    """

    logits: Tensor
    depth_weights: Tensor
    is_unsampled: Tensor
    block_best: Tensor
    block_sum: Tensor
    excluded: Tensor

    @classmethod
    def of(
        cls, logits: Tensor, depth_weights: Tensor, is_unsampled: Tensor, of_blocks: list[Tensor]
    ) -> "TritonMixture":
        excluded = torch.empty(len(depth_weights), 0, dtype=torch.int64, device=logits.device)
        return cls(logits, depth_weights, is_unsampled, *of_blocks, excluded)

    @property
    def best(self) -> Tensor:
        """The largest logit of each position: [n,1] float32."""
        return self.block_best.amax(-1, keepdim=True)

    @property
    def block_weights(self) -> Tensor:
        """Each block's sum of exp(logit - best): [n,G] float32."""
        return self.block_sum * (self.block_best - self.best).exp_()

    @property
    def total(self) -> Tensor:
        return self.block_weights.sum(-1, keepdim=True)

    def draw(self, num_draws: int) -> tuple[Tensor, Tensor]:
        weights = self.block_weights
        blocks, points = pick(weights, uniform(weights, num_draws)), uniform(weights, num_draws)
        return pick_rows(self.logits, self.depth_weights, self.is_unsampled, self.excluded, blocks, points)

    def exclude(self, rows: Tensor) -> None:
        rows = rows.unsqueeze(1)
        self.excluded, blocks = torch.cat([self.excluded, rows], dim=1), rows // BLOCK_ROWS
        # Computed again: a subtraction would leave a rounding error where no weight is left.
        best, total = summarize_blocks(self.logits, self.depth_weights, self.is_unsampled, self.excluded, blocks)
        self.block_best.scatter_(1, blocks, best)
        self.block_sum.scatter_(1, blocks, total)

    def weights(self, num_positions: int) -> Tensor:
        """Converts the logits of these positions to float32, so meant for a few of them."""
        mixed = mix(self.logits[:, :num_positions].float(), self.depth_weights[:num_positions])
        weights = mixed.sub_(self.best[:num_positions]).exp_().masked_fill_(self.is_unsampled, 0.0)
        return weights.scatter_(1, self.excluded[:num_positions], 0.0)

    def most_likely(self, num_rows: int) -> Tensor:
        lowest = -float("inf")
        (logits,) = self.logits.masked_fill_(self.is_unsampled, lowest)
        return logits.scatter_(1, self.excluded, lowest).topk(num_rows).indices


def logit_chunks(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    """Chunks of positions by the size of their logits in the dtype of the layer."""
    bytes_per_position = len(hidden) * len(weight) * weight.element_size()
    return equal_parts(hidden.size(1), CHUNK_BYTES // bytes_per_position)


def chunk_logits(hidden: Tensor, weight: Tensor, biases: Tensor) -> Tensor:
    """[K,n,E] -> [K,n,V] in the dtype of the layer, rounded once, after the bias is added; a new tensor.

    :func:`torch.nn.functional.linear` of a non-contiguous [K,n,E], such as the positions of a chunk, computes the product and
    then adds the bias in a second pass over the logits. A product of matrices adds it at once.

    Departures: of biases of each depth, PyTorch's path adds the float32 of the bias to the float32 of a rounded product; here
    the sum is rounded to the dtype of the layer.
    """
    if len(biases) == 1:
        return torch.addmm(biases[0], hidden.flatten(0, 1), weight.T).unflatten(0, hidden.shape[:2])
    logits = torch.empty(*hidden.shape[:2], len(weight), dtype=weight.dtype, device=weight.device)
    for of_depth, hidden_of_depth, bias in zip(logits, hidden, biases, strict=True):
        torch.addmm(bias, hidden_of_depth, weight.T, out=of_depth)
    return logits


def row_mask(rows: Tensor, num_rows: int) -> Tensor:
    """True at ``rows``, int64: [num_rows] bool."""
    return torch.zeros(num_rows, dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
