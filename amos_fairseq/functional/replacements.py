"""What :func:`output_layer` draws from each chunk of logits: the samplers of the objectives.

Each is called with logits [K,n,V], from which the maximum of each depth and position was taken, their exp [K,n,V], and the
slice of the N positions that they belong to. Rows that are never sampled have the logit FORBIDDEN and the weight 0.
"""

from dataclasses import dataclass

from torch import Tensor

from amos_fairseq.functional.drawing import Race, draw_distinct_rows, draw_rows, race, unseen_scores
from amos_fairseq.functional.gumbel_entries import lost_mass
from amos_fairseq.functional.output_layer import FORBIDDEN

# Positions of a batch whose mass beyond the entries kept is measured: V random numbers each.
MEASURED_POSITIONS = 4


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
        return finished.rows[:, 0], finished.rows, finished.scores, of_depth, self.measure(mixed, finished, places)

    def measure(self, mixed: Tensor, finished: Race, places: slice) -> Tensor:
        """Of the first positions of the batch, which are in the first chunk."""
        count = MEASURED_POSITIONS if places.start == 0 else 0
        some = Race(*(part[:count] for part in finished))
        return lost_mass(some.scores, unseen_scores(mixed[:count], some), self.temperature)


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
