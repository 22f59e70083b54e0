"""Sampling from categorical distributions with a few random numbers per position instead of one per token.

Tokens are grouped into about sqrt(V) blocks of about sqrt(V): one random number selects the block by the blocks' sums,
another one the token within it. Cumulative sums are in float64, and a point is never placed at the end of an interval, so a
token of weight 0 is never sampled, nor one beyond the last.

Shapes: N positions, V padded vocabulary size, S samples, G blocks of V / G tokens.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

# A factor below 1 whose product with a sum is rounded to less than the sum; its product with a number in [0, 1) is not larger.
BELOW_ONE = 1 - 2**-52


def sample_with_replacement(weights: Tensor, num_samples: int) -> Tensor:
    """Sample S independent tokens for each position: weights [N,V] float32, not negative -> [N,S] int64.

    Random numbers come from PyTorch's default generator of the device. Where all weights are 0, or one is nan, the result is
    a valid but meaningless token id.
    """
    blocks = split_into_blocks(weights)  # [N,G,V/G]
    block = pick(blocks.sum(-1), uniform(weights, num_samples))  # [N,S]
    column = pick(gather_blocks(blocks, block), uniform(weights, num_samples, 1)).squeeze(-1)
    return block * blocks.size(-1) + column


def sample_without_replacement(weights: Tensor, num_samples: int) -> Tensor:
    """Sample S different tokens for each position, one after another: [N,V] -> [N,S] int64, in the order of sampling.

    The distribution is that of :func:`~amos_fairseq.functional.sampling.gumbel_top_k`. ``weights`` is modified, and must have
    at least S entries above 0 for each position.
    """
    blocks = split_into_blocks(weights)
    sums = blocks.sum(-1)  # [N,G]
    tokens = []
    for _ in range(num_samples):
        block = pick(sums, uniform(weights, 1))  # [N,1]
        entries = gather_blocks(blocks, block)  # [N,1,V/G], a copy
        column = pick(entries, uniform(weights, 1, 1))  # [N,1,1]
        tokens.append(block * blocks.size(-1) + column.squeeze(-1))
        weights.scatter_(1, tokens[-1], 0.0)
        # Summed again: a difference of sums would leave a rounding error where no weight is left.
        sums.scatter_(1, block, entries.scatter_(-1, column, 0.0).sum(-1))
    return torch.cat(tokens, dim=1)


class TopK(NamedTuple):
    """The largest perturbed logits of :func:`gumbel_top_k_sampling` and their tokens."""

    tokens: Tensor  # [N,k] int64, in descending order of their scores; the first one is a sample of the softmax
    scores: Tensor  # [N,k] float32, log weight + Gumbel noise of that token; -inf where the token is a repetition
    last_time: Tensor  # [N,1] float64, the time of the last event: -log of it is below all scores that are not -inf


def gumbel_top_k_sampling(weights: Tensor, k: int) -> TopK:
    """Sample the k largest values of log(weights) + Gumbel noise, without noise for every token.

    A Gumbel number is -log of an exponential one, so log w_v + g_v = -log t_v with t_v exponential of rate w_v: the largest
    perturbed logit belongs to the smallest t_v. Let t_v be the first event of a Poisson process of rate w_v, which has just
    that distribution. All V processes together are one process of rate sum w, whose events belong to tokens that are
    independent samples in proportion to w. So the first k events are k samples with replacement and the cumulative sums of k
    exponential numbers, and the first event of each token among them gives, exactly, all t_v up to the last time: the largest
    perturbed logits, k of them, or fewer where a likely token occurs again. All other tokens have perturbed logits below -log
    of the last time.

    Args:
        weights: [N,V] float32, exp(logits) up to a factor of each position.
        k: the number of events.
    """
    return top_k_of_samples(sample_with_replacement(weights, k), weights.sum(-1, keepdim=True))


def top_k_of_samples(tokens: Tensor, total: Tensor) -> TopK:
    """Return the result of :func:`gumbel_top_k_sampling` for events whose tokens are already sampled.

    Args:
        tokens: [N,k] int64, independent samples in proportion to the weights.
        total: [N,1], the sum of the weights.
    """
    gaps = torch.empty(tokens.shape, dtype=torch.float64, device=tokens.device).exponential_()
    times = gaps.cumsum(-1) / total
    scores = -times.log().float()
    return TopK(tokens, scores.masked_fill(is_repeated(tokens), -math.inf), times[:, -1:])


def scores_outside_top_k(weights: Tensor, top_k: TopK) -> Tensor:
    """Sample log(weights) + Gumbel noise of all tokens outside ``top_k``, given ``top_k``: [N,V] float32, -inf at its tokens.

    An exponential number that is known to exceed a time exceeds it by another exponential number of the same rate.
    """
    excess = torch.empty_like(weights, dtype=torch.float64).exponential_() / weights
    scores = -(top_k.last_time + excess).log().float()
    return scores.scatter_(1, top_k.tokens, -math.inf)


def is_repeated(tokens: Tensor) -> Tensor:
    """Return True where the token occurs earlier at the same position: [N,S] int64 -> [N,S] bool."""
    ordered, order = tokens.sort(dim=-1, stable=True)
    repeats = torch.zeros_like(tokens, dtype=torch.bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(repeats).scatter_(-1, order, repeats)


def split_into_blocks(weights: Tensor) -> Tensor:
    """[N,V] -> [N,G,V/G], a view; V / G is the divisor of V that is nearest to its square root."""
    return weights.view(len(weights), -1, block_width(weights.size(-1)))


@functools.cache
def block_width(vocabulary_size: int) -> int:
    divisors = [width for width in range(1, vocabulary_size + 1) if vocabulary_size % width == 0]
    return min(divisors, key=lambda width: abs(width - math.sqrt(vocabulary_size)))


def gather_blocks(blocks: Tensor, chosen: Tensor) -> Tensor:
    """Return the chosen blocks of each position: [N,G,W], [N,S] -> [N,S,W]."""
    first = torch.arange(len(blocks), device=blocks.device).unsqueeze(1) * blocks.size(1)
    return blocks.flatten(0, 1).index_select(0, (first + chosen).flatten()).unflatten(0, chosen.shape)


def pick(weights: Tensor, points: Tensor) -> Tensor:
    """Return the entry that each point selects: weights [...,W], points [...,S] in [0, 1) float64 -> [...,S] int64.

    It is the first entry whose cumulative share of the weights exceeds the point, so its own weight is above 0.
    """
    ends = weights.double().cumsum(-1)
    found = torch.searchsorted(ends, points * (ends[..., -1:] * BELOW_ONE), right=True)
    return found.clamp_(max=weights.size(-1) - 1)  # only nan can exceed it


def uniform(like: Tensor, *shape: int) -> Tensor:
    """Sample numbers in [0, 1), [N,*shape] float64.

    With the 24 bits of float32, tokens of probability below 6e-8 would get a wrong probability.
    """
    return torch.rand(len(like), *shape, dtype=torch.float64, device=like.device)
