"""Processes that end with their parent, give results in order, and never pile them up."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections import deque
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Callable, Iterable, Iterator

from amos_fairseq.errors import UserError

_PR_SET_PDEATHSIG = 1

# A forked process must not collect a pool of its parent that has become garbage: the pool's callback waits for a lock, and
# for ever where a thread of the parent held it at the fork (seen with Python 3.12.1, after a command that had failed).
os.register_at_fork(after_in_child=gc.freeze)


def end_children_with_this_process() -> None:
    """From now on forked processes die with this one, also by kill -9, and leave Ctrl-C without a traceback.

    Left alone, the processes of a pool wait for ever on pipes that they hold open for each other.
    """
    os.register_at_fork(after_in_child=_die_with_parent)


def _die_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def use_threads(number: int) -> None:
    """How many threads the tokenizers library may start in this process; its results do not depend on it."""
    os.environ["RAYON_NUM_THREADS"] = str(number)
    if number == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


@contextlib.contextmanager
def process_pool(number: int, initializer: Callable[..., None], *arguments: Any) -> Iterator[Executor]:
    """A pool of forked processes; an exception does not wait for what they still do.

    Raises:
        UserError: the system ended one of them (usually for want of memory).
        KeyboardInterrupt: Ctrl-C ended one of them; it reaches the whole group, this process not always first.
    """
    pool = ProcessPoolExecutor(number, multiprocessing.get_context("fork"), initializer, arguments)
    try:
        yield pool
    except BrokenProcessPool as error:
        if any(process.exitcode == -signal.SIGINT for process in (pool._processes or {}).values()):
            raise KeyboardInterrupt from error
        raise UserError(
            "a process was ended by the system, usually for want of memory: give fewer --workers (or, where a vocabulary "
            "is learned, a smaller --sample-megabytes), and run the command again"
        ) from error
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    else:
        pool.shutdown()


def ordered_results(pool: Executor, number: int, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
    """``function`` of every task, in order, with no more than ``2 * number`` results waiting in memory."""
    running: deque = deque()
    for task in tasks:
        running.append(pool.submit(function, task))
        if len(running) >= 2 * number:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Result of ``function`` in a process of its own: its memory is given back, and Ctrl-C ends it in C++ code too."""
    with process_pool(1, int) as pool:
        return pool.submit(function, *arguments).result()
