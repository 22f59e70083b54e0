"""A batch that does not fit into memory ends the run.

Stock fairseq leaves such a batch out and goes on. Blocks have one size here, so that every batch meets the same end: on one
GPU the run goes through its epochs for ever without an update, and several ranks lose each other, because one has left
out a backward pass that the others wait for. What the user is told is in :mod:`amos_fairseq.compat.user_errors`.
"""

import functools
from typing import Any

from fairseq.trainer import Trainer


def apply() -> None:
    """Let the trainer pass the exception on, as it can; a validation still tries once more with an empty cache."""
    train_step = Trainer.train_step

    @functools.wraps(train_step)
    def train_step_or_stop(self: Trainer, samples: list[dict[str, Any]], raise_oom: bool = True) -> Any:
        return train_step(self, samples, raise_oom)

    Trainer.train_step = train_step_or_stop
