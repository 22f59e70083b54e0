"""Which checkpoint a run continues from, and whether it can: refuse what stock fairseq silently does wrong.

* A finished run that is started again trains one more update and rewrites its checkpoints. Here nothing changes.
* A run continued where ``polynomial_decay`` has reached its end trains with learning rate 0.
* ``--restore-file`` with a path that does not exist starts from scratch. Repeated (by a scheduler that requeues), it starts
  again from the old checkpoint and overwrites the run's progress.
"""

import logging
import math
import os
from typing import Any

from fairseq.file_io import PathManager

from amos_fairseq.checkpoint_files import read_header
from amos_fairseq.compat.collectives import raise_on_every_rank
from amos_fairseq.errors import UserError
from amos_fairseq.run.checkpoint_checks import check_fits, check_parts

logger = logging.getLogger(__name__)

DEFAULT_FILE = "checkpoint_last.pt"
NEW_SCHEDULE = "--reset-optimizer --reset-lr-scheduler --reset-dataloader --reset-meters"


def check_checkpoint(cfg: Any, trainer: Any) -> None:
    """Refuse a checkpoint that does not fit, before it is loaded."""
    problem = None
    if trainer.should_save_checkpoint_on_current_rank:
        try:
            path = checkpoint_to_load(cfg, trainer.checkpoint_suffix)
            if path is not None:
                check_parts(path, read_header(path), cfg)
                check_fits(path, trainer.task, trainer.cfg.model)
        except UserError as error:
            problem = str(error)
    raise_on_every_rank(problem)


def check_run(cfg: Any, trainer: Any, epoch_itr: Any, extra_state: Any) -> None:
    """Refuse a loaded run that cannot continue, and say so of one that is finished."""
    limit = finished(trainer, epoch_itr) if cfg.restore_file == DEFAULT_FILE else None
    if limit:
        logger.info(f"nothing to do: the run in {cfg.save_dir} is finished ({limit}); raise the limit to train on")
    raise_on_every_rank(None if limit else refusal(trainer, cfg.restore_file))


def checkpoint_to_load(cfg: Any, suffix: str = "") -> str | None:
    """Return the file that ``checkpoint_utils.load_checkpoint`` is going to load, or None.

    Raises:
        UserError: the user named a file that does not exist, or one that would overwrite the run in SAVE_DIR.
    """
    own = os.path.join(cfg.save_dir, f"checkpoint_last{suffix}.pt")
    if cfg.restore_file != DEFAULT_FILE:
        path = cfg.restore_file.replace(".pt", suffix + ".pt")
        if not PathManager.isfile(path):
            raise UserError(
                f"--restore-file {path} does not exist: give the path of a checkpoint, or remove the flag to resume "
                f"from {own}"
            )
        # A checkpoint in SAVE_DIR is an intended step back; one from elsewhere repeats the first start.
        if PathManager.isfile(own) and os.path.realpath(os.path.dirname(path)) != os.path.realpath(cfg.save_dir):
            raise UserError(
                f"--restore-file {path} would start again and overwrite {own}: remove the flag and --reset-* to resume "
                "that run, or give another --save-dir; --finetune-from-model starts from a checkpoint once and resumes later"
            )
        return path
    if PathManager.isfile(own):
        return own
    if cfg.finetune_from_model is not None and not PathManager.isfile(cfg.finetune_from_model):
        raise UserError(
            f"--finetune-from-model {cfg.finetune_from_model} does not exist: give the path of a checkpoint"
        )
    return cfg.finetune_from_model


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
            f"--restore-file {restore_file} is at update {updates}, and --max-update {max_update} is reached: raise "
            f"--max-update to continue that run, or give {NEW_SCHEDULE} to start a new schedule from its weights"
        )
    if trainer.get_lr() > 0:
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
    if optimization.max_epoch and epoch_itr.next_epoch_idx > optimization.max_epoch:
        return f"{epoch_itr.next_epoch_idx - 1} epochs of --max-epoch {optimization.max_epoch}"
    return None


def is_unfinished(trainer: Any, epoch_itr: Any) -> bool:
    """Check the limits before each epoch. Stock fairseq compares --max-update only after the next update."""
    return finished(trainer, epoch_itr) is None
