"""fairseq's own prefetching thread, at the end of a process."""

import queue
import time
from typing import Any

import pytest
from fairseq.data.iterators import BackgroundConsumer

from amos_fairseq.run import hooks


@pytest.mark.parametrize("size", [0, 1], ids=["reads", "waits for space"])
def test_background_readers_end(size: int) -> None:
    """fairseq's own thread, over a source that has no end and takes its time when it is closed."""

    def endless() -> Any:
        try:
            while True:
                yield 1
                time.sleep(0.01)
        finally:
            time.sleep(0.3)

    reader = BackgroundConsumer(queue.Queue(size), endless(), None, None)
    reader.start()
    time.sleep(0.1)
    hooks.at("after_rank")
    assert not reader.is_alive()
