"""Scores of labels: accuracy of words, and F1 of the spans that IOB labels mark."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

# O, or the place in a span and the span's type: IOB1 (CoNLL-2003), IOB2 (CoNLL-2000) and IOBES.
_SPAN_LABEL = re.compile(r"O|[BIES]-.+")
OUTSIDE = "O"


def spans_of(labels: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, last word) of each span, by the rules of conlleval in the implementation of `seqeval`.

    The first hyphen of a label separates the type.
    """
    from seqeval.metrics.sequence_labeling import get_entities  # imports scikit-learn, which takes a second

    return get_entities(list(labels))


def mark_spans(labels: Iterable[str]) -> bool:
    """Return whether the labels of a data set mark spans, and are not one class a word."""
    labels = set(labels)
    return bool(labels - {OUTSIDE}) and all(map(_SPAN_LABEL.fullmatch, labels))


def count(gold: Sequence[str], predicted: Sequence[str], has_spans: bool) -> Counter[str]:
    """Count what is right in one sentence; the sums over sentences give :func:`scores`.

    Args:
        predicted: of the first words; the others, which the model did not read, are wrong. They are outside of all spans.
        has_spans: count spans too. A span is right if its type and both its ends are. Spans begin and end by the rules of the
            official conlleval (:func:`spans_of`): also where the labels are not well-formed.

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


def to_bioes(labels: Sequence[str]) -> list[str]:
    """Return the labels of a sentence with the same spans in BIOES: ``S-`` marks a span of one word, ``E-`` the last word."""
    encoded = [OUTSIDE] * len(labels)
    for kind, first, last in spans_of(labels):
        encoded[first : last + 1] = [f"I-{kind}"] * (last + 1 - first)
        encoded[first] = f"B-{kind}"
        encoded[last] = f"{'S' if first == last else 'E'}-{kind}"
    return encoded
