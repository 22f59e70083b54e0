"""A user's mistake is one clear line and a non-zero exit, never a traceback."""

import contextlib
import sys
from typing import Iterator


class UserError(Exception):
    """What is wrong, where, and how to mend it, in one line."""


@contextlib.contextmanager
def report_user_errors() -> Iterator[None]:
    """Print a :class:`UserError` as one line on stderr and exit with status 1.

    Works as a decorator too. Every other exception passes: a traceback is for our own mistakes.
    """
    try:
        yield
    except UserError as error:
        print(f"amos_fairseq: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(1)
