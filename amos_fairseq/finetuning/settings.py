"""Hyperparameters of one fine-tuning run, and the flags of ``fairseq-train`` that they mean."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from amos_fairseq.errors import UserError

CHECKPOINTS = ("best", "last")


@dataclass(frozen=True)
class Settings:
    """One point of a recipe.

    Attributes:
        warmup: share of all updates in which the learning rate rises; it falls linearly to 0 afterwards.
        clip_norm: 0 clips nothing.
        layer_wise_lr_decay: factor of the learning rate per layer, from the top downwards; 1 gives all layers the same.
        checkpoint: which one is scored, the ``best`` on dev after an epoch or the ``last``.
    """

    lr: float
    epochs: int
    batch_size: int
    warmup: float
    weight_decay: float = 0.0
    clip_norm: float = 0.0
    dropout: float = 0.1
    attention_dropout: float = 0.1
    pooler_dropout: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-6
    layer_wise_lr_decay: float = 1.0
    checkpoint: str = "best"

    def __post_init__(self) -> None:
        """Raise :class:`UserError` for values that no training can use."""
        for name in ("lr", "epochs", "batch_size", "adam_eps", "layer_wise_lr_decay"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("dropout", "attention_dropout", "pooler_dropout", "warmup"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")
        for name in ("weight_decay", "clip_norm"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")
        for beta in self.adam_betas:
            _require(0 <= beta < 1, "adam_betas", beta, "from 0 to below 1")
        _require(self.checkpoint in CHECKPOINTS, "checkpoint", self.checkpoint, " or ".join(CHECKPOINTS))

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"adam_betas": list(self.adam_betas)}


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise UserError(f"the recipe's {name} {value} must be {expected}")


def updates_per_epoch(rows: int, batch_size: int) -> int:
    """The last batch of an epoch may be smaller."""
    return math.ceil(rows / batch_size)


def total_updates(settings: Settings, rows: int) -> int:
    return updates_per_epoch(rows, settings.batch_size) * settings.epochs


def warmup_updates(settings: Settings, rows: int) -> int:
    """Whole updates within the share, as integer division by 16 or 10 gives them in AMOS's released script."""
    # 1/10 of 30 is 2.9999... in binary for some spellings of the share; that is still three.
    return math.floor(settings.warmup * total_updates(settings, rows) + 1e-6)


def settings_flags(settings: Settings, rows: int) -> list[str]:
    """Optimizer, schedule, regularisation and length of training as flags.

    Batches are always ``batch_size`` rows (``--required-batch-size-multiple 1``: fairseq's default would split the last
    batch of an epoch at a multiple of 8, and the number of updates would not be the one the schedule is made for).
    """
    first_moment, second_moment = settings.adam_betas
    flags = {
        "batch-size": settings.batch_size,
        "required-batch-size-multiple": 1,
        "max-epoch": settings.epochs,
        "optimizer": "grouped_adam",
        "adam-betas": f"({first_moment}, {second_moment})",
        "adam-eps": settings.adam_eps,
        "weight-decay": settings.weight_decay,
        "layer-wise-lr-decay": settings.layer_wise_lr_decay,
        "clip-norm": settings.clip_norm,
        "lr": settings.lr,
        "lr-scheduler": "polynomial_decay",
        "warmup-updates": warmup_updates(settings, rows),
        "total-num-update": total_updates(settings, rows),
        "dropout": settings.dropout,
        "attention-dropout": settings.attention_dropout,
        "pooler-dropout": settings.pooler_dropout,
    }
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]
