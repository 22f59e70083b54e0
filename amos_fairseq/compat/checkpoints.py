"""Load checkpoints as data only, write them atomically, and resume from the newest complete one.

Loading. A checkpoint is a pickle: loading one with other classes runs its author's code. torch >= 2.6 refuses unknown classes.
fairseq needs exactly ``argparse.Namespace`` (old checkpoints, and ``cfg`` of tasks and models without a dataclass). On several
ranks, rank 0 loads and broadcasts. The same strict loader unpickles the message, which contains ``_TensorPlaceholder``
(fairseq's substitute for a tensor that follows) and the classes of ``omegaconf`` in ``cfg``. The first is allowed; ``cfg`` is
not broadcast, because no other rank uses it.

Writing. Stock fairseq copies ``checkpoint_last.pt`` in place: a kill or a full disk at that moment truncates the file that
the next start loads. Its ``torch_persistent_save`` tries three times on one handle, so that a retry appends to the output of
the first try, and renames without fsync. Here every file is written under a temporary name, flushed to disk, and renamed. It
is tried once, because a second try does not help on a full disk.

Scores. scipy computes ``--best-checkpoint-metric spearman`` or ``pearson`` as a numpy scalar, a class that the strict loader
refuses. A model that predicts one value for all examples has a rank correlation of nan, after which fairseq forgets the best
score and treats the next checkpoint as the best.
"""

import contextlib
import functools
import glob
import logging
import math
import os
import shutil
from collections.abc import Callable
from typing import Any, BinaryIO

import torch
from fairseq.file_io import PathManager

from amos_fairseq.checkpoint_files import DamagedCheckpoint, num_updates_of, read_header
from amos_fairseq.errors import UserError
from amos_fairseq.files import explain_write_errors, whole_file

logger = logging.getLogger(__name__)


def load_as_data_only(
    load_checkpoint_to_cpu: Callable[..., Any], path: str, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Read the file strictly before: ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` in the environment would let it run code."""
    read_header(PathManager.get_local_path(path))
    return load_checkpoint_to_cpu(path, *args, **kwargs)


def broadcast_without_config(broadcast_object: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Send a checkpoint without ``cfg`` and ``args``, and every other object unchanged."""
    if isinstance(obj, dict) and "optimizer_history" in obj:
        obj = {**obj, "cfg": None, "args": None}
    return broadcast_object(obj, *args, **kwargs)


def write_atomically(path: str, write: Callable[[BinaryIO], None]) -> None:
    """Call ``write`` with a temporary file that then replaces ``path``; on a full disk ``path`` is unchanged."""
    hint = "older checkpoints are complete; make room, permit writing or give another --save-dir, then start it again"
    with explain_write_errors(path, hint), whole_file(path) as unfinished, open(unfinished, "wb") as file:
        write(file)
        file.flush()


def save_atomically(
    torch_persistent_save: Callable[..., Any], obj: Any, filename: str, async_write: bool = False
) -> None:
    """Save atomically on a local disk. iopath handles remote stores."""
    if not PathManager.supports_rename(filename):
        torch_persistent_save(obj, filename, async_write)
    else:
        write_atomically(filename, functools.partial(torch.save, obj))


def copy_atomically(copy: Callable[..., Any], src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """Replace ``PathManager.copy``, which on a local disk overwrites whatever ``overwrite`` is."""
    if any(map(PathManager.path_requires_pathmanager, (src_path, dst_path))):
        return copy(src_path, dst_path, overwrite)
    with open(src_path, "rb") as content:
        write_atomically(dst_path, lambda file: shutil.copyfileobj(content, file, 16 * 1024 * 1024))
    return True  # fairseq asserts it


def repair_last_checkpoint(save_dir: str, suffix: str = "", is_written: bool = True) -> None:
    """Copy the newest complete checkpoint to ``checkpoint_last.pt`` where that file is damaged, missing or outdated.

    It is outdated if the run was killed after it had written a newer checkpoint, or does not write it (not ``is_written``:
    ``--no-last-checkpoints``). One that only has more updates is from before the user went back to an earlier one
    (``--restore-file``) or started a new schedule (``--reset-*``).
    """
    last = os.path.join(save_dir, f"checkpoint_last{suffix}.pt")
    exists = os.path.exists(last)
    if os.path.islink(last) and not exists:  # to start from scratch, or from an older checkpoint, would lose the run
        raise UserError(
            f"{last} is a link to {os.readlink(last)}, which does not exist: mount its disk, or remove the link to continue "
            "from the other checkpoints there, or from scratch if there are none"
        )
    is_usable = is_written and exists and is_complete(last)
    newest = newest_complete_checkpoint(save_dir, suffix, os.path.getmtime(last) if is_usable else -math.inf)
    if newest is None:
        if exists and not is_usable:
            raise UserError(f"{last} is damaged and no other checkpoint is complete: delete it to start from scratch")
        return
    (path, updates), is_newer = newest, False
    with contextlib.suppress(UserError):  # a file from elsewhere that does not say its updates is kept
        is_newer = not is_usable or updates > num_updates_of(last, read_header(last))
    if path != last and is_newer:
        state = "missing" if not exists else "damaged" if is_written and not is_usable else "older"
        logger.warning(f"{last} is {state}: resuming from the newest complete checkpoint, {path} ({updates} updates)")
        PathManager.copy(path, last)


def newest_complete_checkpoint(
    save_dir: str, suffix: str = "", written_after: float = -math.inf
) -> tuple[str, int] | None:
    """Return path and number of updates of the checkpoint in ``save_dir`` with the most updates that loads, or None. Files that
    are not newer than ``written_after``, a modification time in seconds, are not read."""
    complete = []
    for path in sorted(glob.glob(os.path.join(glob.escape(save_dir), f"checkpoint*{suffix}.pt"))):
        try:
            if ".unfinished." in os.path.basename(path) or os.path.getmtime(path) <= written_after:
                continue
            complete.append((num_updates_of(path, read_header(path)), path))
        except (UserError, OSError) as error:
            logger.warning("%s is skipped: %s", path, " ".join(str(error).split()) or type(error).__name__)
    return max(complete)[::-1] if complete else None


def is_complete(path: str) -> bool:
    """Return whether the file loads. A class that is not allowed is not damage and raises :class:`UserError`."""
    try:
        return "model" in read_header(path)
    except DamagedCheckpoint:
        return False


def return_comparable_scores(validate: Callable[..., Any], cfg: Any, *args: Any, **kwargs: Any) -> list[float | None]:
    """Convert the scores that the training script's ``validate`` returns to Python numbers, and nan to the worst one; None, if
    nothing was validated, is unchanged."""
    worst = -math.inf if cfg.checkpoint.maximize_best_checkpoint_metric else math.inf
    metric = cfg.checkpoint.best_checkpoint_metric
    try:
        scores = validate(cfg, *args, **kwargs)
    except KeyError as error:
        if error.args != (metric,):
            raise
        flag = f"--best-checkpoint-metric {metric} (checkpoint.best_checkpoint_metric)"
        raise UserError(f"{flag} is not logged: give one that the validation logs, such as loss") from error
    numbers = [None if score is None else float(score) for score in scores]
    return [worst if number is not None and math.isnan(number) else number for number in numbers]
