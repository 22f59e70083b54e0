"""SAVE_DIR belongs to one run at a time; which checkpoint a run continues from, and whether it can.

Stock fairseq makes these mistakes without a message; here they are prevented:

* A run that has reached its limit (updates, epochs, ``--minutes``, ``--stop-time-hours``) and is started again trains one more
  update and rewrites its checkpoints. Here nothing changes.
* A run continued where its schedule has reached its end trains with learning rate 0.
* ``--restore-file`` with a path that does not exist starts from scratch. Repeated (by a scheduler that requeues), it starts
  again from the old checkpoint and overwrites the run's progress.
* A checkpoint with another vocabulary, relative position scheme, LayerNorm epsilon, window or rotary angle loads if its shapes
  happen to match.
"""

import functools
import logging
import math
import os
from pathlib import Path
from typing import Any

from fairseq.file_io import PathManager
from filelock import FileLock
from omegaconf import OmegaConf

from amos_fairseq.checkpoint_files import HEADS, num_updates_of, read_header, settings_in, task_state_of
from amos_fairseq.compat.checkpoints import repair_last_checkpoint
from amos_fairseq.compat.distribution import from_first_rank, raise_on_every_rank
from amos_fairseq.compat.patching import running_scripts
from amos_fairseq.errors import UserError, save_dir_not_writable
from amos_fairseq.files import file_sha256, take_lock
from amos_fairseq.optim.warmup_stable_decay import schedule_of
from amos_fairseq.run.hook import Hook

logger = logging.getLogger(__name__)

DEFAULT_FILE = "checkpoint_last.pt"
NEW_SCHEDULE = "--reset-optimizer --reset-lr-scheduler --reset-dataloader --reset-meters"
POSITION_SCHEME = ("relative_position_scheme", "relative_position_buckets", "relative_position_max_distance")
# Windows and rotary angles of ModernBERT, and the epsilon of LayerNorms, which is 1e-12 in most imported models.
OTHERS = ("global_attention_every", "local_attention", "global_rope_theta", "local_rope_theta", "layer_norm_eps")

_locks: dict[str, FileLock] = {}  # held until this process ends


class Resume(Hook):
    """Lock SAVE_DIR, repair and check its checkpoint before it is loaded; afterwards, refuse a run that cannot continue."""

    def __init__(self) -> None:
        self.begins_branch = False

    def before_trainer(self, cfg: Any) -> None:
        if running_scripts():  # a program that has a trainer without fairseq's script continues no run
            from_first_rank(functools.partial(claim_and_repair, cfg.checkpoint))
            decay_from = OmegaConf.select(cfg, "lr_scheduler.decay_from")
            self.begins_branch = from_first_rank(lambda: bool(decay_from) and begins_branch(cfg.checkpoint, decay_from))
            if self.begins_branch:
                cfg.checkpoint.restore_file, cfg.checkpoint.finetune_from_model = decay_from, None

    def before_load(self, cfg: Any, trainer: Any) -> None:
        def check() -> bool:
            if (path := checkpoint_to_load(cfg)) is None:
                return False
            starts_anew = path == cfg.finetune_from_model
            check_optimizer(path, cfg)
            check_fits(path, trainer.task, trainer.cfg.model, starts_anew)
            return starts_anew

        # The moments of the optimizer belong to the positions of the checkpoint.
        trainer.get_model().may_be_longer = from_first_rank(check)

    def after_load(self, cfg: Any, trainer: Any, epoch_itr: Any, extra_state: Any) -> None:
        if trainer.get_num_updates() == 0:
            trainer._previous_training_time = 0.0  # fairseq would go on with that of the checkpoint it starts from
        # fairseq has told the model the updates of the checkpoint, also where a new schedule begins with its weights.
        trainer.get_model().set_num_updates(trainer.get_num_updates())
        if self.begins_branch:
            schedule_of(trainer).begin_branch(trainer.get_num_updates())
            trainer.lr_step_update()
        limit = finished(trainer, epoch_itr)
        if limit and cfg.restore_file == DEFAULT_FILE:
            logger.info(f"nothing to do: the run in {cfg.save_dir} is finished ({limit}); raise the limit to train on")
            return
        beyond = f"{cfg.restore_file} has reached its limit ({limit}): raise it to train on" if limit else None
        raise_on_every_rank(refusal(trainer, cfg.restore_file) or beyond)

    def may_train(self, trainer: Any, epoch_itr: Any) -> bool:
        """Check the limits before each epoch. Stock fairseq compares --max-update only after the next update."""
        return finished(trainer, epoch_itr) is None

    def before_save(self, trainer: Any, state: dict[str, Any]) -> None:
        """Drop the optimizers of earlier parts of the run: nothing reads them, and each resume adds one."""
        state["optimizer_history"] = state["optimizer_history"][-1:]


def claim_and_repair(cfg: Any) -> None:
    """Lock SAVE_DIR, then repair ``checkpoint_last.pt``. ``cfg``: the section ``checkpoint``."""
    claim_save_dir(cfg.save_dir)
    if cfg.restore_file == DEFAULT_FILE:
        repair_last_checkpoint(cfg.save_dir, cfg.checkpoint_suffix, not cfg.no_last_checkpoints)


def claim_save_dir(save_dir: str) -> None:
    """Create SAVE_DIR and lock it until this process ends. It may have several runs in it, one after the other."""
    path = os.path.join(os.path.abspath(save_dir), ".lock")
    if path in _locks:
        return
    try:
        os.makedirs(save_dir, exist_ok=True)
        advice = "wait for it, stop it, or give another --save-dir"
        _locks[path] = take_lock(path, f"{save_dir} is in use by another run", advice)
    except OSError as error:
        raise save_dir_not_writable(save_dir, error) from error


def begins_branch(cfg: Any, decay_from: str) -> bool:
    """Return whether a branch begins from ``decay_from``; False if it has begun and continues from its own checkpoint."""
    last = os.path.join(cfg.save_dir, f"checkpoint_last{cfg.checkpoint_suffix}.pt")
    has_begun, problem = PathManager.isfile(last), None
    if cfg.restore_file != DEFAULT_FILE:
        problem = "--restore-file and lr_scheduler.decay_from (--decay-from) exclude each other: leave out the former"
    elif has_begun:
        start, schedule = schedule_state(last).get("decay_start"), settings_in(read_header(last), "lr_scheduler")
        # The file may have been deleted since, or be the last checkpoint of a run that goes on.
        is_other = schedule and schedule.get("decay_from") != decay_from and PathManager.isfile(decay_from)
        if start is None or (is_other and start != num_updates_of(decay_from, read_header(decay_from))):
            problem = f"{last} is of another run, not of the decay from {decay_from}: give another checkpoint.save_dir"
    elif not abs(share_of_peak(decay_from) - 1) <= 1e-6:  # also where it is not known (nan)
        problem = (
            f"{decay_from}: a decay begins in the constant part of a run, but the rate is {share_of_peak(decay_from):.3g} of "
            "its peak there: give a checkpoint between warm-up and decay of a run with lr_scheduler.decay_share=0, or with "
            "another one below 1"
        )
    if problem:
        raise UserError(problem)
    return not has_begun


def share_of_peak(path: str) -> float:
    """Return the learning rate of a checkpoint as a share of its peak; nan if it is not known."""
    share = schedule_state(path).get("share_of_peak")
    return share if isinstance(share, float) else math.nan


def schedule_state(path: str) -> dict[str, Any]:
    """Return the state of the learning rate's schedule in a checkpoint; empty if there is none."""
    history = read_header(path).get("optimizer_history")
    state = history[-1].get("lr_scheduler_state") if isinstance(history, list) and history else None
    return state if isinstance(state, dict) else {}


def checkpoint_to_load(cfg: Any) -> str | None:
    """Return the file that ``checkpoint_utils.load_checkpoint`` is going to load, which may be missing, or None."""
    last = os.path.join(cfg.save_dir, f"checkpoint_last{cfg.checkpoint_suffix}.pt")
    if cfg.restore_file == DEFAULT_FILE:
        return last if PathManager.isfile(last) else cfg.finetune_from_model
    path = cfg.restore_file.replace(".pt", cfg.checkpoint_suffix + ".pt")
    # A checkpoint in SAVE_DIR is an intended step back, once; one from elsewhere repeats the first start.
    is_elsewhere = os.path.realpath(os.path.dirname(path)) != os.path.realpath(cfg.save_dir)
    is_last = os.path.realpath(path) == os.path.realpath(last)
    if PathManager.isfile(last) and not is_last and (is_elsewhere or restored_from(last) == cfg.restore_file):
        raise UserError(
            f"--restore-file {path} would start again and overwrite {last}: remove the flag and --reset-* to resume "
            "that run, or give another --save-dir; --finetune-from-model starts from a checkpoint once and resumes later"
        )
    return path


def restored_from(path: str) -> Any:
    """Return the ``--restore-file`` of the run that wrote a checkpoint; None for a damaged one, which is repaired later."""
    try:
        return settings_in(read_header(path), "checkpoint").get("restore_file")
    except UserError:
        return None


def refusal(trainer: Any, restore_file: str) -> str | None:
    """Return why the run that was just loaded cannot usefully continue; None if it can, or is finished."""
    updates, optimization = trainer.get_num_updates(), trainer.cfg.optimization
    if updates == 0:
        return None  # the first update of a warm-up has learning rate 0 as well
    if new := getattr(trainer.get_model(), "newly_initialized", ()):
        return (
            f"the checkpoint of update {updates} lacks weights of this run, such as {new[0]} ({len(new)} in all), and its "
            "optimizer belongs to other ones: keep the settings of the task, such as --views, or start with "
            "--finetune-from-model"
        )
    max_update = optimization.max_update or math.inf
    if updates >= max_update:
        if restore_file == DEFAULT_FILE:
            return None
        return (
            f"{restore_file} is at update {updates}, and --max-update {max_update} is reached: raise --max-update, also for a "
            f"branch that decays from it, or give {NEW_SCHEDULE} to start a new schedule from its weights"
        )
    schedule = schedule_of(trainer)
    has_no_time = schedule is not None and schedule.cfg.minutes and not schedule.seconds
    if has_no_time and schedule.decay_start != updates and not trainer.cfg.checkpoint.reset_lr_scheduler:
        return (
            f"the {updates} updates of the checkpoint had no budget of time, and --minutes (lr_scheduler.minutes) would begin "
            "the schedule again: leave it out, or give another --save-dir, to start from these weights "
            "(--finetune-from-model) or to decay from a constant part (--decay-from)"
        )
    if trainer.get_lr() > 0 or (schedule is not None and schedule.cfg.minutes):
        return None
    return (
        f"after update {updates} the learning rate is 0, because the schedule has ended: raise "
        f"--total-num-update (at least to --max-update) to continue it, or give --restore-file CHECKPOINT "
        f"{NEW_SCHEDULE} to start a new schedule from these weights"
    )


def finished(trainer: Any, epoch_itr: Any) -> str | None:
    """Return which limit the run has reached; None if it has reached none."""
    updates, optimization = trainer.get_num_updates(), trainer.cfg.optimization
    if optimization.max_update and updates >= optimization.max_update:
        return f"{updates} updates of --max-update {optimization.max_update}"
    if getattr(schedule_of(trainer), "has_ended", False):
        return f"{updates} updates in --minutes {trainer.cfg.lr_scheduler.minutes:g}"
    if 0 < 3600 * optimization.stop_time_hours < trainer._previous_training_time:
        return f"{updates} updates in --stop-time-hours {optimization.stop_time_hours:g}"
    if optimization.max_epoch and epoch_itr.next_epoch_idx > optimization.max_epoch:
        return f"{epoch_itr.next_epoch_idx - 1} epochs of --max-epoch {optimization.max_epoch}"
    return None


def check_optimizer(path: str, cfg: Any) -> None:
    """Refuse weights alone where a run would continue its schedule. ``cfg``: the section ``checkpoint``."""
    header = read_header(path)
    if path == cfg.finetune_from_model or cfg.reset_optimizer or num_updates_of(path, header) == 0:
        return
    if header.get("last_optimizer_state") is None:
        raise UserError(
            f"{path} has no optimizer state, so the run would start its schedule again: give it as --finetune-from-model "
            "with another --save-dir, or as --restore-file with --reset-optimizer --reset-lr-scheduler"
        )


def check_fits(path: str, task: Any, model_cfg: Any, starts_anew: bool = False) -> None:
    """Check that a checkpoint has this task's vocabulary, and this model's relative positions and LayerNorm epsilon, and, if
    the run continues, its frozen generator and the labels of its heads. A checkpoint of stock fairseq records none of them."""
    header = read_header(path)
    try:
        saved_state = task_state_of(path, header)
        heads = saved_state.pop(HEADS, {})
        task.load_state_dict(saved_state)
    except UserError as error:
        raise UserError(f"{path} does not fit: {error}") from error
    problems = [] if starts_anew else changed_parts(saved_state, heads, task.state_dict())
    problems += other_input_dictionary(saved_state, task)
    saved = settings_in(header, "model")
    # Without relative positions their sizes mean nothing. A model outside of this package has no such settings.
    scheme = POSITION_SCHEME[:1] if str(saved.get(POSITION_SCHEME[0])) == "none" else POSITION_SCHEME
    for name in (*scheme, *OTHERS) if POSITION_SCHEME[0] in saved else ():
        here = getattr(model_cfg, name, None)
        there = saved.get(name, here)
        if here is not None and str(here) != str(there):
            problems.append(f"it was trained with --{name.replace('_', '-')} {there}, not {here}: give this value")
    if problems:
        raise UserError(f"{path} does not fit: {'; '.join(problems)}")


def changed_parts(saved: dict[str, Any], heads: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return what a run cannot change when it continues: another frozen generator, other labels of a head."""
    problems = []
    if saved.get("generator_sha256") != here.get("generator_sha256"):
        there, now = ((state.get("generator_sha256") or "none")[:12] for state in (saved, here))
        problems.append(f"its --generator-checkpoint has other weights (sha256 {there}, here {now}): give that file")
    for name, head in here.get(HEADS, {}).items():
        there = heads.get(name, head)
        if (there["kind"], there["labels"]) != (head["kind"], head["labels"]):
            problems.append(f"it was trained with other labels of {name}: give its data")
    return [f"{problem}, or begin with --finetune-from-model" for problem in problems]


def other_input_dictionary(task_state: dict[str, Any], task: Any) -> list[str]:
    """Compare the dictionary of fairseq's ``sentence_prediction``, which compares none: token 17 could be another word."""
    expected = task_state.get("dictionary_sha256")
    dictionary = Path(str(getattr(task.cfg, "data", "")), "input0", "dict.txt")
    if expected is None or not dictionary.is_file() or file_sha256(dictionary) == expected:
        return []
    return [
        f"{dictionary} is not the dictionary that it was trained with: binarize the task with SAVE_DIR/tokenizer of that run"
    ]
