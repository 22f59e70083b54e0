"""SAVE_DIR belongs to one run at a time: two runs would replace each other's checkpoints."""

import contextlib
import errno
import fcntl
import functools
import logging
import os
import re
import socket
from typing import Any, BinaryIO

from fairseq import checkpoint_utils
from fairseq.logging import progress_bar
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from amos_fairseq.compat.collectives import on_first_rank
from amos_fairseq.errors import UserError, save_dir_not_writable
from amos_fairseq.files import no_links

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
# A full disk cuts it, and a power failure leaves bytes of 0.
_LOCK_CONTENT = re.compile(rb"\0*|process \d+[^\n\0]*\n?")
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
        raise save_dir_not_writable(save_dir, error) from error
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


def claim(cfg: Any, trainer: Any) -> None:
    """Lock SAVE_DIR before anything in it is read or repaired."""
    on_first_rank(functools.partial(claim_save_dir, cfg.save_dir))


def leave_to_claim(verify_checkpoint_directory: Any, save_dir: str) -> None:
    """Replace fairseq's test, which raises OSError on the first rank only: :func:`claim_save_dir` tests the directory."""


def separate_jobs(cfg: Any) -> None:
    """Set the SAVE_DIR of a job of a sweep to its own folder: the jobs would continue and overwrite each other's run."""
    if not HydraConfig.initialized() or OmegaConf.is_missing(HydraConfig.get().job, "num"):
        return
    folder = HydraConfig.get().sweep.subdir
    # Hydra's own launcher runs the jobs in one process, in which fairseq keeps the writers and the best score of a run.
    for writer in progress_bar._tensorboard_writers.values():
        writer.close()
    progress_bar._tensorboard_writers.clear()
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    if folder not in ("", ".") and not cfg.checkpoint.save_dir.endswith(f"/{folder}"):
        cfg.checkpoint.save_dir = f"{cfg.checkpoint.save_dir}/{folder}"
