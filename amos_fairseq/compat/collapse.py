"""Warn about a discriminator that gives all tokens the same probability, and end a run in which it continues to.

Nothing else shows it: the generator learns on, the detection loss is the entropy of the fraction of replaced tokens, and the
accuracy is that of "nothing is replaced". An update counts if the logits of a batch have a standard deviation of less than
:data:`~amos_fairseq.functional.replaced_token_detection.EQUAL_LOGITS`. After ``--collapse-updates`` such updates in a row
whose mean AUC is within its noise of 0.5, a warning says what to do; after as many more, the run ends with
:data:`amos_fairseq.errors.COLLAPSED`. The count is saved with a checkpoint, so that a resumed run ends at the same update.

Only tasks with a setting ``collapse_updates`` are tested: ``text_pretraining``. Electric's logits contain those of its
generator and always differ; see ``rtd_state_variance`` in its log.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from fairseq.trainer import Trainer

from amos_fairseq.collectives import raise_on_every_rank
from amos_fairseq.errors import CollapsedError
from amos_fairseq.functional.replaced_token_detection import EQUAL_LOGITS

logger = logging.getLogger(__name__)

# Standard errors of the mean AUC within which it counts as 0.5.
NOISE = 3.0
STATE = "equal_logit_updates"
ADVICE = (
    "the discriminator has collapsed: start again with model.discriminator_lr_scale=0.2, a lower learning rate or a longer "
    "warm-up; see docs/collapse.md"
)


class EqualLogits(NamedTuple):
    """Updates in a row with equal logits: their number, and the sums of their AUCs and of the squares."""

    count: int = 0
    aucs: float = 0.0
    squares: float = 0.0

    def after(self, auc: float, logit_std: float) -> "EqualLogits":
        """Return the count after one more update; one without replaced tokens, whose AUC is nan, changes nothing."""
        if math.isnan(auc):
            return self
        if not logit_std < EQUAL_LOGITS:
            return EqualLogits()
        return EqualLogits(self.count + 1, self.aucs + auc, self.squares + auc * auc)

    @property
    def knows_nothing(self) -> bool:
        """Whether the mean AUC is within its noise of 0.5: small logits can still be in the right order."""
        mean = self.aucs / self.count
        variance = max(self.squares / self.count - mean * mean, 0.0)
        # AUCs are logged with four digits.
        return abs(mean - 0.5) <= NOISE * math.sqrt(variance / self.count) + 5e-5


def watch_discriminator(train_step: Callable[..., Any], trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Count an update; warn, or end all ranks, when the discriminator has collapsed."""
    logged = train_step(trainer, *args, **kwargs)
    patience = getattr(trainer.task.cfg, "collapse_updates", 0)
    if not (logged and patience and "rtd_logit_std" in logged):  # an overflow under --fp16 logs nothing
        return logged
    seen = state_of(trainer).after(float(logged["rtd_auc"]), float(logged["rtd_logit_std"]))
    trainer.equal_logits = seen
    if seen.count and seen.count % patience == 0 and seen.knows_nothing:
        found = (
            f"update {trainer.get_num_updates()}: detection has given all tokens the same probability for {seen.count} "
            f"updates (AUC {seen.aucs / seen.count:.3f}); {ADVICE}"
        )
        if seen.count > patience:
            raise_on_every_rank(f"{found}; --collapse-updates 0 (task.collapse_updates) trains on", CollapsedError)
        logger.warning(found)
    return logged


def state_of(trainer: Trainer) -> EqualLogits:
    return getattr(trainer, "equal_logits", EqualLogits())


def save_count(state_dict: Callable[..., Any], trainer: Trainer) -> dict[str, Any]:
    """Add the count to a checkpoint."""
    state = state_dict(trainer)
    state["extra_state"][STATE] = list(state_of(trainer))
    return state


def load_count(load_checkpoint: Callable[..., Any], cfg: Any, trainer: Trainer, **kwargs: Any) -> Any:
    """Restore the count where the run continues; a new run from old weights starts at 0."""
    extra_state, epoch_itr = load_checkpoint(cfg, trainer, **kwargs)
    saved = (extra_state or {}).get(STATE)
    if trainer.get_num_updates() > 0 and not cfg.reset_meters and is_count(saved):
        trainer.equal_logits = EqualLogits(*saved)
    return extra_state, epoch_itr


def is_count(saved: Any) -> bool:
    """Whether a value of a checkpoint, which may be a stranger's, is a count."""
    if not (isinstance(saved, list) and len(saved) == len(EqualLogits._fields)):
        return False
    return isinstance(saved[0], int) and saved[0] >= 0 and all(isinstance(value, float) for value in saved[1:])
