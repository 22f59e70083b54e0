"""What the generator reads at masked positions: mostly ``<mask>``, sometimes a random or the original token."""

from typing import NamedTuple

import numpy as np


class MaskTreatment(NamedTuple):
    """Shares of the masked positions; the rest becomes ``<mask>``."""

    random: float
    unchanged: float


TREATMENTS = {
    "mask": MaskTreatment(0.0, 0.0),
    "bert": MaskTreatment(0.1, 0.1),  # Devlin et al., 2019; thesis section 5.4.3 names both tenths
    "electra": MaskTreatment(0.0, 0.15),  # ELECTRA's released code
}

# By the name of the criterion; every other objective masks all.
OF_OBJECTIVE = {"mlm": "bert", "electra": "electra"}


def treat_masked(
    originals: np.ndarray, treatment: MaskTreatment, mask: int, drawable: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """What stands at the masked positions of a block.

    Args:
        originals: [k] token ids at the masked positions.
        treatment: which share of them is random and which unchanged, each position drawn by itself.
        mask: id of ``<mask>``.
        drawable: [n] ids that a random token is drawn from, all alike.
        generator: the block's own; nothing is drawn from it where every position becomes ``<mask>``.

    Returns:
        [k] int64 token ids.
    """
    treated = np.full(len(originals), mask, dtype=np.int64)
    if treatment.random == treatment.unchanged == 0:
        return treated
    draw = generator.random(len(originals))
    random_tokens = generator.choice(drawable, size=len(originals))
    is_random = draw < treatment.random
    is_unchanged = draw >= 1 - treatment.unchanged
    treated[is_random] = random_tokens[is_random]
    treated[is_unchanged] = originals[is_unchanged]
    return treated
