"""Opening a corpus does not read it.

fairseq reads a memory-mapped file from end to end before it maps it, in every rank and for every shard: minutes of an
idle device where the corpus lies on a network disk, and pages that push out others. The blocks of an epoch are read in
random order, each when its turn comes, by loader processes that work ahead.
"""

from fairseq.data import indexed_dataset


def map_without_reading(path: str) -> None:
    """In place of ``_warmup_mmap_file``."""


def apply() -> None:
    """Leave out the reading."""
    indexed_dataset._warmup_mmap_file = map_without_reading
