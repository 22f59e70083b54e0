"""How long a run trains and on which blocks: its epochs, its budget of time, and its phases.

A run of a fixed time: ``amos train RECIPE --minutes 480``, ``lr_scheduler.minutes=480``, ``fairseq-train --minutes 480``.

The schedule goes over the time since the trainer exists, which all parts of a run share: a checkpoint has the time so far. It
is that of the first rank. The last validation and checkpoint belong to the budget: the run expects them to take as long as the
ones before, a validation in proportion to the time of an update, which may have changed since. Where none is due in the first
tenth of the time, both are made there. The run ends when no other update fits.
"""

import itertools
import logging
import math
import statistics
import time
from collections import deque
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from amos_fairseq.compat.distribution import sum_over_ranks
from amos_fairseq.compat.patching import stop_readers
from amos_fairseq.data.phases import phase_at, read_phases
from amos_fairseq.errors import UserError
from amos_fairseq.optim.warmup_stable_decay import WarmupStableDecay, schedule_of
from amos_fairseq.run.hook import Hook

logger = logging.getLogger(__name__)

clock = time.monotonic

UPDATES_OF_DURATION = 5  # the next update is expected to take as long as the longest of the last ones
MOST_DURATIONS = 1000
FIRST_MEASURE = 0.1  # share of the budget
MOST_DIFFERENT = 0.1  # share of the run by which a schedule of fairseq may end elsewhere without a word; ours


def stop_at_time_limit(cfg: Any) -> None:
    """With ``minutes``, the recipe's number of updates remains as that of the schedule, and no longer ends the run. To be
    called before the settings are resolved: parts of a model that follow ``max_update`` then know that there is none."""
    minutes = OmegaConf.select(cfg, "lr_scheduler.minutes")
    if minutes and cfg.optimization.max_update:
        cfg.lr_scheduler.total_num_update = cfg.lr_scheduler.total_num_update
        cfg.optimization.max_update = 0


class Epochs(Hook):
    """The length of a run with ``max_epoch``, over which go the learning rate and all else that follows ``max_update``. The
    warm-up of a recipe is a share of its ``max_update``; flags and words of the command line name its updates."""

    def before_launch(self, cfg: Any) -> None:
        schedule, planned = cfg.lr_scheduler, cfg.optimization.max_update
        is_ours = OmegaConf.select(schedule, "_name") == "warmup_stable_decay"
        names_updates = not HydraConfig.initialized() or typed("lr_scheduler.warmup_updates=")
        if cfg.optimization.max_epoch and is_ours and names_updates and schedule.total_num_update == planned:
            schedule.total_num_update = 0  # no end, of which the warm-up would be a share

    def after_load(self, cfg: Any, trainer: Any, epoch_itr: Any, extra_state: Any) -> None:
        settings, schedule, model = trainer.cfg, schedule_of(trainer), trainer.get_model()
        if not settings.optimization.max_epoch or not (left := updates_left(trainer, epoch_itr)):
            return
        done, planned = trainer.get_num_updates() + getattr(schedule, "overflows", 0), settings.optimization.max_update
        trainer.planned_updates = length = min(done + left, planned or math.inf)
        for section in (settings.model, settings.task, trainer.task.cfg, getattr(model, "cfg", None), *model.modules()):
            if getattr(section, "max_update", 0):
                section.max_update = length
        of_rate = getattr(schedule, "cfg", settings.lr_scheduler)
        if schedule is not None and of_rate.total_num_update in (0, planned):
            of_rate.warmup_updates = math.ceil(of_rate.warmup_updates * length / (of_rate.total_num_update or length))
            of_rate.total_num_update = length
            trainer.lr_step_update()
        warmup, end = (getattr(of_rate, name, 0) or 0 for name in ("warmup_updates", "total_num_update"))
        text = f"the run ends at update {length:,}, the warm-up of its learning rate at {warmup:,}"
        is_off = warmup >= length or (end and abs(end - length) > MOST_DIFFERENT * length)
        if is_off:
            text += f", the decay at {end:,.0f}: give --warmup-updates and --total-num-update (of lr_scheduler) for {length:,}"
        if distributed_utils.get_global_rank() == 0:
            logger.log(logging.WARNING if is_off else logging.INFO, text)

    def after_update(self, trainer: Any, logged: dict[str, Any] | None) -> None:
        if logged is None and (schedule := schedule_of(trainer)) is not None:
            schedule.overflows += 1


def updates_left(trainer: Any, epoch_itr: Any) -> int:
    """Return the number of updates until the end of ``max_epoch``. Other shards and other ``update_freq`` are opened for it."""
    optimization, task, first = trainer.cfg.optimization, trainer.task, epoch_itr.next_epoch_idx
    is_sharded, datasets = task.has_sharded_data(trainer.cfg.dataset.train_subset), dict(task.datasets)
    left, iterator = 0, epoch_itr
    for epoch in range(first, optimization.max_epoch + 1):
        if epoch > first and (is_sharded or len(set(optimization.update_freq)) > 1):
            iterator = trainer.get_train_iterator(epoch, load_dataset=is_sharded, disable_iterator_cache=True)
        batches = len(iterator) - epoch_itr.iterations_in_epoch * (epoch == first)
        left += math.ceil(batches / optimization.update_freq[min(epoch, len(optimization.update_freq)) - 1])
    task.datasets.update(datasets)
    return left


def typed(start: str) -> list[str]:
    """Return what the command line of Hydra has that begins with ``start``."""
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    return [each.lstrip("+") for each in overrides if each.lstrip("+").startswith(start)]


class TimeBudget(Hook):
    def __init__(self) -> None:
        self.started = clock()
        self.schedule: WarmupStableDecay | None = None  # where it goes over time
        self.is_last = self.measures = self.is_near_end = False  # the present update; as in plan()
        self.update_started: float | None = None
        self.completion_started = self.completion_seconds = 0.0  # of what follows an update
        self.save_started: float | None = None
        self.durations: deque[float] = deque(maxlen=MOST_DURATIONS)  # of updates, the newest first

    def before_launch(self, cfg: Any) -> None:
        if OmegaConf.select(cfg, "lr_scheduler._name") == "warmup_stable_decay":
            check(cfg)

    def after_load(self, cfg: Any, trainer: Any, epoch_itr: Any, extra_state: Any) -> None:
        schedule = schedule_of(trainer)
        if schedule and schedule.cfg.minutes:
            self.schedule = schedule
            self.started -= schedule.seconds

    def before_epoch(self, cfg: Any, trainer: Any) -> None:
        """Where a phase begins, an update becomes other work: its time no longer says how that of a validation has changed."""
        self.completion_started = clock()  # of the validation before the first update that amos adapt makes
        iterator = getattr(trainer.task, "phase_iterator", None) if self.schedule is not None else None
        if iterator is not None and iterator.phase != self.schedule.update_phase:
            self.durations.clear()
            self.schedule.update_seconds, self.schedule.update_phase = 0.0, iterator.phase

    def before_update(self, trainer: Any) -> None:
        """Agree with the other ranks on the time, and set the rate of this update."""
        if self.schedule is None:
            return
        schedule = self.schedule
        plan = self.plan(trainer) if distributed_utils.get_global_rank() == 0 else [0.0] * 7
        numbers = sum_over_ranks(torch.tensor(plan, dtype=torch.float64)).tolist()
        schedule.seconds, schedule.validation_seconds, schedule.save_seconds, schedule.update_seconds = numbers[:4]
        self.is_last, self.measures, self.is_near_end = map(bool, numbers[4:])
        if self.is_last:
            schedule.ended_minutes = schedule.cfg.minutes
        schedule.step_update(trainer.get_num_updates())

    def plan(self, trainer: Any) -> list[float]:
        """Return seven numbers: the time; what a validation, a checkpoint and an update take; and three flags: this update is
        the last; a validation and a checkpoint follow it; these would leave no time for another update and the last ones."""
        now, budget, dataset = clock(), 60 * self.schedule.cfg.minutes, trainer.cfg.dataset
        validation, save = self.schedule.validation_seconds, self.schedule.save_seconds
        if self.update_started is not None:
            self.durations.appendleft(now - self.update_started - self.completion_seconds)
        self.update_started, self.completion_seconds = now, 0.0
        before, update = self.schedule.update_seconds, self.usual_duration()
        validation *= update / before if before and update else 1.0
        seconds = now - self.started
        longest = max(itertools.islice(self.durations, UPDATES_OF_DURATION), default=0.0)
        is_last = seconds + 2 * longest + validation + save > budget
        is_near_end = seconds + 2 * (longest + validation + save) > budget
        is_known = (save if dataset.disable_validation else validation) > 0
        may_validate = trainer.get_num_updates() + 1 >= dataset.validate_after_updates
        measures = not is_known and may_validate and seconds > FIRST_MEASURE * budget
        return [seconds, validation, save, update or before, is_last, measures, is_near_end]

    def usual_duration(self) -> float:
        """Return the median time of the last updates, of about as many as take the time of a validation; 0 for few updates."""
        until_each = itertools.accumulate(self.durations)
        number = 1 + sum(
            1 for _ in itertools.takewhile(lambda total: total < self.schedule.validation_seconds, until_each)
        )
        last = list(itertools.islice(self.durations, max(number, UPDATES_OF_DURATION)))
        return statistics.median(last) if len(last) >= UPDATES_OF_DURATION else 0.0

    def before_completion(self, cfg: Any, trainer: Any) -> Any:
        """Change the settings by which fairseq stops and saves after an update; it validates with both."""
        if self.schedule is None:
            return cfg
        self.completion_started = clock()
        if self.is_last:
            return OmegaConf.merge(cfg, {"optimization": {"max_update": trainer.get_num_updates()}})
        if self.measures:
            return OmegaConf.merge(cfg, {"checkpoint": {"save_interval_updates": trainer.get_num_updates()}})
        if self.is_near_end:
            never = 10**9  # epochs; no number of updates is 0
            in_checkpoint = {"save_interval_updates": 0, "save_interval": never}
            in_dataset = {"validate_interval_updates": 0, "validate_interval": never}
            return OmegaConf.merge(cfg, {"checkpoint": in_checkpoint, "dataset": in_dataset})
        return cfg

    def before_logging(self, save_dir: str, split: str, update: int, values: dict[str, Any]) -> None:
        if self.schedule is not None and split != "train":  # of several subsets, the last one counts
            self.schedule.validation_seconds = clock() - self.completion_started
            self.schedule.update_seconds = self.usual_duration()

    def may_save(self, trainer: Any) -> bool:
        self.save_started = clock()
        return True

    def after_save(self, trainer: Any) -> None:
        if self.schedule is not None and self.save_started is not None:  # None: another hook has refused the save
            self.schedule.save_seconds = clock() - self.save_started
        self.save_started = None

    def update_completed(self, cfg: Any, trainer: Any, epoch_itr: Any, is_last: bool) -> None:
        self.completion_seconds = clock() - self.completion_started
        if self.is_last and distributed_utils.get_global_rank() == 0:
            minutes = (clock() - self.started) / 60
            logger.info(
                f"{trainer.get_num_updates():,} updates in {minutes:.2f} of {self.schedule.cfg.minutes:g} minutes"
            )

    def before_save(self, trainer: Any, state: dict[str, Any]) -> None:
        if self.schedule is not None:
            state["optimizer_history"][-1]["lr_scheduler_state"]["seconds"] = clock() - self.started


def check(cfg: Any) -> None:
    """Refuse settings of the schedule that contradict each other."""
    schedule, optimization = cfg.lr_scheduler, cfg.optimization
    total, warmup = schedule.total_num_update, schedule.warmup_updates
    if not (schedule.minutes or optimization.max_epoch) and 0 < total <= warmup:
        logger.warning(
            f"the learning rate reaches {total / warmup:.2g} of its peak and never falls: the warm-up has {warmup} of "
            f"{total:g} updates; give a smaller lr_scheduler.warmup_updates (--warmup-updates)"
        )
    decays = bool(schedule.decay_share or schedule.decay_from)
    limits = [name for name in ("max_update", "max_epoch", "stop_time_hours") if optimization[name]]
    limits += [each for each in typed("optimization.max_update=") if each[-2:] != "=0"]
    checks = [
        (
            len(optimization.lr) != 1,
            f"optimization.lr (--lr) {list(optimization.lr)}: warmup_stable_decay has one peak, give one rate",
        ),
        (
            not (schedule.minutes or optimization.max_epoch) and total <= 0 and decays,
            "lr_scheduler.total_num_update (--total-num-update) is 0: give optimization.max_update (--max-update), max_epoch "
            "or lr_scheduler.minutes (--minutes)",
        ),
        (
            schedule.minutes and limits,
            f"lr_scheduler.minutes (--minutes) ends the run: set it to 0, or leave out {', '.join(limits)}",
        ),
        (
            schedule.minutes and 0 < warmup >= total,
            "with lr_scheduler.minutes (--minutes), the share of the warm-up is warmup_updates / total_num_update, here "
            f"{warmup} / {total:g}: give --total-num-update above --warmup-updates",
        ),
    ]
    for is_wrong, message in checks:
        if is_wrong:
            raise UserError(message)


class Phases(Hook):
    """The phases of a run (``task.phases``): which one is due, and the end of one within an epoch. There fairseq's iterator
    over the epoch ends, and the one that it asks the task for next is of the same epoch, and goes on in the blocks of the new
    phase."""

    def __init__(self) -> None:
        self.batches: Any = None  # fairseq's iterator over the updates of an epoch

    def before_launch(self, cfg: Any) -> None:
        if not OmegaConf.select(cfg, "task.phases"):
            return
        phases = read_phases(cfg.task.phases, cfg.task.tokens_per_sample, cfg.task.mask_prob)
        longest, model_length = cfg.task.tokens_per_sample, OmegaConf.select(cfg, "model.max_positions")
        updates = cfg.optimization.max_update
        starts = [
            round(share * updates) for share in itertools.accumulate([0, *(phase.share for phase in phases[:-1])])
        ]
        timed = OmegaConf.select(cfg, "lr_scheduler.minutes")
        checks = [
            (
                model_length is not None and model_length < longest,
                f"the last phase has blocks of {longest} tokens, and the model --max-positions {model_length}: give the model "
                "as many",
            ),
            (
                bool(cfg.optimization.max_epoch) or not (updates or timed),
                "they are shares of --max-update or --minutes: give one of these, and no --max-epoch",
            ),
            (
                updates and len({*starts, updates}) <= len(phases),
                f"a phase has no update of the {updates:,}: give it a larger share, or leave it out",
            ),
            (
                "train" in cfg.dataset.valid_subset.split(","),
                "the training text is cut as the phases go on, and cannot be validated on: leave train out of --valid-subset",
            ),
        ]
        for is_wrong, message in checks:
            if is_wrong:
                raise UserError(f"task.phases (--phases): {message}")

    def before_load(self, cfg: Any, trainer: Any) -> None:
        trainer.task.due_phase = lambda: due_phase(trainer)

    def before_bar(self, save_dir: str, batches: Any, settings: dict[str, Any]) -> None:
        self.batches = batches

    def update_completed(self, cfg: Any, trainer: Any, epoch_itr: Any, is_last: bool) -> None:
        """End the iterator after the last update of a phase. Its epoch goes on: fairseq finds that it has batches left."""
        if is_last or not getattr(trainer.task, "phases", None):
            return
        if epoch_itr.phase_after(epoch_itr.position) != epoch_itr.phase:
            self.batches.take(self.batches.n)
            stop_readers()


def due_phase(trainer: Any) -> int:
    """Return the phase of the next update: by the updates, or by the time at which the last one has begun on the first rank; in
    a branch that decays (``decay_from``) the last phase."""
    schedule, phases = schedule_of(trainer), trainer.task.phases
    if schedule is not None and (schedule.cfg.decay_from or schedule.decay_start is not None):
        return len(phases) - 1
    if schedule is not None and schedule.cfg.minutes:
        return phase_at(phases, schedule.seconds, 60 * schedule.cfg.minutes)
    return phase_at(phases, trainer.get_num_updates(), trainer.cfg.optimization.max_update)
