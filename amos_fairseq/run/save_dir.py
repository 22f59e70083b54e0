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

from amos_fairseq.collectives import on_first_rank
from amos_fairseq.errors import UserError
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


def claim(cfg: Any, trainer: Any) -> None:
    """Lock SAVE_DIR before anything in it is read or repaired."""
    on_first_rank(functools.partial(claim_save_dir, cfg.save_dir))


def leave_to_claim(verify_checkpoint_directory: Any, save_dir: str) -> None:
    """Replace fairseq's test, which raises OSError on the first rank only: :func:`claim_save_dir` tests the directory."""
