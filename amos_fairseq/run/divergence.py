"""End a run whose loss diverges, before its good checkpoints are replaced.

An update is suspicious if its loss is more than ``--divergence-factor`` times the median loss of the last
:data:`WINDOW` updates that were not suspicious, or if its gradient norm is more than :data:`NORM_FACTOR` times that factor
times their median norm. :data:`PATIENCE` suspicious updates in a row end the run with :data:`amos_fairseq.errors.DIVERGED`.
A single bad batch passes, and so does a slow rise, with which the median rises. While updates are suspicious, nothing is
saved, so that ``checkpoint_last.pt`` and the rotation keep what is from before. The window is saved with a checkpoint: a run
that is continued with other settings is compared with what it was.

Only tasks with a setting ``divergence_factor`` are tested: ``text_pretraining``. A fine-tuning loss can come so close to 0
that any other batch would be suspicious.
"""

import logging
import statistics
from collections import deque
from typing import Any

from fairseq.trainer import Trainer

from amos_fairseq.compat.collectives import raise_on_every_rank
from amos_fairseq.errors import DivergedError

logger = logging.getLogger(__name__)

WINDOW = 100
# With fewer updates there is no reliable median.
MINIMUM = 20
PATIENCE = 10
NORM_FACTOR = 10
STATE = "recent_updates"


class DivergenceTest:
    """Compares updates with those before; the same numbers on every rank give the same answer."""

    def __init__(self, factor: float, recent: list[list[float]] | None = None) -> None:
        self.factor = factor
        self.recent: deque[list[float]] = deque(recent or [], maxlen=WINDOW)  # loss and gradient norm of an update
        self.num_suspicious = 0

    def diverges(self, loss: float, norm: float) -> bool:
        """Add an update; return whether it is the last of ``PATIENCE`` suspicious ones."""
        if self.factor and len(self.recent) >= MINIMUM:
            losses, norms = (statistics.median(values) for values in zip(*self.recent, strict=True))
            if loss > self.factor * losses or norm > NORM_FACTOR * self.factor * norms:
                self.num_suspicious += 1
                return self.num_suspicious >= PATIENCE
        self.num_suspicious = 0
        self.recent.append([float(loss), float(norm)])
        return False


def test_of(trainer: Trainer) -> DivergenceTest:
    """Return the test of this trainer, created at its first use."""
    if not hasattr(trainer, "divergence_test"):
        trainer.divergence_test = DivergenceTest(getattr(trainer.task.cfg, "divergence_factor", 0.0))
    return trainer.divergence_test


def stop_if_diverging(trainer: Trainer, logged: dict[str, Any] | None) -> None:
    """End all ranks after an update that makes the divergence certain."""
    norm = getattr(trainer, "grad_norm_on_host", None)
    if not logged or norm is None or "loss" not in logged:  # an overflow under --fp16
        return
    test, loss = test_of(trainer), float(logged["loss"])
    if test.diverges(loss, norm):
        losses, norms = (statistics.median(values) for values in zip(*test.recent, strict=True))
        raise_on_every_rank(
            f"update {trainer.get_num_updates()}: the run diverges (loss {loss:.4g}, before {losses:.4g}; gradient norm "
            f"{norm:.4g}, before {norms:.4g}); no checkpoint was written since: lower the learning rate, warm up longer or "
            "clip more (--clip-norm), then start the same command again; --divergence-factor 0 (task.divergence_factor) "
            "turns this test off",
            DivergedError,
        )


def is_unsuspicious(trainer: Trainer) -> bool:
    """Return whether the trainer may be saved: not while updates are suspicious, except after the last one of the run."""
    if not test_of(trainer).num_suspicious or trainer.get_num_updates() == trainer.cfg.optimization.max_update:
        return True
    logger.warning("update %d is suspicious and is not saved", trainer.get_num_updates())
    return False


def save_recent_updates(trainer: Trainer, state: dict[str, Any]) -> None:
    """Add the window to a checkpoint."""
    state["extra_state"][STATE] = list(test_of(trainer).recent)


def load_recent_updates(cfg: Any, trainer: Trainer, epoch_itr: Any, extra_state: dict[str, Any] | None) -> None:
    """Restore the window where the run continues; a new run from old weights has its own."""
    if trainer.get_num_updates() > 0 and not cfg.reset_meters:
        recent = [pair for pair in (extra_state or {}).get(STATE, []) if all(isinstance(x, float) for x in pair)]
        trainer.divergence_test = DivergenceTest(test_of(trainer).factor, recent)
