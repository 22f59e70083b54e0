"""How labels mark spans: the notations of data sets, converted to the one that conlleval and seqeval read.

There ``B-TYPE`` is the first word of a span, ``I-TYPE`` another, ``E-TYPE`` its last, ``S-TYPE`` its only word, and ``O`` is
outside: IOB1 (CoNLL-2003), IOB2 (CoNLL-2000) and IOBES stay as they are. The scores are accuracy of words and F1 of spans.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

OUTSIDE = "O"
_SEPARATORS = "-_\u2010-\u2014\u2212"  # and the hyphens, dashes and minus signs of word processors
MOST = 0.9  # of the words
SECOND_LABEL = re.compile("[|,;+](O$|[BIESMLUW][-_])")  # in a label of spans that stands for two
# BILOU has L for the last and U for the only word; BMES and BMEWO have M inside and W for the only word.
_MARKS = {"B": "B", "I": "I", "E": "E", "S": "S", "M": "I", "L": "E", "U": "S", "W": "S"}


def _with_prefix(label: str, separators: str) -> str | None:
    match = re.fullmatch(f"([BIESMLUW])[{separators}](.+)", label, re.IGNORECASE)
    return match and f"{_MARKS[match[1].upper()]}-{match[2]}"


def _with_suffix(label: str, separators: str) -> str | None:
    match = re.fullmatch(f"(.+)[{separators}]([BIESMLUW])", label, re.IGNORECASE)
    return match and f"{_MARKS[match[2].upper()]}-{match[1]}"


def _with_word(label: str, separators: str) -> str | None:
    match = re.fullmatch(f"(Begin(?:ning)?|Inside|End|Single)[{separators}](.+)", label, re.IGNORECASE)
    return match and f"{match[1][0].upper()}-{match[2]}"


def _without_type(label: str, separators: str) -> str | None:
    return _MARKS.get(label)


def notation_of(counts: Mapping[str, int]) -> dict[str, str]:
    """Return the IOB or IOBES label for each label of a data set, or nothing if the labels are one class for each word, such as
    parts of speech. A label that does not fit the others is missing from the result. ``counts``: number of words of each label.

    Marks are a prefix or a suffix, in upper or lower case, separated by ``-`` or ``_``, or the whole label. Beside ``O``, also
    ``|``, ``/``, ``:`` or ``.`` separate them, which others use in parts of speech. Labels without any mark (IO) mark spans if
    ``O`` is the most frequent: neighbours with the same label are one span.
    """
    marked = {label: number for label, number in counts.items() if label.upper() not in (OUTSIDE, "OUTSIDE")}
    has_outside = len(marked) < len(counts)
    separators = f"{_SEPARATORS}|/:." if has_outside else _SEPARATORS
    outside = dict.fromkeys(counts.keys() - marked.keys(), OUTSIDE)
    most_are_outside = has_outside and sum(counts.values()) - sum(marked.values()) > max(marked.values(), default=0)
    best, most = {}, 0
    for convert in (_with_prefix, _with_suffix, _with_word, _without_type):
        found = {label: new for label in marked if (new := convert(label, separators))}
        if convert is _with_word and not any(new.startswith("I-") for new in found.values()):
            continue  # END_DATE is a type
        number = sum(marked[label] for label in found)
        # Single letters are marks only if they are nearly all labels: tag sets have letters too.
        if number > most and (convert is not _without_type or ("B" in found and number >= MOST * sum(marked.values()))):
            best, most = found, number
    if not best and most_are_outside:
        return outside | {label: f"I-{label}" for label in marked}
    # One other label, such as 0 for O, is a mistake too, however frequent it is.
    is_spans = most_are_outside or 2 * most >= sum(marked.values()) or len(marked) - len(best) == 1
    return outside | best if best and is_spans else {}


def describe(notation: Mapping[str, str]) -> str:
    """Return the notation and how its labels are converted, for a message; an empty text if they stay."""
    changed = [f"{old} is read as {new}" for old, new in sorted(notation.items()) if old != new]
    if not changed:
        return ""
    # What is in the label besides the type; of IO nothing.
    marks = {old.replace(new[2:], "", 1).strip(f"{_SEPARATORS}|/:.")[:1].upper() for old, new in notation.items()}
    known = (("BMEWO", "W"), ("BILOU", "LU"), ("BMES", "M"), ("IOBES", "ES"), ("IOB", "B"))
    name = next((name for name, letters in known if marks & set(letters)), "IO")
    return f"{name} labels, scored as spans: {', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''}"


def spans_of(labels: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, last word) of each span, by the rules of conlleval in the implementation of `seqeval`.

    The first hyphen of a label separates the type.
    """
    from seqeval.metrics.sequence_labeling import get_entities  # imports scikit-learn, which takes a second

    return get_entities(list(labels))


def marks_ends(labels: Iterable[str]) -> bool:
    """Return whether these labels are IOBES, and not IOB."""
    return any(label[:2] in ("E-", "S-") or label in ("E", "S") for label in labels)


def encode_spans(labels: Sequence[str], with_ends: bool) -> list[str]:
    encoded = [OUTSIDE] * len(labels)
    for kind, first, last in spans_of(labels):
        type_of = f"-{kind}" if "-" in labels[first] else ""  # seqeval calls spans without a type "_"
        encoded[first : last + 1] = [f"B{type_of}", *[f"I{type_of}"] * (last - first)]
        if with_ends:
            encoded[last] = f"{'S' if first == last else 'E'}{type_of}"
    return encoded


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
