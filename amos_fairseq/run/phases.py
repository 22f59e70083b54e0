"""The phases of a run (``task.phases``): which one is due, and the end of one within an epoch.

fairseq takes its batches from an iterator over an epoch. Where another phase is due, that iterator ends, and fairseq asks the
task for the next one: it is of the same epoch, begins where the last one has stopped, and has the blocks of the new phase.
"""

from itertools import accumulate
from typing import Any

from omegaconf import OmegaConf

from amos_fairseq.compat.patching import stop_readers
from amos_fairseq.data.phases import phase_at, read_phases
from amos_fairseq.errors import UserError
from amos_fairseq.optim.warmup_stable_decay import schedule_of
from amos_fairseq.run.hook import Hook


class Phases(Hook):
    def __init__(self) -> None:
        self.batches: Any = None  # fairseq's iterator over the updates of an epoch

    def before_launch(self, cfg: Any) -> None:
        if not OmegaConf.select(cfg, "task.phases"):
            return
        phases = read_phases(cfg.task.phases, cfg.task.tokens_per_sample, cfg.task.mask_prob)
        longest, model_length = cfg.task.tokens_per_sample, OmegaConf.select(cfg, "model.max_positions")
        updates = cfg.optimization.max_update
        starts = [round(share * updates) for share in accumulate([0, *(phase.share for phase in phases[:-1])])]
        timed = OmegaConf.select(cfg, "lr_scheduler.minutes")
        checks = [
            (
                model_length is not None and model_length < longest,
                f"the last phase has blocks of {longest} tokens, and the model --max-positions {model_length}: give the model "
                "as many",
            ),
            (not updates and not timed, "they are shares of --max-update or --minutes: give one"),
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
    """Return the phase of the next update: by the updates, or by the time at which the last one has begun on the first rank.

    A branch that decays (``decay_from``) has the last phase throughout.
    """
    schedule, phases = schedule_of(trainer), trainer.task.phases
    if schedule is not None and (schedule.cfg.decay_from or schedule.decay_start is not None):
        return len(phases) - 1
    if schedule is not None and schedule.cfg.minutes:
        return phase_at(phases, schedule.seconds, 60 * schedule.cfg.minutes)
    return phase_at(phases, trainer.get_num_updates(), trainer.cfg.optimization.max_update)
