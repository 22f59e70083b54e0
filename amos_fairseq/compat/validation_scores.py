"""The score of a validation is a Python number.

``--best-checkpoint-metric spearman`` (or ``pearson``) of fairseq's ``sentence_prediction`` is scipy's, a numpy scalar, and
reaches the checkpoint through the "best so far" of both fairseq and its scheduler. A loader that runs no code from
checkpoints does not know that class: the run's own checkpoints could be neither resumed nor fine-tuned further.
"""

import functools
from collections.abc import Callable
from typing import Any

from amos_fairseq.compat.train_script import wrap_when_training


def _with_python_numbers(validate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(validate)
    def validate_to_python_numbers(*args: Any, **kwargs: Any) -> list[float | None]:
        return [None if score is None else float(score) for score in validate(*args, **kwargs)]

    return validate_to_python_numbers


def apply() -> None:
    """Convert what the training script's ``validate`` returns."""
    wrap_when_training("validate", _with_python_numbers)
