"""User errors end a program with one clear line and a non-zero exit code instead of a traceback."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

# Exit codes. REQUEUE is EX_TEMPFAIL of <sysexits.h>: a signal has stopped the run, which can be started again. Python, fairseq
# and signals (128 + n) use other codes, so a batch script can requeue on this code alone.
REQUEUE = 75
DIVERGED = 76  # the loss diverges: the same command would diverge again
COLLAPSED = 77  # the discriminator gives all tokens the same probability: the same command would continue as it is
INTERRUPTED = 128 + signal.SIGINT  # as shells report a command that Ctrl-C has ended

LONGEST_LINE = 2000  # characters of a message


class UserError(Exception):
    """A mistake of the user. The message says in one line what is wrong, where, and how to fix it."""

    exit_code = 1


class DivergedError(UserError):
    exit_code = DIVERGED


class CollapsedError(UserError):
    exit_code = COLLAPSED


def printable(text: str) -> str:
    """Replace characters that cannot be printed, such as escape sequences, which could steer a terminal, and bytes of a file's
    name that are not UTF-8, by U+FFFD. The joiners of Persian, Hindi and emoji stay."""
    return "".join(char if char.isprintable() or char in "\u200c\u200d" else "\ufffd" for char in text)


def one_line(text: str) -> str:
    """Return ``text``, which may contain names from files, as one printable line of limited length.

    The middle of a long text is left out: it is a value of a file. The advice at the end stays.
    """
    line = printable(" ".join(text.split()))
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


@contextlib.contextmanager
def explain_os_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Turn an ``OSError`` of the body into a :class:`UserError`: the problem, the reason in brackets, the advice."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{problem} ({error.strerror}){advice}") from error


@contextlib.contextmanager
def report_user_errors() -> Iterator[None]:
    """Print a :class:`UserError` as one line on stderr and exit with its code; other exceptions are bugs and propagate."""
    try:
        yield
    except UserError as error:
        print(f"amos_fairseq: error: {one_line(str(error))}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def save_dir_not_writable(save_dir: str, error: OSError) -> UserError:
    if isinstance(error, FileExistsError):
        problem = "is a link to a folder that does not exist" if os.path.islink(save_dir) else "is a file"
        return UserError(f"{save_dir} {problem}: mount or remove it, or give another --save-dir (checkpoint.save_dir)")
    return UserError(
        f"{save_dir} cannot be written ({error.strerror}): make room, permit writing, or give another --save-dir "
        "(checkpoint.save_dir)"
    )
