"""Waiting for what other processes do: a signal takes effect some time after it was sent."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], text: Callable[[], str] = str, seconds: float = 120) -> None:
    """Return when ``condition`` holds; raise ``AssertionError`` with the end of ``text()`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s\n{text()[-3000:]}"
        time.sleep(0.02)
