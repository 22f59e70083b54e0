"""Pseudo-log-likelihood of lines: PLL(x) = sum_t log p(x_t | all other tokens) (thesis section 5.4.5)."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from amos_fairseq.checkpoints.read import Pretrained
from amos_fairseq.errors import UserError
from amos_fairseq.scoring.choice import cloze_of
from amos_fairseq.scoring.cloze import Cloze
from amos_fairseq.scoring.lines import Line, encoded_lines, windows

# A window is worth this many batches: enough to put lines of like length together, little enough to be lost by a stop.
BATCHES_PER_WINDOW = 32


@dataclass(frozen=True)
class ScoredLine:
    """A line and what the model makes of it, in nats.

    ``log_probs`` has a number for each piece, None for a piece that is a special token (a word that the vocabulary does not
    know); it is None as a whole for a line that is longer than the model reads.
    """

    line: Line
    log_probs: list[float | None] | None

    @property
    def known(self) -> list[float]:
        return [value for value in self.log_probs or [] if value is not None]

    @property
    def pll(self) -> float | None:
        """Sum over the known pieces, 0 for an empty line; None where the line was not read."""
        return None if self.log_probs is None else math.fsum(self.known)

    @property
    def num_unknown(self) -> int:
        return len(self.log_probs or []) - len(self.known)


class Scorer:
    """Scores lines with the model of a checkpoint, on the device where that model is.

    Raises:
        UserError: the objective gives no probability of a token.
    """

    def __init__(self, pretrained: Pretrained, tokens_per_batch: int, electra_formula: str | None = None):
        self.pretrained = pretrained
        self.electra_formula = electra_formula
        self.cloze: Cloze = cloze_of(pretrained, tokens_per_batch, electra_formula)
        self.max_tokens: int = pretrained.model.max_positions()

    def windows(self, texts: Iterable[str], first: int = 1) -> Iterator[list[ScoredLine]]:
        """All texts in their order, a window of them at a time, numbered from ``first`` on.

        Raises:
            UserError: the model gives numbers that are not finite.
        """
        lines = encoded_lines(self.pretrained, texts, first)
        limit = BATCHES_PER_WINDOW * self.cloze.tokens_per_batch
        for window in windows(lines, self._work, limit):
            yield self._score(window)

    def _is_read(self, line: Line) -> bool:
        return len(line.tokens) <= self.max_tokens

    def _work(self, line: Line) -> int:
        """Tokens that go through the model for a line."""
        return len(line.tokens) * self.cloze.num_passes(line.tokens) if self._is_read(line) else 0

    @torch.inference_mode()
    def _score(self, window: list[Line]) -> list[ScoredLine]:
        read = [line for line in window if self._is_read(line)]
        values = iter(self.cloze.log_probs([line.tokens for line in read]))
        return [
            ScoredLine(line, self._of_pieces(line, next(values)) if self._is_read(line) else None) for line in window
        ]

    def _of_pieces(self, line: Line, values: torch.Tensor) -> list[float | None]:
        """[L] with ``<s>`` and ``</s>`` -> one entry a piece."""
        if not values.isfinite().all():
            piece = line.pieces[int((~values.isfinite()).nonzero()[0]) - 1]
            raise UserError(
                f"{self.pretrained.file} has no finite score for {piece!r} in line {line.number}: its training went wrong "
                "(take an earlier checkpoint), or its generator never proposes this piece"
            )
        scored = self.cloze.scored(line.tokens).tolist()
        pairs = zip(values.tolist()[1:-1], scored[1:-1], strict=True)
        return [value if is_scored else None for value, is_scored in pairs]
