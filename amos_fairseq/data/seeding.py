"""Random numbers that are a function of their purpose, not of what was sampled before.

Masks, the order of blocks and the noise of a micro-batch come from generators of their own, keyed by (seed, epoch, block)
or (seed, update, block). They do not depend on the number of ranks or loader processes, on the order in which shards are
read, or on where a run was interrupted.
"""

import hashlib
from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """First element of every key: different purposes never share a stream."""

    BLOCK_ORDER = 1
    TRAINING_MASK = 2
    VALIDATION_MASK = 3
    TRAINING_NOISE = 4
    VALIDATION_NOISE = 5
    SIMILAR_LENGTHS = 6
    ROWS_OF_A_TASK = 8
    UNLABELED = 9


def keyed_generator(purpose: Purpose, seed: int, epoch: int, block: int) -> np.random.Generator:
    """Return a numpy generator for this key alone; the four integers must not be negative.

    The key has a fixed length because ``SeedSequence`` pads short ones with zeros: (1, 2) and (1, 2, 0) are one stream.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((int(purpose), seed, epoch, block))))


def noise_seed(purpose: Purpose, seed: int, update: int, block: int) -> int:
    """Return a 63-bit seed for ``torch.manual_seed``, a stable hash of the key: with seed + update + block, several
    micro-batches would have the same noise, and Python's own ``hash`` differs by build."""
    key = f"{int(purpose)}/{seed}/{update}/{block}".encode("ascii")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


class EpochOrder:
    """A mixin, to come before ``FairseqDataset`` among the bases, for datasets with ``seed``, ``epoch`` and ``training``."""

    def ordered_indices(self) -> np.ndarray:
        """Return the indices [N] int64: a permutation from (seed, epoch) for training, ascending for validation."""
        if not self.training:
            return np.arange(len(self), dtype=np.int64)
        return keyed_generator(Purpose.BLOCK_ORDER, self.seed, self.epoch, 0).permutation(len(self))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
