"""One command at a time in one directory."""

import fcntl
import os
from pathlib import Path

from amos_fairseq.errors import UserError


def take_lock(path: Path, refusal: str) -> int:
    """Descriptor of the locked file ``path``; the lock ends when it is closed or with this process.

    Raises:
        UserError: another process holds it; ``refusal`` is the message.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # children do not inherit it
    except OSError:
        os.close(descriptor)
        raise UserError(refusal) from None
    return descriptor
