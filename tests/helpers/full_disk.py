"""A disk without room, for the time of a test."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process can grow beyond ``limit`` bytes: writes fail with EFBIG, as they do with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
