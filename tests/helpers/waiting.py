"""Waiting for what other processes do: a signal has its effect when the system gives it time, not when it is sent."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Return when ``condition`` holds; raise ``AssertionError`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    """Whether no such process runs; one that waits for its parent to take its exit status has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
