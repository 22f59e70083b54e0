"""Checkpoints are whole or absent, and a run finds its newest whole one.

Stock fairseq copies ``checkpoint_last.pt`` in place: a kill or a full disk in that moment cuts short the file that the
next start reads. Its ``torch_persistent_save`` tries three times on one handle, so a retry appends to what the first try
wrote, and it renames without fsync. Here every file is written beside its target, reaches the disk, and takes its place
in one step; one try, because a full disk does not mend itself. Where ``checkpoint_last.pt`` is damaged, missing or older
than another (the kill came between a checkpoint and its copy), the newest whole checkpoint of SAVE_DIR becomes it.
"""

import functools
import glob
import logging
import math
import os
import shutil
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from amos_fairseq.compat.safe_loading import DamagedCheckpoint, read_header
from amos_fairseq.errors import UserError
from amos_fairseq.files import NO_ROOM, os_error_behind, whole_file
from amos_fairseq.ranks import raise_on_every_rank

logger = logging.getLogger(__name__)


def write_whole(path: str, write: Callable[[BinaryIO], None]) -> None:
    """Let ``write`` fill a file that then replaces ``path``.

    Raises:
        UserError: the disk is full or the directory cannot be written; ``path`` is what it was before.
    """
    try:
        with whole_file(path) as unfinished, open(unfinished, "wb") as file:
            write(file)
            file.flush()
    except Exception as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        help_ = "make room" if cause.errno in NO_ROOM else "permit writing"
        raise UserError(
            f"{path} cannot be written ({cause.strerror}); older checkpoints are whole: {help_} or give another "
            "--save-dir, then start the same command again"
        ) from error


def copy_whole(source: str, target: str, overwrite: bool = False) -> str:
    """Replacement of ``PathManager.copy`` (which overwrites, whatever ``overwrite`` says, on a local disk)."""

    def write(file: BinaryIO) -> None:
        with open(source, "rb") as content:
            shutil.copyfileobj(content, file, 16 * 1024 * 1024)

    write_whole(target, write)
    return target


def rename_durably(source: str, target: str) -> None:
    """Replacement of ``PathManager.rename``: the content reaches the disk before the name does."""
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)


def num_updates(checkpoint: dict[str, Any]) -> int:
    return int(checkpoint["optimizer_history"][-1]["num_updates"])


def newest_whole_checkpoint(
    save_dir: str, suffix: str = "", written_after: float = -math.inf
) -> tuple[str, int] | None:
    """Path and number of updates of the checkpoint in ``save_dir`` that went farthest and loads; None without one.

    Args:
        written_after: time of change, in seconds, up to which files are left out, unread.
    """
    whole = []
    for path in sorted(glob.glob(os.path.join(glob.escape(save_dir), f"checkpoint*{suffix}.pt"))):
        try:
            if ".unfinished." in os.path.basename(path) or os.path.getmtime(path) <= written_after:
                continue
            whole.append((num_updates(read_header(path)), path))
        except (UserError, OSError, KeyError, IndexError, TypeError) as error:
            logger.warning("%s is passed over: %s", path, " ".join(str(error).split()) or type(error).__name__)
    return max(whole)[::-1] if whole else None


def mend_last_checkpoint(save_dir: str, suffix: str = "", is_kept: bool = True) -> str | None:
    """Give the run a ``checkpoint_last.pt`` that loads, if there is a whole checkpoint to take.

    Args:
        is_kept: the run writes ``checkpoint_last.pt``; otherwise (``--no-last-checkpoints``) it falls behind the others.

    Returns:
        What is wrong where a damaged one cannot be replaced; None otherwise.
    """
    last = os.path.join(save_dir, f"checkpoint_last{suffix}.pt")
    present = os.path.exists(last)
    whole = is_kept and present and is_whole(last)
    newest = newer_than_last(last, save_dir, suffix) if whole else newest_whole_checkpoint(save_dir, suffix)
    if newest is None:
        damage = f"{last} is damaged and no other checkpoint is whole: delete it to start from nothing"
        return damage if present and not whole else None
    path, updates = newest
    if path != last:
        state = "missing" if not present else "damaged" if is_kept and not whole else "older"
        logger.warning(f"{last} is {state}: resuming from the newest whole checkpoint, {path} ({updates} updates)")
        copy_whole(path, last)
    return None


def newer_than_last(last: str, save_dir: str, suffix: str) -> tuple[str, int] | None:
    """The checkpoint that a killed run saved and did not yet copy to ``last``; None where there is none.

    It went farther and was written later. One that only went farther is of the time before the user stepped back to
    an earlier checkpoint (``--restore-file``) or began a new schedule (``--reset-*``): ``last`` is right then.
    """
    newest = newest_whole_checkpoint(save_dir, suffix, written_after=os.path.getmtime(last))
    try:
        return newest if newest and newest[1] > num_updates(read_header(last)) else None
    except (KeyError, IndexError, TypeError):  # put there by the user: it tells no number of updates
        return None


def is_whole(path: str) -> bool:
    """Whether the file loads; a foreign class is no damage and raises :class:`UserError`."""
    try:
        return "model" in read_header(path)
    except DamagedCheckpoint:
        return False


def apply() -> None:
    """Replace fairseq's three ways to write a checkpoint, and look at ``checkpoint_last.pt`` before it is loaded."""
    save, load_checkpoint = checkpoint_utils.torch_persistent_save, checkpoint_utils.load_checkpoint
    copy, rename = PathManager.copy, PathManager.rename

    @functools.wraps(save)
    def torch_persistent_save(obj: Any, filename: str, async_write: bool = False) -> None:
        if async_write or not PathManager.supports_rename(filename):
            save(obj, filename, async_write)  # iopath's own business: remote stores and background threads
        else:
            write_whole(filename, functools.partial(torch.save, obj))

    @functools.wraps(copy)
    def copy_local_whole(src_path: str, dst_path: str, overwrite: bool = False) -> Any:
        remote = any(map(PathManager.path_requires_pathmanager, (src_path, dst_path)))
        return (copy if remote else copy_whole)(src_path, dst_path, overwrite)

    @functools.wraps(rename)
    def rename_local_durably(src: str, dst: str) -> None:
        rename_durably(src, dst)

    @functools.wraps(load_checkpoint)
    def load_whole_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        problem = None
        if cfg.restore_file == "checkpoint_last.pt" and trainer.should_save_checkpoint_on_current_rank:
            try:
                problem = mend_last_checkpoint(cfg.save_dir, trainer.checkpoint_suffix, not cfg.no_last_checkpoints)
            except UserError as error:  # the other ranks are waiting to hear of it
                problem = str(error)
        raise_on_every_rank(problem)
        return load_checkpoint(cfg, trainer, **kwargs)

    checkpoint_utils.torch_persistent_save = torch_persistent_save
    checkpoint_utils.load_checkpoint = load_whole_checkpoint
    PathManager.copy = staticmethod(copy_local_whole)
    PathManager.rename = staticmethod(rename_local_durably)
