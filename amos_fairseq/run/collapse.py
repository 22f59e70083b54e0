"""Warn about a discriminator that gives all tokens the same probability, and end a run in which it continues to.

Nothing else shows it: the generator learns on, the detection loss is the entropy of the fraction of replaced tokens, and the
accuracy is that of "nothing is replaced". An update counts if the logits of a batch have a standard deviation of less than
:data:`~amos_fairseq.functional.replaced_token_detection.EQUAL_LOGITS`; the AUC cannot tell such logits apart. After
``--collapse-updates`` such updates in a row a warning says what to do; after as many more, the run ends with
:data:`amos_fairseq.errors.COLLAPSED`. The count is saved with a checkpoint, so that a resumed run ends at the same update.

Only tasks with a setting ``collapse_updates`` are tested: ``text_pretraining``. Electric's logits contain those of its
generator and always differ; see ``rtd_state_variance`` in its log.
"""

import logging
import math
from typing import Any

from fairseq.trainer import Trainer

from amos_fairseq.compat.collectives import raise_on_every_rank
from amos_fairseq.errors import CollapsedError
from amos_fairseq.functional.replaced_token_detection import EQUAL_LOGITS

logger = logging.getLogger(__name__)

STATE = "equal_logit_updates"
ADVICE = (
    "the discriminator has collapsed: start again with model.discriminator_lr_scale=0.2 (AMOS: 0.05), which is the change "
    "that helped in docs/collapse.md"
)


def watch_discriminator(trainer: Trainer, logged: dict[str, Any] | None) -> None:
    """Count an update; warn, or end all ranks, when the discriminator has collapsed."""
    patience = getattr(trainer.task.cfg, "collapse_updates", 0)
    # An overflow under --fp16 logs nothing; a batch without replaced tokens, whose AUC is nan, says nothing.
    if not (logged and patience and "rtd_logit_std" in logged) or math.isnan(float(logged["rtd_auc"])):
        return
    count = equal_logit_updates(trainer) + 1 if float(logged["rtd_logit_std"]) < EQUAL_LOGITS else 0
    trainer.equal_logit_updates = count
    if count >= patience:
        found = (
            f"update {trainer.get_num_updates()}: detection has given all tokens the same probability for {count} updates; "
            f"{ADVICE}"
        )
        if count >= 2 * patience:
            raise_on_every_rank(f"{found}; --collapse-updates 0 (task.collapse_updates) trains on", CollapsedError)
        if count == patience and trainer.is_data_parallel_master:
            logger.warning(found)


def equal_logit_updates(trainer: Trainer) -> int:
    """Return the number of updates in a row whose logits were equal."""
    return getattr(trainer, "equal_logit_updates", 0)


def save_count(trainer: Trainer, state: dict[str, Any]) -> None:
    """Add the count to a checkpoint."""
    state["extra_state"][STATE] = equal_logit_updates(trainer)


def load_count(cfg: Any, trainer: Trainer, epoch_itr: Any, extra_state: dict[str, Any] | None) -> None:
    """Restore the count where the run continues; a new run from old weights starts at 0."""
    saved = (extra_state or {}).get(STATE)
    is_count = type(saved) is int and saved >= 0  # a checkpoint may be a stranger's
    if trainer.get_num_updates() > 0 and not cfg.reset_meters and is_count:
        trainer.equal_logit_updates = saved
