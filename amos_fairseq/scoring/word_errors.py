"""Word error rate: how speech recognition is judged."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class WordErrors:
    """Substituted, missing and surplus words of hypotheses, and the words of their references."""

    errors: int
    words: int

    @classmethod
    def of(cls, reference: str, hypothesis: str) -> "WordErrors":
        """Words are what spaces separate, compared as they are spelled."""
        words = reference.split()
        return cls(edit_distance(words, hypothesis.split()), len(words))

    @classmethod
    def total(cls, parts: Iterable["WordErrors"]) -> "WordErrors":
        """Sums of all: a long sentence counts for more than a short one."""
        parts = list(parts)
        return cls(sum(part.errors for part in parts), sum(part.words for part in parts))

    @property
    def rate(self) -> float:
        """In percent of the references' words, as in thesis Table 5.9; surplus words can take it above 100."""
        return round(100 * self.errors / self.words, 4)


def edit_distance(reference: list[str], hypothesis: list[str]) -> int:
    """The fewest substitutions, deletions and insertions of words that make one of the other (Levenshtein)."""
    previous = list(range(len(hypothesis) + 1))
    for deletions, expected in enumerate(reference, start=1):
        current = [deletions]
        for place, word in enumerate(hypothesis):
            current.append(min(previous[place] + (word != expected), previous[place + 1] + 1, current[place] + 1))
        previous = current
    return previous[-1]
