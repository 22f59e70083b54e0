"""Sliding windows over paragraphs that are longer than the encoder reads, as BERT's SQuAD code makes them."""

from typing import List, NamedTuple, Tuple

import numpy as np

from amos_fairseq.errors import UserError

# <s> question </s> context </s>
SPECIAL_TOKENS = 3


class WindowLimits(NamedTuple):
    """Lengths in tokens; defaults are BERT's but for ``tokens`` (AMOS Appendix B: sequence length 512).

    ``tokens``: the whole window. ``doc_stride``: distance of the beginnings of two windows. ``question``: the rest of a
    longer question is cut off.
    """

    tokens: int = 512
    doc_stride: int = 128
    question: int = 64

    def check(self) -> None:
        """:class:`UserError` for lengths that leave no room."""
        if self.doc_stride < 1:
            raise UserError(f"--doc-stride {self.doc_stride} must be 1 or more")
        if self.question < 1:
            raise UserError(f"--max-question-length {self.question} must be 1 or more")
        if self.tokens < self.question + SPECIAL_TOKENS + 1:
            raise UserError(
                f"--tokens-per-window {self.tokens} leaves no room for a context beside --max-question-length "
                f"{self.question} and {SPECIAL_TOKENS} special tokens: raise the first or lower the second"
            )

    def room(self, question_length: int) -> int:
        """Context tokens that fit beside a question."""
        return self.tokens - SPECIAL_TOKENS - min(question_length, self.question)


def context_ranges(length: int, room: int, stride: int) -> List[Tuple[int, int]]:
    """``[begin, end)`` of the windows over a context of ``length`` tokens; at least one, together all tokens.

    Every window is full but the last. Beginnings are ``stride`` apart, or ``room`` where that is less.
    """
    ranges = [(0, min(length, room))]
    while ranges[-1][1] < length:
        begin = ranges[-1][0] + min(stride, room)
        ranges.append((begin, min(length, begin + room)))
    return ranges


def window_of_most_context(ranges: List[Tuple[int, int]]) -> np.ndarray:
    """For every context token, the number of the window in which it has most context: [length] int64.

    That is the smaller one of its distances to both ends of the window, plus a hundredth of the window's length, which
    decides between equal ones; of still equal windows the first (BERT's rule).
    """
    length = ranges[-1][1]
    best_score = np.full(length, -1.0)
    best = np.zeros(length, dtype=np.int64)
    for number, (begin, end) in enumerate(ranges):
        place = np.arange(begin, end)
        score = np.minimum(place - begin, end - 1 - place) + 0.01 * (end - begin)
        better = score > best_score[begin:end]
        best[begin:end][better] = number
        best_score[begin:end][better] = score[better]
    return best
