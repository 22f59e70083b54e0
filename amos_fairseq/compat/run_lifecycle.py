"""Starting again and continuing: what stock fairseq does in silence is done rightly or refused.

* A finished run started again trains one more update and writes its checkpoints anew. Here it changes nothing.
* A run continued where ``polynomial_decay`` has reached its end trains with learning rate 0.
* ``--restore-file`` with a path that does not exist starts from nothing; typed again (by a scheduler that requeues), it
  starts again from the old checkpoint and overwrites what the run has reached.
* A checkpoint of another vocabulary, scheme of relative positions or LayerNorm epsilon loads where its shapes happen to fit.
"""

import functools
import logging
import math
import os
import threading
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils
from fairseq.data import iterators
from fairseq.file_io import PathManager

from amos_fairseq.compat.safe_loading import read_header
from amos_fairseq.compat.train_script import wrap_when_training
from amos_fairseq.data.fingerprint import file_sha256
from amos_fairseq.errors import UserError
from amos_fairseq.ranks import raise_on_every_rank

logger = logging.getLogger(__name__)

DEFAULT_FILE = "checkpoint_last.pt"
FRESH_SCHEDULE = "--reset-optimizer --reset-lr-scheduler --reset-dataloader --reset-meters"
POSITION_SCHEME = ("relative_position_scheme", "relative_position_buckets", "relative_position_max_distance")
LAYER_NORM_EPS = "layer_norm_eps"  # 1e-12 in most imported models


def checkpoint_to_load(cfg: Any, suffix: str = "") -> str | None:
    """The file that ``checkpoint_utils.load_checkpoint`` is going to read, as it chooses it; None for none.

    Raises:
        UserError: the user named a file that does not exist, or one that would replace the run in SAVE_DIR.
    """
    own = os.path.join(cfg.save_dir, f"checkpoint_last{suffix}.pt")
    if cfg.restore_file != DEFAULT_FILE:
        path = cfg.restore_file.replace(".pt", suffix + ".pt")
        if not PathManager.isfile(path):
            raise UserError(
                f"--restore-file {path} does not exist: give the path of a checkpoint, or leave the flag out to resume "
                f"from {own}"
            )
        # A checkpoint of SAVE_DIR itself is a step back that was meant; one from elsewhere is the first start repeated.
        if PathManager.isfile(own) and os.path.realpath(os.path.dirname(path)) != os.path.realpath(cfg.save_dir):
            raise UserError(
                f"--restore-file {path} would start again and overwrite {own}: leave the flag and --reset-* out to resume "
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


def check_fits(path: str, task: Any, model_cfg: Any) -> None:
    """Raise :class:`UserError` unless the checkpoint has this task's vocabulary, and this model's relative positions and eps.

    Only what a checkpoint says about itself is compared: a stock fairseq checkpoint says nothing of either.
    """
    header = read_header(path)
    try:
        check_input_dictionary(header.get("task_state") or {}, task)
        task.load_state_dict(header.get("task_state") or {})
    except UserError as error:
        raise UserError(f"{path} does not fit: {error}") from error
    saved = (header.get("cfg") or {}).get("model")
    differences = []
    for name in scheme_settings(saved):
        here, there = getattr(model_cfg, name, None), saved[name]
        if here is not None and str(here) != str(there):
            differences.append(f"--{name.replace('_', '-')} {there}, not {here}")
    if differences:
        raise UserError(f"{path} was trained with {' and '.join(differences)}: give the checkpoint's values")


def check_input_dictionary(task_state: dict[str, Any], task: Any) -> None:
    """fairseq's ``sentence_prediction`` compares no vocabulary: token 17 would silently be another word.

    Raises:
        UserError: the dictionary of its inputs is not that of the checkpoint.
    """
    expected = task_state.get("dictionary_sha256")
    dictionary = os.path.join(str(getattr(task.cfg, "data", "")), "input0", "dict.txt")
    if expected is not None and os.path.isfile(dictionary) and file_sha256(dictionary) != expected:
        raise UserError(
            f"{dictionary} is not the dictionary that it was trained with (sha256 {expected[:12]}... expected): binarize "
            "the task with SAVE_DIR/tokenizer of that run"
        )


def scheme_settings(model_cfg: Any) -> tuple[str, ...]:
    """The settings of a checkpoint that its weights' shapes do not show: relative positions (without a scheme their sizes
    mean nothing), and the epsilon of its LayerNorms.
    """
    if not isinstance(model_cfg, dict) or POSITION_SCHEME[0] not in model_cfg:
        return ()
    scheme = POSITION_SCHEME[:1] if str(model_cfg[POSITION_SCHEME[0]]) == "none" else POSITION_SCHEME
    return (*scheme, LAYER_NORM_EPS) if LAYER_NORM_EPS in model_cfg else scheme


def refusal(trainer: Any, restore_file: str) -> str | None:
    """Why the run that was just loaded cannot go on usefully; None where it can, or has reached its end."""
    updates, optimization = trainer.get_num_updates(), trainer.cfg.optimization
    if updates == 0:
        return None  # the first update of a warm-up has learning rate 0 as well
    max_update = optimization.max_update or math.inf
    if updates >= max_update:
        if restore_file == DEFAULT_FILE:
            return None
        return (
            f"--restore-file {restore_file} stands at update {updates}, and --max-update {max_update} is reached: raise "
            f"--max-update to continue that run, or give {FRESH_SCHEDULE} to start a new schedule from its weights"
        )
    if trainer.get_lr() > 0:
        return None
    return (
        f"after update {updates} the learning rate is 0, because the schedule has come to its end: raise "
        f"--total-num-update (at least to --max-update) to continue it, or give --restore-file CHECKPOINT "
        f"{FRESH_SCHEDULE} to start a new schedule from these weights"
    )


def finished(trainer: Any, epoch_itr: Any) -> str | None:
    """What says that the run is at its end; None while it is not."""
    updates, optimization = trainer.get_num_updates(), trainer.cfg.optimization
    if optimization.max_update and updates >= optimization.max_update:
        return f"{updates} updates of --max-update {optimization.max_update}"
    if optimization.max_epoch and epoch_itr.next_epoch_idx > optimization.max_epoch:
        return f"{epoch_itr.next_epoch_idx - 1} epochs of --max-epoch {optimization.max_epoch}"
    return None


def _skip_if_finished(train: Callable[..., Any]) -> Callable[..., Any]:
    """``train`` is called once an epoch; stock fairseq asks for --max-update only after the next update."""

    @functools.wraps(train)
    def train_unless_finished(cfg: Any, trainer: Any, task: Any, epoch_itr: Any) -> tuple[list[None], bool]:
        if finished(trainer, epoch_itr):
            wait_for_readers()
            return [None], True
        return train(cfg, trainer, task, epoch_itr)

    return train_unless_finished


def wait_for_readers() -> None:
    """Join fairseq's threads that read ahead, which have reached the end of the validation data.

    A finished run goes to its end at once, and a thread that is then still closing its loader processes, in C++ code, makes
    the interpreter abort (one start in twelve).
    """
    for thread in threading.enumerate():
        if isinstance(thread, iterators.BackgroundConsumer):
            thread.join(timeout=60)


def _problem_with(cfg: Any, trainer: Any) -> str | None:
    try:
        path = checkpoint_to_load(cfg, trainer.checkpoint_suffix)
        if path is not None:
            check_fits(path, trainer.task, trainer.cfg.model)
    except UserError as error:
        return str(error)
    return None


def apply() -> None:
    """Look at a checkpoint before and after it is loaded, and at the end of the run before each epoch."""
    load_checkpoint = checkpoint_utils.load_checkpoint

    @functools.wraps(load_checkpoint)
    def load_checked_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        is_reader = trainer.should_save_checkpoint_on_current_rank
        raise_on_every_rank(_problem_with(cfg, trainer) if is_reader else None)
        extra_state, epoch_itr = load_checkpoint(cfg, trainer, **kwargs)
        raise_on_every_rank(None if finished_here(cfg, trainer, epoch_itr) else refusal(trainer, cfg.restore_file))
        return extra_state, epoch_itr

    checkpoint_utils.load_checkpoint = load_checked_checkpoint
    wrap_when_training("train", _skip_if_finished)


def finished_here(cfg: Any, trainer: Any, epoch_itr: Any) -> bool:
    """Whether this SAVE_DIR's own run is at its end; says so in the log."""
    end = finished(trainer, epoch_itr) if cfg.restore_file == DEFAULT_FILE else None
    if end:
        logger.info(f"nothing to do: the run in {cfg.save_dir} is finished ({end}); raise the limit to train on")
    return end is not None
