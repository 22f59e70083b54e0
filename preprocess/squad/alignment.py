"""From the characters of an answer to the tokens of its context."""

from enum import Enum
from typing import Optional, Tuple

import numpy as np

from amos_fairseq.finetuning.squad.official import Answer, normalize_answer


class Fit(str, Enum):
    """How well tokens stand for an answer.

    ``exact``: cut out of the context by its tokens, the answer scores an exact match. ``wider``: it ends inside a token
    ("1910" in "1910s"), so the least tokens that hold it give more than it. ``lost``: no token stands for its
    characters. ``misplaced``: the context does not have it at its ``answer_start``.
    """

    EXACT = "exact"
    WIDER = "wider"
    LOST = "lost"
    MISPLACED = "misplaced"


def align_answer(
    answer: Answer, context: str, starts: np.ndarray, ends: np.ndarray
) -> Tuple[Optional[Tuple[int, int]], Fit]:
    """First and last token of an answer, or None where it is lost or misplaced.

    Args:
        starts, ends: [length] characters ``[start, end)`` of each context token; empty for a token of no character.
    """
    if context[answer.start : answer.start + len(answer.text)] != answer.text or answer.start < 0:
        return None, Fit.MISPLACED
    # Spaces at its ends are in no token's characters, so they ask for no other tokens.
    inside = np.flatnonzero((starts < ends) & (ends > answer.start) & (starts < answer.start + len(answer.text)))
    if len(inside) == 0:
        return None, Fit.LOST
    first, last = int(inside[0]), int(inside[-1])
    found = context[starts[first] : ends[last]]
    fits = normalize_answer(found) == normalize_answer(answer.text)
    return (first, last), Fit.EXACT if fits else Fit.WIDER
