"""Gather and scatter a few positions of every sequence through an index tensor of static shape.

Shapes: B sequences, T tokens, M masked positions, D width. Padded slots hold position 0 and weight 0; position 0 is
``<s>``, which is never masked, so a padded slot can be gathered and written back without changing a masked position.
"""

import torch
from torch import Tensor


def gather_positions(states: Tensor, positions: Tensor) -> Tensor:
    """Return ``states`` [B,T,D] at ``positions`` [B,M]: [B,M,D]."""
    return states.gather(1, positions.unsqueeze(-1).expand(-1, -1, states.size(-1)))


def replace_positions(tokens: Tensor, positions: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Return a copy of ``tokens`` [B,T] with ``values`` [B,M] at ``positions`` [B,M] wherever ``weights`` [B,M] is not 0.

    A padded slot writes back the present token: several slots may have position 0, and all write the same value.
    """
    present = tokens.gather(1, positions)
    return tokens.scatter(1, positions, values.where(weights != 0, present))


def add_at_positions(states: Tensor, positions: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """Return ``states`` [B,T,D] plus ``weights`` [B,M] * ``values`` [B,M,D] at ``positions`` [B,M]."""
    weighted = values * weights.unsqueeze(-1).to(values.dtype)
    return states.scatter_add(1, positions.unsqueeze(-1).expand_as(weighted), weighted.to(states.dtype))


def mean_state(states: Tensor, is_token: Tensor) -> Tensor:
    """Return the mean of ``states`` [B,T,D] over the tokens [B,T] bool: [B,D]. Values at padding may be anything."""
    return states.masked_fill(~is_token[..., None], 0).sum(1) / is_token.sum(1, keepdim=True)


def mark_positions(positions: Tensor, weights: Tensor, num_tokens: int) -> Tensor:
    """Return the ``positions`` [B,M] whose weight is not 0 as a mask: [B,T] bool."""
    marks = weights.new_zeros(len(positions), num_tokens)
    return marks.scatter_add(1, positions, weights) != 0


def random_positions(candidates: Tensor, counts: Tensor) -> Tensor:
    """Sample ``counts`` [B] of each sequence's ``candidates`` [B,T] bool without replacement: [B,T] bool.

    Every set of that size is equally likely. Random numbers come from PyTorch's default generator of the device. A sequence
    must have at least as many candidates as are sampled.
    """
    scores = torch.rand(candidates.shape, device=candidates.device).masked_fill(~candidates, 2.0)
    ranks = scores.argsort(1).argsort(1)  # 0 for the smallest score
    return ranks < counts.unsqueeze(1)
