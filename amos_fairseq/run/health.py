"""End a run that has become useless: a loss or gradient that is not finite, a loss that diverges, a collapsed discriminator."""

import logging
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer

from amos_fairseq.compat.distribution import raise_on_every_rank
from amos_fairseq.errors import CollapsedError, DivergedError
from amos_fairseq.functional.replaced_token_detection import EQUAL_LOGITS
from amos_fairseq.optim.warmup_stable_decay import schedule_of
from amos_fairseq.run.hook import Hook
from amos_fairseq.setting_checks import setting

logger = logging.getLogger(__name__)


class FiniteUpdates(Hook):
    """End the run, in one line that names the loss, at an update that is not finite.

    Stock fairseq ends in a traceback that does not name the loss, and does not notice an infinite one with a finite gradient.
    It still handles the overflow of a scaled gradient: only at the smallest scale (``FloatingPointError``) does the run end
    here.
    """

    def __init__(self) -> None:
        # Under --fp16: of the criterion, for each micro-batch of the update.
        self.outputs: list[dict[str, Any]] = []

    def after_trainer(self, trainer: Trainer) -> None:
        if not trainer.cfg.common.fp16:
            return

        def collect(criterion: Any, inputs: Any, result: Any) -> None:
            if criterion.training:
                self.outputs.append(result[2])

        trainer.get_criterion().register_forward_hook(collect)

    def before_update(self, trainer: Trainer) -> None:
        self.outputs.clear()

    def scale_exhausted(self, trainer: Trainer, error: FloatingPointError) -> None:
        reason = str(error).partition(". ")[0]
        what = f"the gradient, after the loss scale was lowered to its minimum ({reason}),"
        stop(trainer, trainer.get_num_updates() + 1, what, self.broken_losses())

    def before_statistics(self, trainer: Trainer, norm: float | None, outputs: list[dict[str, Any]]) -> None:
        if norm is not None and not math.isfinite(norm):
            stop(trainer, trainer.get_num_updates(), "the gradient", not_finite(outputs))

    def after_update(self, trainer: Trainer, logged: dict[str, Any] | None) -> None:
        """The gradient was finite; the loss may not be."""
        if logged is not None and (broken := not_finite([logged])):
            stop(trainer, trainer.get_num_updates(), "the loss", broken)

    def broken_losses(self) -> dict[str, float]:
        """Return :func:`not_finite` over all ranks. All of them call this, because they have the same summed gradient."""
        broken = not_finite(self.outputs)
        world_size = distributed_utils.get_global_world_size()
        if world_size == 1:
            return broken
        gathered: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(gathered, broken)
        return {key: loss for losses in gathered for key, loss in losses.items()}


def not_finite(logging_outputs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the losses that are not finite in any micro-batch; the total only if all of its parts are finite."""
    broken: dict[str, float] = {}
    for logging_output in logging_outputs:
        for key, value in logging_output.items():
            is_loss = "loss" in key and "scale" not in key and (not torch.is_tensor(value) or value.numel() == 1)
            if is_loss and not math.isfinite(float(value)):
                broken[key] = float(value)
    return {key: loss for key, loss in broken.items() if key != "loss"} or broken


def stop(trainer: Trainer, update: int, what: str, broken: dict[str, float]) -> None:
    """End all ranks with one line about ``update``."""
    losses = ", ".join(f"{key} = {loss}" for key, loss in broken.items()) or "every loss is finite"
    scaler = getattr(trainer.optimizer, "scaler", None)
    scale = "no loss scale" if scaler is None else f"loss scale {scaler.loss_scale:g}"
    raise_on_every_rank(
        f"update {update}: {what} is not finite ({losses}; {scale}): lower the learning rate, warm up longer or clip more "
        "(--clip-norm); the last checkpoint can be resumed"
    )


@dataclass
class DivergenceSettings(FairseqDataclass):
    divergence_factor: float = setting(
        3.0,
        "end the run after 10 updates in a row whose loss is above the median of the last 100 updates times this "
        "factor, or whose gradient norm is 10 times as far above (0: never; ours)",
        "0 or more",
    )


class Divergence(Hook):
    """End a run whose loss diverges, before its good checkpoints are replaced.

    An update is suspicious if its loss is more than ``--divergence-factor`` times the median loss of the last :attr:`WINDOW`
    updates that were not suspicious, or if its gradient norm is more than :attr:`NORM_FACTOR` times that factor times their
    median norm. :attr:`PATIENCE` of them in a row end the run. A single bad batch passes, and so does a slow rise, with which
    the median rises. A checkpoint has the window: a run that is continued with other settings is compared with what it was.

    Only ``text_pretraining`` has the setting. A fine-tuning loss can be so near 0 that any other batch would be suspicious.
    """

    WINDOW = 100
    MINIMUM = 20  # with fewer updates there is no reliable median
    PATIENCE = 10
    NORM_FACTOR = 10
    STATE = "recent_updates"  # in extra_state of a checkpoint

    def __init__(self) -> None:
        self.recent: deque[list[float]] = deque(maxlen=self.WINDOW)  # loss and gradient norm of an update
        self.num_suspicious = 0
        self.norm: float | None = None  # of this update
        self.is_last = False  # whether this update is the last one

    def before_completion(self, cfg: Any, trainer: Trainer) -> Any:
        self.is_last = trainer.get_num_updates() == cfg.optimization.max_update  # also of the last epoch
        return cfg

    def after_load(self, cfg: Any, trainer: Trainer, epoch_itr: Any, extra_state: dict[str, Any] | None) -> None:
        """Restore the window where the run continues; a new run from old weights has its own."""
        if trainer.get_num_updates() > 0 and not cfg.reset_meters:
            self.recent.extend([float(loss), float(norm)] for loss, norm in (extra_state or {}).get(self.STATE, ()))

    def before_statistics(self, trainer: Trainer, norm: float | None, outputs: list[dict[str, Any]]) -> None:
        self.norm = norm

    def after_update(self, trainer: Trainer, logged: dict[str, Any] | None) -> None:
        """All ranks have the same numbers and come to the same result."""
        if not logged or self.norm is None or "loss" not in logged:  # an overflow under --fp16
            return
        loss, factor = float(logged["loss"]), getattr(trainer.task.cfg, "divergence_factor", 0.0)
        if not self.diverges(loss, self.norm, factor):
            return
        median_loss, median_norm = self.medians()
        raise_on_every_rank(
            f"update {trainer.get_num_updates()}: the run diverges (loss {loss:.4g}, before {median_loss:.4g}; gradient norm "
            f"{self.norm:.4g}, before {median_norm:.4g}); no checkpoint was written since: lower the learning rate, warm up "
            "longer or clip more (--clip-norm), then start the same command again; --divergence-factor 0 "
            "(task.divergence_factor) turns this test off",
            DivergedError,
        )

    def diverges(self, loss: float, norm: float, factor: float) -> bool:
        """Add an update; return whether it is the last of ``PATIENCE`` suspicious ones."""
        if factor and len(self.recent) >= self.MINIMUM:
            median_loss, median_norm = self.medians()
            if loss > factor * median_loss or norm > self.NORM_FACTOR * factor * median_norm:
                self.num_suspicious += 1
                return self.num_suspicious >= self.PATIENCE
        self.num_suspicious = 0
        self.recent.append([loss, float(norm)])
        return False

    def medians(self) -> tuple[float, float]:
        losses, norms = zip(*self.recent, strict=True)
        return statistics.median(losses), statistics.median(norms)

    def may_save(self, trainer: Trainer) -> bool:
        if not self.num_suspicious or self.is_last or getattr(schedule_of(trainer), "has_ended", False):
            return True
        logger.warning("update %d is suspicious and is not saved", trainer.get_num_updates())
        return False

    def before_save(self, trainer: Trainer, state: dict[str, Any]) -> None:
        state["extra_state"][self.STATE] = list(self.recent)


@dataclass
class CollapseSettings(FairseqDataclass):
    collapse_updates: int = setting(
        1000,
        "warn when detection has given all tokens the same probability for this many updates in a row, and end "
        "the run after as many more (0: never; ours)",
        "0 or more",
    )


class Collapse(Hook):
    """Warn about a discriminator that gives all tokens the same probability, and end a run in which it continues to.

    The other values do not show it: the generator learns, the detection loss is the entropy of the fraction of replaced tokens,
    and the accuracy is that of "nothing is replaced". An update counts if the logits of a batch have a standard deviation of
    less than :data:`~amos_fairseq.functional.replaced_token_detection.EQUAL_LOGITS`; the AUC cannot tell such logits apart.
    After ``--collapse-updates`` such updates in a row a warning says what to do; after as many more, the run ends. A checkpoint
    has the count. Only ``text_pretraining`` has the setting. Electric's logits contain those of its generator and always
    differ.
    """

    STATE = "equal_logit_updates"  # in extra_state of a checkpoint

    def __init__(self) -> None:
        self.count = 0  # of updates in a row whose logits were equal

    def after_load(self, cfg: Any, trainer: Trainer, epoch_itr: Any, extra_state: dict[str, Any] | None) -> None:
        """Restore the count where the run continues; a new run from old weights starts at 0."""
        if trainer.get_num_updates() > 0 and not cfg.reset_meters:
            self.count = int((extra_state or {}).get(self.STATE, 0))

    def after_update(self, trainer: Trainer, logged: dict[str, Any] | None) -> None:
        patience = getattr(trainer.task.cfg, "collapse_updates", 0)
        # An overflow under --fp16 logs nothing; a batch without replaced tokens, whose AUC is nan, says nothing.
        if not (logged and patience and "rtd_logit_std" in logged) or math.isnan(float(logged["rtd_auc"])):
            return
        self.count = self.count + 1 if float(logged["rtd_logit_std"]) < EQUAL_LOGITS else 0
        if self.count < patience:
            return
        message = (
            f"update {trainer.get_num_updates()}: detection has given all tokens the same probability for {self.count} "
            "updates; the discriminator has collapsed: start again with model.discriminator_lr_scale=0.2 (AMOS: 0.05), which "
            "is the change that helped in docs/collapse.md"
        )
        if self.count >= 2 * patience:
            raise_on_every_rank(f"{message}; --collapse-updates 0 (task.collapse_updates) trains on", CollapsedError)
        if self.count == patience and trainer.is_data_parallel_master:
            logger.warning(message)

    def before_save(self, trainer: Trainer, state: dict[str, Any]) -> None:
        state["extra_state"][self.STATE] = self.count
