"""From scored spans of windows to the answers of a question, cut out of its original text."""

import math
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence

import numpy as np

from amos_fairseq.data.squad import Window

# Null odds of a question for which no span at all could be an answer: above every threshold, and still JSON.
NO_SPAN_ODDS = 1e9


class DecodingLimits(NamedTuple):
    """BERT's: answers of up to ``max_answer_length`` tokens; ``n_best`` of them are kept for a question."""

    max_answer_length: int = 30
    n_best: int = 20


class ScoredSpan(NamedTuple):
    """``first`` and ``last`` are tokens of the whole context."""

    score: float
    first: int
    last: int


class ScoredText(NamedTuple):
    text: str
    score: float


class Decoded(NamedTuple):
    """``texts``: different answers, best first, none empty; ``null_odds``: the higher the likelier there is none."""

    texts: List[ScoredText]
    null_odds: float

    @property
    def best(self) -> str:
        return self.texts[0].text if self.texts else ""

    def as_json(self) -> List[Dict[str, Any]]:
        """For the n-best file: texts with their scores, and probabilities by a softmax over the list."""
        highest = max((found.score for found in self.texts), default=0.0)
        weights = [math.exp(found.score - highest) for found in self.texts]
        total = sum(weights)
        return [
            {"text": found.text, "probability": weight / total, "score": found.score}
            for found, weight in zip(self.texts, weights, strict=True)
        ]


def spans_of_window(
    starts: np.ndarray, ends: np.ndarray, scores: np.ndarray, window: Window, owner: np.ndarray, limits: DecodingLimits
) -> List[ScoredSpan]:
    """The spans of a window that can be answers, best first, ``n_best`` at most.

    A span lies in the context, does not end before it starts, and is not too long; and it counts only in the window in
    which its first token has most context, so no span is rated twice.

    Args:
        starts, ends: [C] token positions in the window.
        scores: [C], -inf for what the head rules out.
        owner: [context tokens] number of the window in which each has most context (``window_of_most_context``).
    """
    first, last = starts - window.offset + window.begin, ends - window.offset + window.begin
    valid = np.isfinite(scores) & (first >= window.begin) & (last < window.end)
    valid &= (last >= first) & (last - first < limits.max_answer_length)
    places = np.flatnonzero(valid)
    places = places[owner[first[places]] == window.number]
    best = places[np.argsort(-scores[places], kind="stable")][: limits.n_best]
    return [ScoredSpan(float(scores[place]), int(first[place]), int(last[place])) for place in best]


def decode_question(
    spans: Iterable[ScoredSpan],
    null_scores: Sequence[float],
    context: str,
    characters: tuple[np.ndarray, np.ndarray],
    compares_null: bool,
    limits: DecodingLimits,
) -> Decoded:
    """The answers to one question from the spans of all its windows.

    Args:
        null_scores: of each window; the lowest counts, since one window with an answer is enough.
        context: the original text of the paragraph.
        characters: first character, and the one behind the last, of each context token.
        compares_null: whether null scores are on the scale of the spans' (independent head); the odds are then their
            difference to the best span's. Otherwise (joint head) they are the odds themselves.
    """
    texts: Dict[str, float] = {}
    for span in sorted(spans, key=lambda span: -span.score):
        text = context[characters[0][span.first] : characters[1][span.last]].strip()
        if text and text not in texts:
            texts[text] = span.score
            if len(texts) == limits.n_best:
                break
    null_odds = min(null_scores)
    if not texts:
        null_odds = NO_SPAN_ODDS
    elif compares_null:
        null_odds -= next(iter(texts.values()))
    return Decoded([ScoredText(text, score) for text, score in texts.items()], null_odds)
