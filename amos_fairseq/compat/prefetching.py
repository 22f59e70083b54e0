"""fairseq's threads that read batches ahead, at the end of a process."""

import sys
import threading

from fairseq.data import iterators


def stop_readers() -> None:
    """End fairseq's prefetching threads before the process ends.

    They are daemons: where one is in C++ code when the interpreter ends, as while it reads its first batches or closes its
    loader processes, the process aborts with SIGABRT instead of its exit code (one start in twelve of a finished run).
    """
    readers = [thread for thread in threading.enumerate() if isinstance(thread, iterators.BackgroundConsumer)]
    for reader in readers:
        reader._max_len = 0  # the next item is the last one
        with reader._queue.mutex:  # which the reader may be waiting for space in
            reader._queue.maxsize = sys.maxsize
            reader._queue.not_full.notify_all()
    for reader in readers:
        reader.join(timeout=60)
