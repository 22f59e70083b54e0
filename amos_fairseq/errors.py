"""User errors end a program with one clear line and a non-zero exit code instead of a traceback."""

import contextlib
import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

# Exit codes. REQUEUE is EX_TEMPFAIL of <sysexits.h>: a signal has stopped the run, which can be started again. Python, fairseq
# and signals (128 + n) use other codes, so a batch script can requeue on this code alone.
REQUEUE = 75
DIVERGED = 76  # the loss diverges: the same command would diverge again
COLLAPSED = 77  # the discriminator gives all tokens the same probability: the same command would continue as it is
INTERRUPTED = 128 + signal.SIGINT  # as shells report a command that Ctrl-C has ended
# The signals that end a training after a checkpoint, of every command that trains: SIGTERM and SIGUSR1 or 2 of a scheduler,
# SIGHUP of a closed terminal. SIGINT must not start the run again.
EXIT_CODES = {
    signal.SIGTERM: REQUEUE,
    signal.SIGUSR1: REQUEUE,
    signal.SIGUSR2: REQUEUE,
    signal.SIGHUP: REQUEUE,
    signal.SIGINT: INTERRUPTED,
}

SAVE_DIR_OPTION = "AMOS_SAVE_DIR_OPTION"
IN_OUT = {SAVE_DIR_OPTION: "--out"}  # environment of a training that a command with --out has started
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
    """Return ``text``, which may contain names from files, as one printable line of limited length, without the middle of a
    long text: it is a value of a file. The advice at the end stays."""
    line = printable(" ".join(text.split()))
    if option := os.environ.get(SAVE_DIR_OPTION):
        line = re.sub(r"--save-dir( \(checkpoint\.save_dir\))?", option, line)
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


@contextlib.contextmanager
def explain_os_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Turn an ``OSError`` of the body into a :class:`UserError`: the problem, the reason in brackets, the advice."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{problem} ({error.strerror}){advice}") from error


def handle_signals(handler: Callable[[int, FrameType | None], object]) -> None:
    """Call ``handler`` at each signal of :data:`EXIT_CODES`, but for a SIGHUP that ``nohup`` has told to ignore."""

    def handle(number: int, frame: FrameType | None) -> None:
        for stream in (1, 2) if number == signal.SIGHUP else ():
            with contextlib.suppress(OSError):  # printing to a terminal that is gone would fail
                if stat.S_ISCHR(os.fstat(stream).st_mode):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        handler(number, frame)

    for number in EXIT_CODES:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


@contextlib.contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Do that while the body runs, if this is the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {number: signal.getsignal(number) for number in EXIT_CODES if is_main}
    if is_main:
        handle_signals(handler)
    try:
        yield
    finally:
        for number, before in previous.items():
            if before is not None:
                signal.signal(number, before)


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
