"""Scores of labels: accuracy of words, and F1 of the spans that IOB labels mark."""

from collections import Counter
from collections.abc import Mapping, Sequence

from amos_fairseq.downstream.tagging.schemes import OUTSIDE, spans_of


def count(gold: Sequence[str], predicted: Sequence[str], has_spans: bool) -> Counter[str]:
    """Count what is right in one sentence; the sums over sentences give :func:`scores`.

    Args:
        predicted: of the first words; the others, which the model did not read, are wrong. They are outside of all spans.
        has_spans: count spans too. A span is right if its type and both its ends are. Spans begin and end by the rules of the
            official conlleval (``spans_of`` in ``schemes.py``): also where the labels are not well-formed.

    Returns:
        ``words`` and ``right_words``; with ``has_spans`` also ``spans``, ``found_spans`` and ``right_spans``.
    """
    right = sum(one == other for one, other in zip(gold, predicted, strict=False))
    counts = Counter(words=len(gold), right_words=right)
    if has_spans:
        complete = [*predicted, *[OUTSIDE] * (len(gold) - len(predicted))]
        spans, found = set(spans_of(gold)), set(spans_of(complete))
        counts.update(spans=len(spans), found_spans=len(found), right_spans=len(spans & found))
    return counts


def scores(counts: Mapping[str, float]) -> dict[str, float]:
    """Return scores in percent from sums of :func:`count`: ``accuracy``; with spans also ``f1``, ``precision``, ``recall``.

    A ratio of 0 and 0 is 0, as in conlleval.
    """

    def percent(part: float, whole: float) -> float:
        return 100.0 * float(part) / float(whole) if whole else 0.0

    accuracy = {"accuracy": percent(counts["right_words"], counts["words"])}
    if "spans" not in counts:
        return accuracy
    right, found, spans = (counts[name] for name in ("right_spans", "found_spans", "spans"))
    precision, recall = percent(right, found), percent(right, spans)
    return {"f1": percent(2 * right, found + spans), "precision": precision, "recall": recall, **accuracy}


def main_score(has_spans: bool) -> str:
    """Return the name of the score that chooses a run: F1 of spans, or accuracy."""
    return "f1" if has_spans else "accuracy"
