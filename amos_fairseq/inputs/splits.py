"""A dev set that is held out of the examples to train on, and what tables say about it."""

from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np

from amos_fairseq.errors import UserError

DEV_SHARE, SPLIT_SEED = 0.1, 1


def held_out(examples: Sequence[Hashable], source: str | Path, what: str) -> list[int]:
    """Return the indices of a tenth of the examples, chosen at random, to score on. Equal ones are on the same side."""
    indices: dict[Hashable, list[int]] = {}
    for index, example in enumerate(examples):
        indices.setdefault(example, []).append(index)
    groups, wanted = list(indices.values()), round(DEV_SHARE * len(examples))
    if len(groups) < 10 or wanted < 1:
        raise UserError(f"{source} has {len(groups)} different {what}, too few to choose dev {what}: give --dev")
    dev: list[int] = []
    for group in np.random.default_rng(SPLIT_SEED).permutation(len(groups)):
        if len(dev) + len(groups[group]) <= wanted:
            dev += groups[group]
    return sorted(dev)


def held_out_note(num_dev: int, num_train: int, what: str, source: str) -> str:
    return f"dev: {num_dev:,} {what} of {source}, chosen at random (seed {SPLIT_SEED}); {num_train:,} {what} train"


def seen_note(seen: int, total: int, what: str) -> str:
    return f"{seen:,} of {total:,} dev {what} train too: the scores may be too high"
