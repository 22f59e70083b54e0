"""Worker processes that end with the work they are for and return results in order."""

import contextlib
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any

import amos_worker
from amos_fairseq.errors import UserError

# Applies a function to tasks in the processes of a pool, and yields the results in the order of the tasks.
InOrder = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]

MOST_PROCESSES = 1024


class KilledWorkerError(UserError):
    """The system killed a process, usually because memory is full; the same command may succeed with fewer of them."""


def number_of_processes(workers: int | None) -> int:
    """Return the value of ``--workers``; without it, the number of processors available to this process."""
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


@contextlib.contextmanager
def process_pool(number: int, initializer: Callable[..., None] = int, *arguments: Any) -> Iterator[InOrder]:
    """Yield what maps a function over tasks in ``number`` new processes, which ``initializer(*arguments)`` prepares.

    A single task, and all tasks where ``number`` is 1, are computed in this process. An exception of a task is raised here.
    """
    prepare_here = functools.cache(functools.partial(initializer, *arguments))
    with _executor(number, initializer, *arguments) as pool:
        yield functools.partial(_in_order, pool, number, prepare_here)


def in_own_process(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return ``function(argument)``, computed in a separate process: it frees its memory, and Ctrl-C ends C++ code."""
    with _executor(1) as pool:
        return _submit(pool, function, argument).result()


@contextlib.contextmanager
def _executor(number: int, initializer: Callable[..., None] = int, *arguments: Any) -> Iterator[Executor]:
    """Yield a pool. Any exception, Ctrl-C included, ends its processes at once, and so does the end of this process, also by
    kill -9."""
    spawn = multiprocessing.get_context("spawn")
    watched, held_open = spawn.Pipe(duplex=False)
    start = pickle.dumps((_start_worker, initializer, *arguments))
    pool = ProcessPoolExecutor(number, spawn, amos_worker.start_worker, (watched, start))
    try:
        yield pool
        pool.shutdown()
    except BrokenProcessPool as error:
        raise KilledWorkerError(
            "a process was killed by the system, usually because memory is full: give fewer --workers (or, where a "
            "vocabulary is learned, a smaller --sample-megabytes), and run the command again"
        ) from error
    finally:
        held_open.close()
        pool.shutdown(cancel_futures=True)


def _start_worker(watched: Connection, initializer: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    initializer(*arguments)


def _end_with(watched: Connection) -> None:
    """End this process when the other end of the pipe is closed: its parent has ended, or does not need it any more."""
    with contextlib.suppress(EOFError, OSError):
        watched.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def _in_order(
    pool: Executor,
    number: int,
    prepare_here: Callable[[], None],
    function: Callable[[Any], Any],
    tasks: Iterable[Any],
) -> Iterator[Any]:
    """Yield ``function`` of every task in order, with at most ``2 * number`` results waiting in memory."""
    tasks = iter(tasks)
    first = list(itertools.islice(tasks, 2))
    if number == 1 or len(first) < 2:
        prepare_here()
        yield from map(function, itertools.chain(first, tasks))
        return
    running: deque[Future] = deque()
    for task in itertools.chain(first, tasks):
        running.append(_submit(pool, function, task))
        if len(running) >= 2 * number:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _submit(pool: Executor, function: Callable[[Any], Any], task: Any) -> Future:
    """Submit a task. The process that may be started for it inherits that Ctrl-C is blocked: only its parent handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(function, task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
