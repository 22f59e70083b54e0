"""Who decides which depth of the generator proposes a replacement: gamma of AMOS Eq. 3 and its ablations."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# BERT's standard deviation; the paper does not say how v starts. Near 0, so that gamma starts near 1 / K.
V_STD = 0.02

STRATEGIES = ("learned", "uniform", "random_layer", "layer_switch", "fixed")


class MixtureWeights(nn.Module):
    """Mixture weights gamma over K depths for every masked position.

    - ``learned``: gamma^(d) = softmax_d(v . f^(d)) (AMOS Eq. 3). v has no bias and exists only here.
    - ``uniform``: 1 / K ("- adv. train").
    - ``random_layer``: one depth per masked position, drawn uniformly ("w. random layer").
    - ``layer_switch``: depth j (counted from 0) from j / K of the planned updates on ("w. layer switch").
    - ``fixed``: K given numbers ("w. final mix weights").

    With one depth there is nothing to learn and gamma is 1 ("backbone" ablation).

    Args:
        strategy: one of the above.
        num_depths: K.
        width: D.
        fixed_weights: K numbers that sum to 1, for ``fixed``.
        max_update: planned updates, for ``layer_switch``.

    Raises:
        ValueError: an unknown strategy, numbers that are no distribution over K depths, or no planned updates.
    """

    def __init__(
        self,
        strategy: str,
        num_depths: int,
        width: int,
        fixed_weights: Sequence[float] = (),
        max_update: int = 0,
    ):
        super().__init__()
        check_strategy(strategy, num_depths, fixed_weights, max_update)
        self.strategy = strategy if num_depths > 1 else "uniform"
        self.num_depths = num_depths
        self.fixed_weights = [weight / sum(fixed_weights) for weight in fixed_weights]
        self.max_update = max_update
        self.num_updates = 0
        if self.learned:
            self.v = nn.Parameter(torch.empty(width).normal_(std=V_STD))

    @property
    def learned(self) -> bool:
        return self.strategy == "learned"

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """K tensors f^(d) [B,M,D], before the MLM head -> gamma [B,M,K] float32; only ``learned`` has a gradient."""
        if self.learned:
            return torch.stack([f @ self.v for f in features], dim=-1).float().softmax(-1)
        position_shape, device = features[0].shape[:-1], features[0].device
        if self.strategy == "random_layer":
            drawn = torch.randint(self.num_depths, position_shape, device=device)
            return drawn.unsqueeze(-1).eq(torch.arange(self.num_depths, device=device)).float()
        # Filled on the device: to copy numbers there, as torch.tensor does, waits for it.
        weights = [torch.full(position_shape, weight, device=device) for weight in self.constant_weights()]
        return torch.stack(weights, dim=-1)

    def constant_weights(self) -> list[float]:
        """The K weights of the strategies that give every position the same."""
        if self.strategy == "fixed":
            return self.fixed_weights
        if self.strategy == "layer_switch":
            current = min(self.num_updates * self.num_depths // self.max_update, self.num_depths - 1)
            return [float(depth == current) for depth in range(self.num_depths)]
        return [1 / self.num_depths] * self.num_depths


def parse_weights(text: str) -> list[float]:
    """ "0.2,0.3,0.5" -> [0.2, 0.3, 0.5]; raises ValueError."""
    try:
        return [float(number) for number in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--fixed-mixture-weights needs numbers such as 0.2,0.3,0.5; got {text!r}") from None


def check_strategy(strategy: str, num_depths: int, fixed_weights: Sequence[float], max_update: int) -> None:
    """Raise ValueError for settings that describe no mixture."""
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown mixture {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    if strategy == "fixed":
        is_distribution = min(fixed_weights, default=-1) >= 0 and abs(sum(fixed_weights) - 1) < 1e-3
        if len(fixed_weights) != num_depths or not is_distribution:
            raise ValueError(
                f"--fixed-mixture-weights needs {num_depths} numbers that are not negative and sum to 1, "
                f"got {list(fixed_weights)}"
            )
    if strategy == "layer_switch" and max_update <= 0:
        raise ValueError("--mixture layer_switch needs --max-update: it switches at equal parts of the planned updates")
