"""Random numbers that are a function of what they are for, not of who drew before.

Masks, the order of blocks and the noise of a micro-batch are drawn from generators of their own, keyed by (seed, epoch,
block) or (seed, update, block). So they do not depend on the number of ranks or loader processes, on the order in which
shards are read, or on where a run was interrupted.
"""

import hashlib
from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """First word of every key: draws for different purposes never share a stream."""

    BLOCK_ORDER = 1
    TRAINING_MASK = 2
    VALIDATION_MASK = 3
    TRAINING_NOISE = 4
    VALIDATION_NOISE = 5


def keyed_generator(purpose: Purpose, seed: int, epoch: int, block: int) -> np.random.Generator:
    """A numpy generator for this key alone; the four numbers must not be negative.

    The key has a fixed length because ``SeedSequence`` pads short ones with zeros: (1, 2) and (1, 2, 0) are one stream.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((int(purpose), seed, epoch, block))))


def noise_seed(purpose: Purpose, seed: int, update: int, block: int) -> int:
    """A 63-bit seed for ``torch.manual_seed``, a stable hash of the key (Python's own ``hash`` differs by build).

    Hashing keeps neighbours apart: with seed + update + block the noise of one micro-batch would come back in others.
    """
    key = f"{int(purpose)}/{seed}/{update}/{block}".encode("ascii")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
