"""What one update of an entry costs, by two conventions."""

from dataclasses import dataclass

from omegaconf import DictConfig

from amos_fairseq.flops.training import training_flops


@dataclass(frozen=True)
class Cost:
    """Floating point operations of one update.

    Attributes:
        thesis: thesis 5.2.2: backward as much as forward, dense look-ups of embeddings, element-wise operations.
        matmuls: today's: matrix products alone, forward and backward.
    """

    thesis: float
    matmuls: float


def cost_of(cfg: DictConfig) -> Cost:
    """Counted on the real model, criterion and batch; raises ``UserError`` where the cost changes from update to update."""
    return Cost(float(training_flops(cfg, convention="thesis").per_update), float(training_flops(cfg).per_update))
