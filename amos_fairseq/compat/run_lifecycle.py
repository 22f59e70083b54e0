"""Start, continue and finish a run: handle or refuse the cases in which stock fairseq silently does the wrong thing.

* Two runs with one SAVE_DIR replace each other's checkpoints. Here the second one is refused.
* A finished run that is started again trains one more update and rewrites its checkpoints. Here nothing changes.
* A run continued where ``polynomial_decay`` has reached its end trains with learning rate 0.
* ``--restore-file`` with a path that does not exist starts from scratch. Repeated (by a scheduler that requeues), it starts
  again from the old checkpoint and overwrites the run's progress.
* A checkpoint with another vocabulary, relative position scheme or LayerNorm epsilon loads if its shapes happen to match.
* The score of a validation may be a numpy scalar, which makes checkpoints unloadable, or nan, which is not comparable.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from fairseq.data import iterators
from fairseq.file_io import PathManager
from fairseq.logging import meters

from amos_fairseq.checkpoint_files import read_header, task_state_of, training_seconds_of
from amos_fairseq.collectives import on_first_rank, raise_on_every_rank
from amos_fairseq.errors import UserError
from amos_fairseq.files import no_links
from amos_fairseq.strangers import field, finite_number, whole_number

logger = logging.getLogger(__name__)

DEFAULT_FILE = "checkpoint_last.pt"
LOCK_FILE = ".lock"
# A full disk cuts it, and a power failure leaves bytes of 0.
_LOCK_CONTENT = re.compile(rb"\0*|process \d+[^\n\0]*\n?")
NEW_SCHEDULE = "--reset-optimizer --reset-lr-scheduler --reset-dataloader --reset-meters"
POSITION_SCHEME = ("relative_position_scheme", "relative_position_buckets", "relative_position_max_distance")
LAYER_NORM_EPS = "layer_norm_eps"  # 1e-12 in most imported models


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


def check_fits(path: str, task: Any, model_cfg: Any) -> None:
    """Check that a checkpoint has this task's vocabulary, and this model's relative positions and LayerNorm epsilon.

    Only what the checkpoint records is compared; a stock fairseq checkpoint records neither.

    Raises:
        UserError: the checkpoint does not fit.
    """
    header = read_header(path)
    try:
        check_input_dictionary(task_state_of(path, header), task)
        task.load_state_dict(task_state_of(path, header))
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


_locks: dict[str, BinaryIO] = {}


def claim_save_dir(save_dir: str) -> None:
    """Create SAVE_DIR and lock it until this process ends, so that two runs do not replace each other's checkpoints.

    The lock is a POSIX lock on ``SAVE_DIR/.lock``: the kernel releases it when the process dies, loader processes do not
    inherit it, and NFS servers support it. It is advisory, and without effect where a file system has no locks.

    Raises:
        UserError: another process holds it, the directory cannot be written, or the file is not one that this function wrote.
    """
    path = os.path.join(os.path.abspath(save_dir), LOCK_FILE)
    try:
        os.makedirs(save_dir, exist_ok=True)
        if path in _locks:  # another run in this process
            return
        file = open(path, "a+b", buffering=0, opener=no_links)  # noqa: SIM115 - closing it would release the lock
        file.seek(0)
        content = file.read(1000)
    except OSError as error:
        raise not_writable(save_dir, error) from error
    if not _LOCK_CONTENT.fullmatch(content):  # it may be a hard link, and is truncated below
        file.close()
        raise UserError(f"{path} has content that no run wrote: move it away to continue, or give another --save-dir")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = content.decode(errors="replace").strip() or "of unknown name"
        file.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning("%s cannot be locked (%s): do not start a second run there", save_dir, error.strerror)
            return
        raise UserError(
            f"{save_dir} is in use by another run ({holder}): wait for it, stop it, or give another --save-dir"
        ) from error
    _locks[path] = file
    with contextlib.suppress(OSError):  # a full disk: only the name of the holder is missing
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def not_writable(save_dir: str, error: OSError) -> UserError:
    """Return the error for a folder that cannot be created or written."""
    if isinstance(error, FileExistsError):
        found = "is a link to a folder that does not exist" if os.path.islink(save_dir) else "is a file"
        return UserError(f"{save_dir} {found}: mount or remove it, or give another --save-dir (checkpoint.save_dir)")
    return UserError(
        f"{save_dir} cannot be written ({error.strerror}): make room, permit writing, or give another --save-dir "
        "(checkpoint.save_dir)"
    )


def claim_before_load(load_checkpoint: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Lock SAVE_DIR before anything in it is read or repaired."""
    on_first_rank(functools.partial(claim_save_dir, cfg.save_dir))
    return load_checkpoint(cfg, trainer, **kwargs)


def leave_to_claim(verify_checkpoint_directory: Callable[..., Any], save_dir: str) -> None:
    """Replace fairseq's test, which raises OSError on the first rank only: :func:`claim_save_dir` tests the directory."""


def check_content(path: str, header: dict[str, Any], cfg: Any) -> None:
    """Check the parts of a checkpoint that training reads.

    Args:
        cfg: ``checkpoint`` of the configuration; with ``--finetune-from-model`` and ``--reset-*`` fewer parts are read.

    Raises:
        UserError: a part is missing or has another type.
    """
    starts_anew = path == cfg.finetune_from_model
    if not all(torch.is_tensor(tensor) for tensor in _part(header, "model", dict, path).values()):
        raise UserError(f"{path} contains other things than tensors as weights: give another checkpoint")
    extra = _part(header, "extra_state", dict, path)
    history = [part for part in _part(header, "optimizer_history", list, path) if isinstance(part, dict)]
    try:
        whole_number(history[-1].get("num_updates") if history else None)
    except ValueError as error:
        raise UserError(
            f"{path} does not say after how many updates it was saved (num_updates: {error}): give another checkpoint"
        ) from error
    if not (starts_anew or cfg.reset_optimizer):
        optimizer = header.get("last_optimizer_state")
        if optimizer is None and history[-1]["num_updates"] > 0:
            raise UserError(
                f"{path} has no optimizer state, so the run would start its schedule again: give it as --finetune-from-model "
                "with another --save-dir, or as --restore-file with --reset-optimizer --reset-lr-scheduler"
            )
        try:
            if optimizer is not None:
                _check_optimizer(optimizer)
        except ValueError as error:
            raise UserError(f"{path} contains a damaged optimizer state ({error}): give another checkpoint") from error
        for name, kind in (("criterion_name", str), ("optimizer_name", str), ("lr_scheduler_state", dict)):
            _part(history[-1], name, kind, path)
        try:
            _check_score(history[-1]["lr_scheduler_state"].get("best"))
        except ValueError as error:
            raise UserError(f"{path} has a damaged lr_scheduler_state ({error}): give another checkpoint") from error
    position = _part(extra, "train_iterator", dict, path)
    try:
        if "previous_training_time" in extra:
            _named("previous_training_time", training_seconds_of, header)
        if not (starts_anew or cfg.reset_meters):
            _check_score(extra.get("best"))
            for name, saved in field({"metrics": {}} | extra, "metrics", dict).items():
                _named(f"metrics.{name:.100}" if isinstance(name, str) else "metrics", _check_meters, saved)
    except ValueError as error:
        raise UserError(f"{path} has a damaged extra_state ({error}): give another checkpoint") from error
    # fairseq reads these two in any case.
    numbers = {"epoch": position.get("epoch"), "version": position.get("version", 1)}
    if not (starts_anew or cfg.reset_dataloader):
        numbers["iterations_in_epoch"] = position.get("iterations_in_epoch")
        numbers |= {name: value for name, value in position.items() if name.startswith("blocks_")}
    for name, number in numbers.items():
        try:
            whole_number(number, low=int(name == "epoch"))
        except ValueError as error:
            raise UserError(
                f"{path} has no valid position in the data (train_iterator.{name}: {error}): give another checkpoint"
            ) from error


def _named(name: str, check: Callable[..., Any], *arguments: Any) -> None:
    """Call ``check``; put the name of what it checks before the reason of its ``ValueError``."""
    try:
        check(*arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_optimizer(saved: Any) -> None:
    """Raise ``ValueError`` unless this is the state of an optimizer of torch, or of several in fairseq's ``composite``."""
    parts = saved.values() if isinstance(saved, dict) else ()
    composed = [part for part in parts if isinstance(part, dict) and "param_groups" in part]
    for part in composed or [saved]:
        for index, state in field(part, "state", dict).items():
            if not isinstance(state, dict):
                raise ValueError(f"state[{index!r:.100}] is not an object")
        for group in field(part, "param_groups", list):
            field(group, "params", list)
            if isinstance(group.get("lr"), (str, int, float)):  # some optimizers have a tensor or None
                _named("lr", finite_number, group["lr"])


def _check_score(score: Any) -> None:
    if score is not None and type(score) not in (int, float):  # it may be infinite
        raise ValueError("best is not a number")


def _check_meters(saved: Any) -> None:
    """Raise ``ValueError`` unless fairseq can load these meters and read their values."""
    if not isinstance(saved, (list, tuple)):
        raise ValueError("these are no meters")
    try:
        for _, _, kind, state in saved:  # fairseq calls what has this name in its module
            if not issubclass(getattr(meters, kind), meters.Meter):
                raise TypeError(kind)
            for value in state.values():
                if not (value is None or isinstance(value, (int, float)) or torch.is_tensor(value)):
                    raise TypeError(kind)
        loaded = meters.MetersDict()
        loaded.load_state_dict(saved)
        loaded.get_smoothed_values()
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError, ArithmeticError, RuntimeError) as error:
        raise ValueError("these are no meters") from error


def _part(content: dict[str, Any], name: str, kind: type, path: str) -> Any:
    """Return a part of a checkpoint; raise :class:`UserError` unless it has this type."""
    if not isinstance(content.get(name), kind):
        raise UserError(f"{path} is not a checkpoint of fairseq-train: {name} is missing in it, or damaged")
    return content[name]


def check_input_dictionary(task_state: dict[str, Any], task: Any) -> None:
    """Check the dictionary of fairseq's ``sentence_prediction``, which compares none: token 17 could be another word.

    Raises:
        UserError: the dictionary of the inputs is not that of the checkpoint.
    """
    expected = task_state.get("dictionary_sha256")
    dictionary = Path(str(getattr(task.cfg, "data", "")), "input0", "dict.txt")
    if expected is None or not dictionary.is_file():
        return
    if hashlib.sha256(dictionary.read_bytes()).hexdigest() != expected:
        raise UserError(
            f"{dictionary} is not the dictionary that it was trained with (sha256 {expected[:12]}... expected): binarize "
            "the task with SAVE_DIR/tokenizer of that run"
        )


def check_labeled_texts(load_dataset: Callable[..., Any], task: Any, split: str, *args: Any, **kwargs: Any) -> Any:
    """Check the files of a split of fairseq's ``sentence_prediction`` before they are opened."""
    from amos_fairseq.data.labeled_texts import check_texts  # it imports what the patches must precede

    check_texts(Path(str(task.cfg.data)), split)
    return load_dataset(task, split, *args, **kwargs)


def scheme_settings(model_cfg: Any) -> tuple[str, ...]:
    """Return the names of a checkpoint's settings that do not affect the shapes of its weights.

    They describe relative positions (only the scheme if it is ``none``, which makes the sizes irrelevant), and the epsilon
    of the LayerNorms.
    """
    if not isinstance(model_cfg, dict) or POSITION_SCHEME[0] not in model_cfg:
        return ()
    scheme = POSITION_SCHEME[:1] if str(model_cfg[POSITION_SCHEME[0]]) == "none" else POSITION_SCHEME
    return (*scheme, LAYER_NORM_EPS) if LAYER_NORM_EPS in model_cfg else scheme


def refusal(trainer: Any, restore_file: str) -> str | None:
    """Return why the run that was just loaded cannot usefully continue; None if it can, or is finished."""
    updates, optimization = trainer.get_num_updates(), trainer.cfg.optimization
    if updates == 0:
        return None  # the first update of a warm-up has learning rate 0 as well
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


def check_before_and_after_load(load_checkpoint: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """Refuse a checkpoint that does not fit before it is loaded, and a run that cannot continue afterwards."""
    problem = None
    if trainer.should_save_checkpoint_on_current_rank:
        try:
            path = checkpoint_to_load(cfg, trainer.checkpoint_suffix)
            if path is not None:
                check_content(path, read_header(path), cfg)
                check_fits(path, trainer.task, trainer.cfg.model)
        except UserError as error:
            problem = str(error)
    raise_on_every_rank(problem)
    extra_state, epoch_itr = load_checkpoint(cfg, trainer, **kwargs)
    limit = finished(trainer, epoch_itr) if cfg.restore_file == DEFAULT_FILE else None
    if limit:
        logger.info(f"nothing to do: the run in {cfg.save_dir} is finished ({limit}); raise the limit to train on")
    raise_on_every_rank(None if limit else refusal(trainer, cfg.restore_file))
    return extra_state, epoch_itr


def skip_if_finished(
    train: Callable[..., Any], cfg: Any, trainer: Any, task: Any, epoch_itr: Any
) -> tuple[list[None], bool]:
    """Check the limits before each epoch. Stock fairseq compares --max-update only after the next update."""
    if finished(trainer, epoch_itr):
        return [None], True
    return train(cfg, trainer, task, epoch_itr)


def keep_last_history(state_dict: Callable[..., Any], trainer: Any) -> dict[str, Any]:
    """Drop the optimizers of earlier parts of the run from a checkpoint: nothing reads them, and each resume adds one."""
    state = state_dict(trainer)
    return {**state, "optimizer_history": state["optimizer_history"][-1:]}


def stop_readers() -> None:
    """End fairseq's prefetching threads before the process ends.

    They are daemons: where one is in C++ code when the interpreter ends, as while it reads its first batches or closes its
    loader processes, the process aborts with SIGABRT instead of its exit code (one start in twelve of a finished run).
    """
    readers = [thread for thread in threading.enumerate() if isinstance(thread, iterators.BackgroundConsumer)]
    for reader in readers:
        reader._max_len = 0  # the next item is the last one
        with reader._queue.mutex:  # which the reader may be waiting for space in
            reader._queue.maxsize = sys.maxsize
            reader._queue.not_full.notify_all()
    for reader in readers:
        reader.join(timeout=60)


def return_comparable_scores(validate: Callable[..., Any], cfg: Any, *args: Any, **kwargs: Any) -> list[float | None]:
    """Convert the scores that the training script's ``validate`` returns.

    ``--best-checkpoint-metric spearman`` (or ``pearson``) of fairseq's ``sentence_prediction`` is computed by scipy as a
    numpy scalar, which reaches the checkpoint through the "best so far" of fairseq and of its scheduler. A loader that runs
    no code from checkpoints does not know that class: the run's own checkpoints could not be loaded again.
    """
    maximize, metric = cfg.checkpoint.maximize_best_checkpoint_metric, cfg.checkpoint.best_checkpoint_metric
    try:
        return [comparable(score, maximize) for score in validate(cfg, *args, **kwargs)]
    except KeyError as error:
        if error.args != (metric,):
            raise
        raise UserError(
            f"--best-checkpoint-metric {metric} (checkpoint.best_checkpoint_metric) is not logged"
        ) from error


def check_best_metric(train_step: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Check ``--best-checkpoint-metric`` after the first update, instead of after the first validation.

    A criterion of this package logs the same keys in both.
    """
    logged = train_step(trainer, *args, **kwargs)
    if logged and not getattr(trainer, "metric_is_known", False):
        metric = trainer.cfg.checkpoint.best_checkpoint_metric
        names = sorted(["num_updates", *(name for name in logged if not name.startswith("_"))])
        is_ours = type(trainer.get_criterion()).__module__.startswith("amos_fairseq.")
        if is_ours and not trainer.cfg.dataset.disable_validation and metric not in names:
            raise_on_every_rank(
                f"--best-checkpoint-metric {metric} (checkpoint.best_checkpoint_metric) is not logged: give one of "
                f"{', '.join(names)}"
            )
        trainer.metric_is_known = True
    return logged


def comparable(score: Any, maximize: bool) -> float | None:
    """Return a score as a Python number, and nan as the worst one; None (nothing was validated) is unchanged.

    A model that predicts one value for all examples has a rank correlation of nan. All of fairseq's comparisons with it are
    false: after such an epoch it forgets the best score and treats the next checkpoint as the best.
    """
    if score is None:
        return None
    score = float(score)
    return score if not math.isnan(score) else -math.inf if maximize else math.inf
