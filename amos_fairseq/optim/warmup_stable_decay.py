"""The learning rate over the updates of a run, or over its time: warm-up, perhaps a constant part, decay.

``n`` is the number of updates or of seconds, ``N`` where the decay ends, ``W`` the end of the warm-up, ``S`` the start of the
decay. In ``n < W`` the rate is ``peak * n / W``, until ``S`` the peak, and from there, with ``x = (n - S) / (N - S)``::

    (peak - end) * (1 - x)^power + end      if the decay begins with the end of the warm-up (fairseq's polynomial_decay)
    (peak - end) * (1 - sqrt(x)) + end      after a constant part, as ModernBERT (arXiv 2412.13663)
"""

import math
from dataclasses import dataclass, field
from typing import Any, List, Optional  # noqa: UP035 (fairseq reads the types of config classes, in typing's spelling)

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from amos_fairseq.setting_checks import setting


@dataclass
class WarmupStableDecayConfig(FairseqDataclass):
    warmup_updates: int = setting(0, "updates in which the rate rises to its peak", "0 or more")
    total_num_update: float = field(
        default=II("optimization.max_update"),
        metadata={
            "help": "update at which the decay ends, with --max-epoch 0 for the last one; with --minutes, the warm-up is the "
            "share --warmup-updates / --total-num-update of the time",
            "range": "0 or more",
        },
    )
    end_learning_rate: float = setting(0.0, "rate at the end of the decay", "0 or more")
    power: float = setting(1.0, "exponent of a decay that begins with the end of the warm-up", "above 0")
    decay_share: float = setting(
        1.0,
        "share of the run, at its end, in which the rate falls, after a constant part; 1: from the end of the warm-up on; 0: "
        "it never falls, for a run from which --decay-from starts",
        "0 or more and at most 1",
    )
    decay_from: Optional[str] = setting(  # noqa: UP045
        None, "checkpoint of the constant part of a run, from which this run decays in another --save-dir"
    )
    minutes: float = setting(
        0.0, "budget of training time, over which the schedule goes instead of updates; 0: no limit", "0 or more"
    )
    lr: List[float] = II("optimization.lr")  # noqa: UP006


@register_lr_scheduler("warmup_stable_decay", dataclass=WarmupStableDecayConfig)
class WarmupStableDecay(FairseqLRScheduler):
    """The schedule. With ``minutes``, :class:`amos_fairseq.run.schedule.TimeBudget` sets ``seconds`` before each update.

    Attributes:
        seconds: of training under this schedule, all parts of the run together; 0 without ``minutes``.
        validation_seconds, save_seconds: what a validation and a checkpoint are expected to take; 0 while it is not known.
        update_seconds: what updates took when that was estimated.
        decay_start: update at which a branch has begun; None if this is no branch.
        ended_minutes: budget that the run has used up; 0 before.
        overflows: updates that ``--fp16`` has left out; they are part of an epoch.
    """

    STATE = ("seconds", "validation_seconds", "save_seconds", "update_seconds", "update_phase", "decay_start")
    STATE += ("ended_minutes", "overflows")

    def __init__(self, cfg: WarmupStableDecayConfig, optimizer: FairseqOptimizer):
        super().__init__(cfg, optimizer)
        self.seconds = self.validation_seconds = self.save_seconds = self.update_seconds = self.ended_minutes = 0.0
        self.update_phase: int | None = None  # in which update_seconds was measured, of a run with phases
        self.decay_start: int | None = None
        self.overflows = 0

    @property
    def has_ended(self) -> bool:
        return 0 < self.cfg.minutes <= self.ended_minutes

    def state_dict(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in self.STATE}
        return {**super().state_dict(), **state, "share_of_peak": self.optimizer.get_lr() / self.cfg.lr[0]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"best": state_dict.get("best")})
        for name in self.STATE:  # fairseq's polynomial_decay has none of them
            setattr(self, name, state_dict.get(name, getattr(self, name)))

    def begin_branch(self, num_updates: int) -> None:
        """Decay from the loaded checkpoint on, in ``minutes`` that begin now, or until ``total_num_update``."""
        self.decay_start, self.seconds, self.ended_minutes = num_updates, 0.0, 0.0

    def step_update(self, num_updates: int) -> float:
        self.optimizer.set_lr(self.rate(num_updates))
        return self.optimizer.get_lr()

    def rate(self, num_updates: int) -> float:
        """Return the rate after ``num_updates``, or after ``self.seconds``."""
        cfg, peak = self.cfg, self.cfg.lr[0]
        position, end, warmup = num_updates, cfg.total_num_update, cfg.warmup_updates
        if cfg.minutes:
            # The last update ends where the last validation begins.
            position, end = self.seconds, 60 * cfg.minutes - self.validation_seconds - self.save_seconds
            warmup = end * cfg.warmup_updates / cfg.total_num_update if cfg.warmup_updates else 0
        is_branch = self.decay_start is not None
        if is_branch:
            start = 0 if cfg.minutes else self.decay_start
        elif position <= warmup and warmup > 0:
            return position / float(warmup) * peak
        else:
            start = max(warmup, (1 - cfg.decay_share) * end)
        if position < start or (cfg.decay_share == 0 and not is_branch):
            return peak
        if position >= end:
            return cfg.end_learning_rate
        done = (position - start) / (end - start)
        is_polynomial = cfg.decay_share == 1 and not is_branch
        remaining = (1 - done) ** cfg.power if is_polynomial else 1 - math.sqrt(done)
        return (peak - cfg.end_learning_rate) * remaining + cfg.end_learning_rate


def schedule_of(trainer: Any) -> WarmupStableDecay | None:
    """Return the schedule of fairseq's trainer; None if it is another one, of fairseq."""
    schedule = getattr(trainer, "lr_scheduler", None)
    return schedule if isinstance(schedule, WarmupStableDecay) else None
