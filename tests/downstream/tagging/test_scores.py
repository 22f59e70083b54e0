"""Scores of labels against a second writing of conlleval, which reads two streams of labels and keeps no spans."""

import random

import pytest

from amos_fairseq.downstream.tagging.schemes import count, scores, spans_of

# gold, predicted. CoNLL-2000 is IOB2 (B- begins every span), CoNLL-2003 in the original IOB1 (B- only between neighbours).
SENTENCES = [
    ("B-NP I-NP O B-VP", "B-NP I-NP O B-VP"),  # 2 spans, 2 found, 2 right
    ("B-NP B-NP", "B-NP I-NP"),  # 2, 1, 0: one span instead of two
    ("B-NP I-NP", "B-NP B-NP"),  # 1, 2, 0
    ("I-NP I-NP B-NP I-VP", "B-NP I-NP B-NP B-VP"),  # 3, 3, 3: the same spans in IOB1 and IOB2
    ("O I-NP O", "O B-NP O"),  # 1, 1, 1: I- after O begins a span
    ("B-NP I-VP", "B-NP I-NP"),  # 2, 1, 0: another type begins a span, also by I-
    ("B-NP", "B-VP"),  # 1, 1, 0: the type counts
    ("B-NP I-NP I-NP", "O I-NP I-NP"),  # 1, 1, 0: the first word is missing
    ("B-NP", "O"),  # 1, 0, 0; a span does not continue in the next sentence:
    ("I-NP", "I-NP"),  # 1, 1, 1
    ("O O", "O O"),
    ("B-A-B I-A-B", "B-A-B I-A"),  # 1, 2, 0: only the first hyphen separates
    ("B-A-X", "B-C-X"),  # 1, 1, 0: and the whole type counts
    ("B-A-X I-C-X", "B-A-X I-A-X"),  # 2, 1, 0
]
SPANS, FOUND, RIGHT = 19, 17, 7
WORDS, RIGHT_WORDS = 30, 18


def conlleval(sentences) -> dict[str, float]:
    """The counters of the official script: a span is open in both streams from its common beginning to its common end.

    Two words are in one span if both have its type and the second says I or E after B or I.
    """
    counts = dict.fromkeys(("words", "right_words", "spans", "found_spans", "right_spans"), 0)
    for gold, predicted in sentences:
        is_open, last = False, ("O", "O")
        for now in [*zip(gold, predicted, strict=True), ("O", "O")]:
            joined = [a[0] in "BI" and b[0] in "IE" and a[1:] == b[1:] for a, b in zip(last, now, strict=True)]
            if is_open and not (joined[0] and joined[1]):
                counts["right_spans"] += not joined[0] and not joined[1]
                is_open = False
            begins = [label != "O" and not old for label, old in zip(now, joined, strict=True)]
            counts["spans"] += begins[0]
            counts["found_spans"] += begins[1]
            is_open = is_open or (begins[0] and begins[1] and now[0][1:] == now[1][1:])
            last = now
        counts["words"] += len(gold)
        counts["right_words"] += sum(map(str.__eq__, gold, predicted))
    return counts


def counted(sentences) -> dict[str, int]:
    total = count([], [], True)
    for gold, predicted in sentences:
        total.update(count(gold, predicted, True))
    return {name: total[name] for name in ("words", "right_words", "spans", "found_spans", "right_spans")}


def test_every_awkward_case_by_hand():
    sentences = [(gold.split(), predicted.split()) for gold, predicted in SENTENCES]
    expected = {"words": WORDS, "right_words": RIGHT_WORDS}
    expected |= {"spans": SPANS, "found_spans": FOUND, "right_spans": RIGHT}
    assert counted(sentences) == expected
    assert conlleval(sentences) == expected
    found = scores(expected)
    precision, recall = RIGHT / FOUND, RIGHT / SPANS
    assert found["precision"] == pytest.approx(100 * precision)
    assert found["recall"] == pytest.approx(100 * recall)
    assert found["f1"] == pytest.approx(100 * 2 * precision * recall / (precision + recall))
    assert found["accuracy"] == pytest.approx(100 * RIGHT_WORDS / WORDS)
    # Types keep their hyphens.
    assert spans_of(["B-A-X-", "I-A-X-", "O", "S--"]) == [("A-X-", 0, 1), ("-", 3, 3)]


@pytest.mark.parametrize("places", ["BI", "I", "BIES"])
def test_random_labels_of_every_scheme(places):
    from seqeval.metrics import f1_score

    draw = random.Random(3)
    labels = ["O", "O", *(f"{place}-{kind}" for place in places for kind in ("X", "Y"))]
    for _ in range(50):
        sizes = [draw.randint(1, 12) for _ in range(20)]
        sentences = [(draw.choices(labels, k=size), draw.choices(labels, k=size)) for size in sizes]
        counts = counted(sentences)
        assert counts == conlleval(sentences)
        gold, predicted = map(list, zip(*sentences, strict=True))
        assert scores(counts)["f1"] == pytest.approx(100 * f1_score(gold, predicted))


def test_cut_words_are_wrong_and_outside_of_spans():
    assert count(["X", "Y", "X"], ["X", "X"], False) == {"words": 3, "right_words": 1}
    gold = ["B-X", "I-X", "O", "B-X"]
    expected = {"words": 4, "right_words": 1, "spans": 2, "found_spans": 1, "right_spans": 0}
    assert count(gold, ["B-X"], True) == expected


def test_nothing_found_is_zero():
    assert scores(count(["O"], ["O"], True)) == {"f1": 0, "precision": 0, "recall": 0, "accuracy": 100}
    assert scores(count(["X"], ["Y"], False)) == {"accuracy": 0}
