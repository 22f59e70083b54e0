"""Validation scores that can be compared and stored: Python numbers, and nan as the worst one."""

import math
from collections.abc import Callable
from typing import Any

from amos_fairseq.errors import UserError


def return_comparable_scores(validate: Callable[..., Any], cfg: Any, *args: Any, **kwargs: Any) -> list[float | None]:
    """Convert the scores that the training script's ``validate`` returns.

    scipy computes ``--best-checkpoint-metric spearman`` or ``pearson`` as a numpy scalar, which reaches the checkpoint as the
    best score. A loader that runs no code from checkpoints refuses that class: the run could not be resumed.
    """
    maximize, metric = cfg.checkpoint.maximize_best_checkpoint_metric, cfg.checkpoint.best_checkpoint_metric
    try:
        return [comparable(score, maximize) for score in validate(cfg, *args, **kwargs)]
    except KeyError as error:
        if error.args != (metric,):
            raise
        raise UserError(
            f"--best-checkpoint-metric {metric} (checkpoint.best_checkpoint_metric) is not logged"
        ) from error


def comparable(score: Any, maximize: bool) -> float | None:
    """Return a score as a Python number, and nan as the worst one; None (nothing was validated) is unchanged.

    A model that predicts one value for all examples has a rank correlation of nan. All of fairseq's comparisons with it are
    false: after such an epoch it forgets the best score and treats the next checkpoint as the best.
    """
    if score is None:
        return None
    score = float(score)
    return score if not math.isnan(score) else -math.inf if maximize else math.inf
