"""What :func:`output_layer` draws from each chunk of logits: the samplers of the objectives.

Each is called with logits [K,n,V], from which the maximum of each depth and position was taken, their exp [K,n,V], and the
slice of the N positions that they belong to. Rows that are never sampled have the logit FORBIDDEN and the weight 0.

The Triton kernels write no such tensors. With them a sampler gives the weights of the depths (``depth_weights``) and draws
from a :class:`ChunkMixture` (``draw``). The distribution is the same.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from amos_fairseq.functional.drawing import Race, arrivals, draw_distinct_rows, draw_rows, race, unseen_scores
from amos_fairseq.functional.gumbel_entries import lost_mass
from amos_fairseq.functional.output_layer import FORBIDDEN

# Positions of a batch whose mass beyond the entries kept is measured: V random numbers each.
MEASURED_POSITIONS = 4


class ChunkMixture(Protocol):
    """softmax(sum_d gamma^(d) logits^(d)) at the n positions of a chunk, over the rows that may be drawn.

    It is represented by sums over blocks of rows. No method converts all logits of the chunk to float32.
    """

    @property
    def total(self) -> Tensor:
        """The sum of the weights, which are exp(mixed logit - largest mixed logit): [n,1] float32."""

    def draw(self, num_draws: int) -> tuple[Tensor, Tensor]:
        """S independent rows [n,S] int64 with replacement, and the logits of each depth at these rows, [n,S,K] float32."""

    def exclude(self, rows: Tensor) -> None:
        """Exclude ``rows`` [n] int64, one for each position, from later draws."""

    def weights(self, num_positions: int) -> Tensor:
        """The weights of all rows at the first positions: [num_positions,V] float32."""

    def most_likely(self, num_rows: int) -> Tensor:
        """The rows of the largest logits, of one depth: [n,num_rows] int64. Overwrites logits, so it is the last call."""


class MixtureSampler(Protocol):
    """The methods of a sampler that :func:`output_layer` calls with ``with_triton``."""

    def depth_weights(self, places: slice, device: torch.device) -> Tensor:
        """gamma at the positions ``places``: [n,K] float32, contiguous."""

    def draw(self, mixture: ChunkMixture, places: slice) -> tuple[Tensor, ...]:
        """The same outputs as from logits, tensors [n,...]; from other random numbers, so equal in distribution."""


@dataclass(frozen=True)
class Replacements:
    """One token of softmax(logits / temperature) for every position, of one depth.

    Attributes:
        temperature: above 0.
        forbidden: [N] int64, a token that is not drawn at its position; None forbids nothing.
    """

    temperature: float = 1.0
    forbidden: Tensor | None = None

    def __call__(self, logits: Tensor, weights: Tensor, places: slice) -> tuple[Tensor]:
        """Tokens [n] int64."""
        logits, weights = logits[0], weights[0]
        if self.forbidden is not None:
            forbid(logits, self.forbidden[places])
        if self.forbidden is not None or self.temperature != 1:
            weights = softmax_weights(logits.div_(self.temperature))
        return (draw_rows(weights, 1).squeeze(1),)

    def depth_weights(self, places: slice, device: torch.device) -> Tensor:
        return torch.full((places.stop - places.start, 1), 1 / self.temperature, device=device)

    def draw(self, mixture: ChunkMixture, places: slice) -> tuple[Tensor]:
        if self.forbidden is not None:
            mixture.exclude(self.forbidden[places])
        return (mixture.draw(1)[0].squeeze(1),)


@dataclass(frozen=True)
class ReplacementsAndNegatives:
    """A token of the softmax for every position and, independently, other words for TEAMS to select from.

    Attributes:
        originals: [N] int64, no negatives of their positions.
        num_negatives: K of TEAMS.
        hardest: the most likely words instead of words drawn without replacement.
    """

    originals: Tensor
    num_negatives: int
    hardest: bool

    def __call__(self, logits: Tensor, weights: Tensor, places: slice) -> tuple[Tensor, Tensor]:
        """Tokens [n] and negatives [n, num_negatives], int64."""
        sampled = draw_rows(weights[0], 1).squeeze(1)
        others = forbid(logits[0], self.originals[places])
        if self.hardest:
            return sampled, others.topk(self.num_negatives).indices
        return sampled, draw_distinct_rows(softmax_weights(others, all_above_0=True), self.num_negatives)

    def depth_weights(self, places: slice, device: torch.device) -> Tensor:
        return Replacements().depth_weights(places, device)

    def draw(self, mixture: ChunkMixture, places: slice) -> tuple[Tensor, Tensor]:
        sampled = mixture.draw(1)[0].squeeze(1)
        mixture.exclude(self.originals[places])
        if self.hardest:
            return sampled, mixture.most_likely(self.num_negatives)
        negatives: list[Tensor] = []
        for _ in range(self.num_negatives):
            if negatives:
                mixture.exclude(negatives[-1])
            negatives.append(mixture.draw(1)[0].squeeze(1))
        return sampled, torch.stack(negatives, dim=1)


@dataclass(frozen=True)
class MixtureReplacements:
    """One token of the mixture of all depths for every position, and the entries that its Gumbel-Softmax is made of.

    Attributes:
        mixture_weights: gamma [N,K] float32.
        num_entries: J, at most so many entries are kept; 0 where no gradient needs them.
        temperature: tau of Gumbel-Softmax.
    """

    mixture_weights: Tensor
    num_entries: int = 0
    temperature: float = 1.0

    def __call__(self, logits: Tensor, weights: Tensor, places: slice) -> tuple[Tensor, ...]:
        """Tokens [n]; with entries also rows and scores [n,J], logits [n,J,K], and the lost mass of some positions [0 to n]."""
        mixed = softmax_weights(mix(logits, self.mixture_weights[places]))
        if not self.num_entries:
            return (draw_rows(mixed, 1).squeeze(1),)
        finished = race(mixed, self.num_entries)
        of_depth = logits.gather(-1, finished.rows.expand(len(logits), -1, -1)).permute(1, 2, 0)
        lost = self.measure(mixed[: num_measured(places)], finished)
        return finished.rows[:, 0], finished.rows, finished.scores, of_depth, lost

    def depth_weights(self, places: slice, device: torch.device) -> Tensor:
        return self.mixture_weights[places].contiguous()

    def draw(self, mixture: ChunkMixture, places: slice) -> tuple[Tensor, ...]:
        rows, of_depth = mixture.draw(self.num_entries or 1)
        if not self.num_entries:
            return (rows.squeeze(1),)
        finished = arrivals(rows, mixture.total)
        lost = self.measure(mixture.weights(num_measured(places)), finished)
        return rows[:, 0], rows, finished.scores, of_depth, lost

    def measure(self, weights: Tensor, finished: Race) -> Tensor:
        """The lost mass of the first positions of a chunk, those that ``weights`` [some,V] are of."""
        some = Race(*(part[: len(weights)] for part in finished))
        return lost_mass(some.scores, unseen_scores(weights, some), self.temperature)


def num_measured(places: slice) -> int:
    """How many positions of a chunk are measured, at most: they are the first ones of the batch, in the first chunk."""
    return MEASURED_POSITIONS if places.start == 0 else 0


def mix(logits: Tensor, mixture_weights: Tensor) -> Tensor:
    """sum_d gamma^(d) logits^(d), but for a constant of each position: [K,n,V], [n,K] -> [n,V]."""
    mixed = logits[0] * mixture_weights[:, :1]
    for depth in range(1, len(logits)):
        mixed.addcmul_(logits[depth], mixture_weights[:, depth : depth + 1])
    return mixed


def forbid(logits: Tensor, tokens: Tensor) -> Tensor:
    """``logits`` [n,V], changed, with FORBIDDEN at ``tokens`` [n]."""
    return logits.scatter_(-1, tokens.unsqueeze(-1), FORBIDDEN)


def softmax_weights(logits: Tensor, all_above_0: bool = False) -> Tensor:
    """exp(logits - maximum) of each position, in place of the logits [n,V].

    ``all_above_0`` leaves every row that may be drawn at least e^-80, about 2e-35, which changes no distribution: when likelier
    rows are taken away there is still something to draw.
    """
    forbidden = logits < FORBIDDEN / 2 if all_above_0 else None
    logits.sub_(logits.amax(-1, keepdim=True))
    if forbidden is None:
        return logits.exp_()
    return logits.clamp_(min=-80.0).exp_().masked_fill_(forbidden, 0.0)
