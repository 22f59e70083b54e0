"""How labels mark spans, and the scores of labels: accuracy of words, and precision, recall and F1 of spans.

``B-TYPE`` is the first word of a span, ``I-TYPE`` another, ``E-TYPE`` its last, ``S-TYPE`` its only word, and ``O`` is outside:
IOB1 (CoNLL-2003), IOB2 (CoNLL-2000) and IOBES. BILOU, with ``L`` for the last and ``U`` for the only word, is read as IOBES.
The type may be missing.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

OUTSIDE = "O"
_MARKS = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S"}


def notation_of(labels: Iterable[str]) -> dict[str, str]:
    """Return the IOB or IOBES label for each label that marks a span or is outside of all; nothing if the labels are one class
    for each word, such as parts of speech: if more of them have no mark than have one.

    Single letters are marks only if ``B`` is one of them: tag sets have letters too.
    """
    labels = set(labels)
    mark = re.compile("([BIESLU])(-.+|)" if "B" in labels else "([BIESLU])(-.+)")
    matches = {label: match for label in labels - {OUTSIDE} if (match := mark.fullmatch(label))}
    if not matches or len(labels - {OUTSIDE}) > 2 * len(matches):
        return {}
    outside = dict.fromkeys(labels & {OUTSIDE}, OUTSIDE)
    return outside | {label: _MARKS[match[1]] + match[2] for label, match in matches.items()}


def name_of_notation(labels: Iterable[str]) -> str:
    marks = {label[0] for label in labels}
    return "BILOU" if marks & {"L", "U"} else "IOBES" if marks & {"E", "S"} else "IOB"


def spans_of(labels: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, last word) of each span, by the rules of conlleval.

    ``I-`` and ``E-`` continue a span of the same type that ``B-`` or ``I-`` leaves open; every other label but ``O`` begins
    one. The first hyphen of a label separates the type, which is ``_`` where there is none.
    """
    spans, start = [], None
    last_mark, last_type = OUTSIDE, ""
    for place, label in enumerate([*labels, OUTSIDE]):
        mark, _, span_type = label.partition("-")
        if mark in ("I", "E") and last_mark in ("B", "I") and span_type == last_type:
            last_mark = mark
            continue
        if start is not None:
            spans.append((last_type or "_", start, place - 1))
        start = None if mark == OUTSIDE else place
        last_mark, last_type = mark, span_type
    return spans


def count(gold: Sequence[str], predicted: Sequence[str], has_spans: bool) -> Counter[str]:
    """Count what is right in one sentence; the sums over sentences give ``scores``.

    Args:
        predicted: of the first words; the others, which the model did not read, are wrong. They are outside of all spans.
        has_spans: count spans too. A span is right if its type and both its ends are. Spans begin and end by the rules of the
            official conlleval (``spans_of`` in ``schemes.py``): also where the labels are not well-formed.

    Returns:
        ``words`` and ``right_words``; with ``has_spans`` also ``spans``, ``found_spans`` and ``right_spans``.
    """
    right = sum(label == prediction for label, prediction in zip(gold, predicted, strict=False))
    counts = Counter(words=len(gold), right_words=right)
    if has_spans:
        complete = [*predicted, *[OUTSIDE] * (len(gold) - len(predicted))]
        gold_spans, predicted_spans = set(spans_of(gold)), set(spans_of(complete))
        right_spans = len(gold_spans & predicted_spans)
        counts.update(spans=len(gold_spans), found_spans=len(predicted_spans), right_spans=right_spans)
    return counts


def scores(counts: Mapping[str, float]) -> dict[str, float]:
    """Return scores in percent from sums of ``count``: ``accuracy``; with spans also ``f1``, ``precision``, ``recall``.

    A ratio of 0 and 0 is 0, as in conlleval.
    """

    def percent(part: float, whole: float) -> float:
        return 100.0 * float(part) / float(whole) if whole else 0.0

    accuracy = {"accuracy": percent(counts["right_words"], counts["words"])}
    if "spans" not in counts:
        return accuracy
    right, predicted, gold = (counts[name] for name in ("right_spans", "found_spans", "spans"))
    precision, recall = percent(right, predicted), percent(right, gold)
    return {"f1": percent(2 * right, predicted + gold), "precision": precision, "recall": recall, **accuracy}


def items_of(labels: Sequence[str], has_spans: bool) -> list[tuple[str, int, int]]:
    """Return the spans, or where labels mark none each word as one."""
    return spans_of(labels) if has_spans else [(label, place, place) for place, label in enumerate(labels)]


def scores_by_name(
    pairs: Iterable[tuple[Sequence[str], Sequence[str]]], has_spans: bool
) -> dict[str, dict[str, float]]:
    """Return the ``precision``, ``recall``, ``f1`` and ``number`` of each type of span, or of each label of words, of ``pairs``
    of the arguments of ``count``."""
    counts: dict[str, Counter[str]] = {}
    for pair in pairs:
        gold, found = (set(items_of(labels, has_spans)) for labels in pair)
        for key, items in (("spans", gold), ("found_spans", found), ("right_spans", gold & found)):
            for name, _, _ in items:
                counts.setdefault(name, Counter(spans=0))[key] += 1
    names = ("precision", "recall", "f1")
    return {
        name: {score: scores(each)[score] for score in names} | {"number": each["spans"]}
        for name, each in sorted(counts.items())
    }


def main_score(has_spans: bool) -> str:
    """Return the name of the score that chooses a run: F1 of spans, or accuracy."""
    return "f1" if has_spans else "accuracy"
