"""Worker processes that end with the work they are for and return results in order."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any

import amos_worker
from amos_fairseq.errors import UserError

# Applies a function to tasks, and yields the results in their order, as ``map`` does.
Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]

MOST_PROCESSES = 1024


class KilledWorkerError(UserError):
    """The system killed a process, usually because memory is full; the same command may succeed with fewer of them."""


def number_of_processes(workers: int | None) -> int:
    """Return the value of ``--workers``; without it, the number of processors available to this process."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 1 <= workers <= MOST_PROCESSES:
        raise UserError(f"--workers {workers} must be at least 1, and at most {MOST_PROCESSES:,}")
    return workers


def use_threads(number: int) -> None:
    """Set how many threads the tokenizers library may start in this process; its results do not depend on it."""
    os.environ["RAYON_NUM_THREADS"] = str(number)
    if number == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


@contextlib.contextmanager
def process_pool(number: int, initializer: Callable[..., None], *arguments: Any) -> Iterator[Map]:
    """Yield a ``map`` over ``number`` processes, each prepared by ``initializer(*arguments)``; 1 is this process itself."""
    if number == 1:
        initializer(*arguments)
        yield map
    else:
        with new_processes(number, initializer, *arguments) as map_in_order:
            yield map_in_order


def in_own_process(function: Callable[[Any], Any], argument: Any) -> Any:
    """Return ``function(argument)``, computed in a separate process: it frees its memory, and Ctrl-C ends C++ code."""
    with new_processes(1) as map_in_order:
        return next(map_in_order(function, [argument]))


@contextlib.contextmanager
def new_processes(number: int, initializer: Callable[..., None] = int, *arguments: Any) -> Iterator[Map]:
    """Yield a ``map`` over new processes. Any exception, Ctrl-C included, ends them at once, and so does the end of this
    process, also by kill -9."""
    spawn = multiprocessing.get_context("spawn")
    watched, held_open = spawn.Pipe(duplex=False)
    start = pickle.dumps((_start_worker, initializer, *arguments))
    pool = ProcessPoolExecutor(number, spawn, amos_worker.start_worker, (watched, start))

    def map_in_order(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        # This call starts the processes, which inherit that Ctrl-C is blocked: only their parent handles it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.map(function, tasks)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield map_in_order
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
