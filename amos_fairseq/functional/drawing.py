"""Drawing rows in proportion to their weights, from a few random numbers a position instead of one for every row.

Rows are gathered in about sqrt(V) blocks of about sqrt(V): one number chooses the block by the blocks' sums, another one the
row within it. Cumulative sums run in float64, and a point is never placed at the end of an interval, so that a row of
weight 0 is never drawn and none beyond the last.

Shapes: N positions, V rows, S draws, G blocks of V / G rows.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

# A factor below 1 whose product with a sum is rounded to less than the sum; times a uniform number it is no larger.
BELOW_ONE = 1 - 2**-52


def draw_rows(weights: Tensor, num_draws: int) -> Tensor:
    """S independent rows of each position, with replacement: weights [N,V] float32, not negative -> [N,S] int64.

    Random numbers come from PyTorch's default generator of the device. What is drawn where all weights are 0, or one is nan,
    has no meaning, but is a row.
    """
    blocks = in_blocks(weights)  # [N,G,V/G]
    block = pick(blocks.sum(-1), uniform(weights, num_draws))  # [N,S]
    column = pick(blocks_at(blocks, block), uniform(weights, num_draws, 1)).squeeze(-1)
    return block * blocks.size(-1) + column


def draw_distinct_rows(weights: Tensor, num_draws: int) -> Tensor:
    """S different rows drawn one after another, each from what is left: [N,V] -> [N,S] int64, in the order of drawing.

    The distribution of :func:`gumbel_top_k`. ``weights``, which it changes, has at least S entries above 0 in each position.
    """
    blocks = in_blocks(weights)
    sums = blocks.sum(-1)  # [N,G]
    rows = []
    for _ in range(num_draws):
        block = pick(sums, uniform(weights, 1))  # [N,1]
        entries = blocks_at(blocks, block)  # [N,1,V/G], a copy
        column = pick(entries, uniform(weights, 1, 1))  # [N,1,1]
        rows.append(block * blocks.size(-1) + column.squeeze(-1))
        weights.scatter_(1, rows[-1], 0.0)
        # Summed anew: a difference of sums would leave a rest where nothing is left.
        sums.scatter_(1, block, entries.scatter_(-1, column, 0.0).sum(-1))
    return torch.cat(rows, dim=1)


class Race(NamedTuple):
    """The first arrivals of :func:`race`, and whose they are."""

    rows: Tensor  # [N,S] int64, in the order of arrival; the first one is a sample of the softmax
    scores: Tensor  # [N,S] float32, log weight + Gumbel noise of that row; -inf for a row that has arrived before
    last: Tensor  # [N,1] float64, the time of the last arrival


def race(weights: Tensor, num_arrivals: int) -> Race:
    """The largest of log(weights) + Gumbel noise, without noise for every row.

    A Gumbel number is -log of an exponential one, so log w_v + g_v = -log t_v with t_v exponential of rate w_v: row v arrives
    at time t_v, and the largest perturbed logit is the earliest arrival. Let every row arrive again and again, at the events
    of a Poisson process of rate w_v; its first event has just that distribution. All events together are one process of rate
    sum w, whose events belong to rows drawn independently in proportion to w. So S events are S draws with replacement and
    the sums of S exponential numbers, and the first events among them are, exactly, all rows with t_v up to the last time:
    the largest perturbed logits, S of them, or fewer where a likely row arrives again. Rows that are not among them have
    perturbed logits below -log of the last time.

    Args:
        weights: [N,V] float32, exp(logits) up to a factor of each position.
        num_arrivals: S.
    """
    return arrivals(draw_rows(weights, num_arrivals), weights.sum(-1, keepdim=True))


def arrivals(rows: Tensor, total: Tensor) -> Race:
    """The :func:`race` of which the rows that arrive are known.

    Args:
        rows: [N,S] int64, drawn independently in proportion to the weights.
        total: [N,1], the sum of the weights.
    """
    gaps = torch.empty(rows.shape, dtype=torch.float64, device=rows.device).exponential_()
    times = gaps.cumsum(-1) / total
    scores = -times.log().float()
    return Race(rows, scores.masked_fill(is_repeated(rows), -math.inf), times[:, -1:])


def unseen_scores(weights: Tensor, finished: Race) -> Tensor:
    """log(weights) + Gumbel noise of the rows that did not arrive, given that: [N,V] float32, -inf at those that did.

    An exponential number that exceeds a time exceeds it by another one of the same rate.
    """
    waits = torch.empty_like(weights, dtype=torch.float64).exponential_() / weights
    scores = -(finished.last + waits).log().float()
    return scores.scatter_(1, finished.rows, -math.inf)


def is_repeated(rows: Tensor) -> Tensor:
    """True where a row stands earlier in its line: [N,S] int64 -> [N,S] bool."""
    ordered, order = rows.sort(dim=-1, stable=True)
    repeats = torch.zeros_like(rows, dtype=torch.bool)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(repeats).scatter_(-1, order, repeats)


def in_blocks(weights: Tensor) -> Tensor:
    """[N,V] -> [N,G,V/G], a view; V / G is the divisor of V that is nearest to its square root."""
    return weights.view(len(weights), -1, block_width(weights.size(-1)))


@functools.cache
def block_width(num_rows: int) -> int:
    divisors = [width for width in range(1, num_rows + 1) if num_rows % width == 0]
    return min(divisors, key=lambda width: abs(width - math.sqrt(num_rows)))


def blocks_at(blocks: Tensor, chosen: Tensor) -> Tensor:
    """Blocks of each position: [N,G,W], [N,S] -> [N,S,W]."""
    first = torch.arange(len(blocks), device=blocks.device).unsqueeze(1) * blocks.size(1)
    return blocks.flatten(0, 1).index_select(0, (first + chosen).flatten()).unflatten(0, chosen.shape)


def pick(weights: Tensor, points: Tensor) -> Tensor:
    """The entry on which each point falls: weights [...,W], points [...,S] in [0, 1) float64 -> [...,S] int64.

    It is the first whose cumulative sum exceeds the point, so its own weight is above 0.
    """
    ends = weights.double().cumsum(-1)
    found = torch.searchsorted(ends, points * (ends[..., -1:] * BELOW_ONE), right=True)
    return found.clamp_(max=weights.size(-1) - 1)  # beyond it lies only nan


def uniform(like: Tensor, *shape: int) -> Tensor:
    """Numbers in [0, 1), [N,*shape] float64: with float32's 24 bits rows of probability below 6e-8 would be drawn wrongly."""
    return torch.rand(len(like), *shape, dtype=torch.float64, device=like.device)
