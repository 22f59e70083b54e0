"""The score of a validation is a Python number, and nan is worse than any other.

``--best-checkpoint-metric spearman`` (or ``pearson``) of fairseq's ``sentence_prediction`` is scipy's, a numpy scalar, and
reaches the checkpoint through the "best so far" of both fairseq and its scheduler. A loader that runs no code from
checkpoints does not know that class: the run's own checkpoints could be neither resumed nor fine-tuned further.

A model that predicts one value for all rows has a rank correlation of nan. fairseq's comparisons with it are all false:
after one such epoch it forgets the best so far and takes the next checkpoint for the best, however bad.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from amos_fairseq.compat.train_script import wrap_when_training


def comparable(score: Any, maximize: bool) -> float | None:
    """A number that fairseq can compare with others; None (nothing was validated) as it is."""
    if score is None:
        return None
    score = float(score)
    return score if not math.isnan(score) else -math.inf if maximize else math.inf


def _with_comparable_scores(validate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(validate)
    def validate_comparably(cfg: Any, *args: Any, **kwargs: Any) -> list[float | None]:
        maximize = cfg.checkpoint.maximize_best_checkpoint_metric
        return [comparable(score, maximize) for score in validate(cfg, *args, **kwargs)]

    return validate_comparably


def apply() -> None:
    """Convert what the training script's ``validate`` returns."""
    wrap_when_training("validate", _with_comparable_scores)
