"""Worker processes that end with their parent and return results in order."""

import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from amos_fairseq.errors import UserError

# Applies a function to tasks in the processes of a pool, and yields the results in the order of the tasks.
InOrder = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]

MOST_PROCESSES = 1024
_PR_SET_PDEATHSIG = 1

# A forked process must not garbage-collect a pool of its parent: the pool's callback waits for a lock, and waits forever
# if a thread of the parent held it at the fork (seen with Python 3.12.1, after a command that had failed).
os.register_at_fork(after_in_child=gc.freeze)


def number_of_processes(workers: int | None) -> int:
    """Return the value of ``--workers``; without it, the number of processors available to this process.

    Raises:
        UserError: it is less than 1, or so large that starting the processes would stop the machine.
    """
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise UserError(f"--workers {workers} must be at least 1")
    if workers > MOST_PROCESSES:
        raise UserError(f"--workers {workers} asks for too many processes: give at most {MOST_PROCESSES:,}")
    return workers


def use_threads(number: int) -> None:
    """Set how many threads the tokenizers library may start in this process; its results do not depend on it."""
    os.environ["RAYON_NUM_THREADS"] = str(number)
    if number == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _start_worker(initializer: Callable[..., None], *arguments: Any) -> None:
    """Let this process end with its parent, even by kill -9, and exit on Ctrl-C without a traceback.

    Otherwise the processes of a pool wait forever on pipes that they hold open for each other.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    initializer(*arguments)


@contextlib.contextmanager
def process_pool(number: int, initializer: Callable[..., None] = int, *arguments: Any) -> Iterator[InOrder]:
    """Start a pool of forked processes, and yield what gives them work. An exception does not wait for what is pending.

    Raises:
        UserError: the system killed one of them (usually because memory is full).
        KeyboardInterrupt: Ctrl-C ended one of them; it reaches the whole group, not always this process first.
    """
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(number, fork, _start_worker, (initializer, *arguments))
    try:
        yield functools.partial(ordered_results, pool, number)
    except BrokenProcessPool as error:
        processes = list((pool._processes or {}).values())
        pool.shutdown()  # its thread collects the exit codes; read at the same time, they may be missing
        if any(process.exitcode == -signal.SIGINT for process in processes):
            raise KeyboardInterrupt from error
        raise UserError(
            "a process was killed by the system, usually because memory is full: give fewer --workers (or, where a "
            "vocabulary is learned, a smaller --sample-megabytes), and run the command again"
        ) from error
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    else:
        pool.shutdown()


def ordered_results(pool: Executor, number: int, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
    """Yield ``function`` of every task in order, with at most ``2 * number`` results waiting in memory."""
    running: deque = deque()
    for task in tasks:
        running.append(pool.submit(function, task))
        if len(running) >= 2 * number:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def in_own_process(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return ``function(argument)``, computed in a separate process: it frees its memory, and Ctrl-C ends C++ code."""
    with process_pool(1) as in_order:
        return next(in_order(function, [argument]))
