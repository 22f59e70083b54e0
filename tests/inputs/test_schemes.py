"""Notations of spans, by hand and against seqeval's own reading of each scheme; scores by conlleval's rules, by hand."""

import random
from collections import Counter

import pytest

from amos_fairseq.inputs.schemes import (
    count,
    describe,
    encode_spans,
    marks_ends,
    notation_of,
    scores,
    spans_of,
)

# Labels of a data set, and the same in IOB or IOBES; a label that does not fit is missing.
CONVERTED = [
    ("O B-NP I-NP", "O B-NP I-NP"),
    ("O I-PER", "O I-PER"),  # IOB1
    ("S-LOC O", "S-LOC O"),
    ("B-A-B I-A-B O", "B-A-B I-A-B O"),
    ("O B-PER I-PER L-PER U-PER", "O B-PER I-PER E-PER S-PER"),  # BILOU
    ("O B-PER M-PER E-PER S-PER", "O B-PER I-PER E-PER S-PER"),  # BMES
    ("O B-PER M-PER E-PER W-PER", "O B-PER I-PER E-PER S-PER"),  # BMEWO
    ("O B_PER I_PER", "O B-PER I-PER"),
    ("o b-per i-per", "O B-per I-per"),
    ("O PER-B PER-I LOC-B", "O B-PER I-PER B-LOC"),
    ("O B\u2013PER I\u2212PER", "O B-PER I-PER"),  # a dash and a minus sign
    ("O B|PER I|PER", "O B-PER I-PER"),
    ("O B/PER", "O B-PER"),
    ("O PER:B PER:I", "O B-PER I-PER"),
    ("O b.per.x i.per.x", "O B-per.x I-per.x"),
    ("Outside Begin-PER Inside-PER BEGINNING_LOC", "O B-PER I-PER B-LOC"),
    ("O O O END_DATE LAST-NAME", "O O O I-END_DATE I-LAST-NAME"),
    ("O B I", "O B I"),
    ("B M E S", "B I E S"),  # words of Chinese
    ("O O O PER LOC", "O O O I-PER I-LOC"),  # IO
    ("O O O COMMA label", "O O O I-COMMA I-label"),
]
CLASSES = ["O", "NOUN VERB", "NN -LRB- O", "B- O", "n v u m w", "N V O A E S L U", "S O", "B-NP NOUN VERB DET ADJ"]
CLASSES += ["S|sg E|pl B|x"]
UNFIT = {
    "O B-PER I-PER label": "label",
    "O O O B-PER MISC MISC": "MISC",
    "B-A B-A B-A NOUN": "NOUN",
    "0 0 0 B-A I-A": "0",
}


@pytest.mark.parametrize(("labels", "expected"), CONVERTED)
def test_notations_by_hand(labels, expected):
    notation = notation_of(Counter(labels.split()))
    assert [notation[label] for label in labels.split()] == expected.split()
    is_told = set(labels.split()) != set(expected.split())
    assert bool(describe(notation)) == is_told


def test_classes_and_labels_that_do_not_fit():
    assert {labels for labels in CLASSES if notation_of(Counter(labels.split()))} == {"O"}
    for labels, unfit in UNFIT.items():
        counts = Counter(labels.split())
        assert counts.keys() - notation_of(counts).keys() == {unfit}


def test_the_description_names_the_notation_and_four_labels():
    labels = [f"L-T{number}" for number in range(6)]
    notation = notation_of(Counter([*labels, "O"]))
    converted = ", ".join(f"L-T{number} is read as E-T{number}" for number in range(4)) + ", ..."
    assert describe(notation) == f"BILOU labels, scored as spans: {converted}"
    named = {"BMEWO": "O B-X M-X W-X", "BMES": "O B-X M-X", "IOBES": "O X-S X-I", "IOB": "o b-per", "IO": "O O END"}
    for name, labels in named.items():
        assert describe(notation_of(Counter(labels.split()))).startswith(f"{name} labels, ")


def well_formed(draw: random.Random, first: str, inside: str, last: str, single: str, is_suffix: bool) -> list[str]:
    """The labels of a random sentence in the notation of these marks."""
    labels: list[str] = []
    for _ in range(draw.randint(1, 6)):
        size = draw.randint(0, 4)
        marks = [first, *[inside] * (size - 2), last] if size > 1 else [single] * size
        kind = draw.choice(["X", "Y"])
        labels += ["O"] * draw.randint(0, 2) + [f"{kind}-{mark}" if is_suffix else f"{mark}-{kind}" for mark in marks]
    return labels or ["O"]


@pytest.mark.parametrize(
    ("marks", "scheme", "is_suffix"),
    [("BIIB", "IOB2", False), ("BIES", "IOBES", False), ("BILU", "BILOU", False), ("BIIB", "IOB2", True)],
)
def test_scores_are_those_of_seqeval_in_the_own_scheme(marks, scheme, is_suffix):
    """Of well-formed labels its strict mode, which knows the scheme, counts the same spans."""
    from seqeval import scheme as schemes
    from seqeval.metrics import f1_score

    draw, sentences = random.Random(5), []
    while len(sentences) < 100:
        one, other = (well_formed(draw, *marks, is_suffix) for _ in range(2))
        sentences.append((one[: len(other)], other[: len(one)]))
        if any(part[-1:] and part[-1][0 if not is_suffix else -1] in "BI" for part in sentences[-1]):
            sentences.pop()  # cut inside of a span
    notation = notation_of(Counter(label for pair in sentences for labels in pair for label in labels))
    totals = Counter()
    for gold, predicted in sentences:
        totals.update(count([notation[label] for label in gold], [notation[label] for label in predicted], True))
    gold, predicted = map(list, zip(*sentences, strict=True))
    expected = f1_score(gold, predicted, mode="strict", scheme=getattr(schemes, scheme), suffix=is_suffix)
    assert 0 < expected < 1
    assert scores(totals)["f1"] == pytest.approx(100 * expected)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("O B-A I-A I-A O", "O B-A I-A E-A O"),
        ("B-A B-A I-B", "S-A S-A S-B"),
        ("I-A I-A I-B O I-A", "B-A E-A S-B O S-A"),  # IOB1
        ("B-A I-A B-A", "B-A E-A S-A"),
        ("B I I O B", "B I E O S"),
        ("O", "O"),
    ],
)
def test_bioes_by_hand(labels, expected):
    assert encode_spans(labels.split(), with_ends=True) == expected.split()
    plain = encode_spans(labels.split(), with_ends=False)
    assert encode_spans(plain, with_ends=True) == expected.split()
    assert not marks_ends(plain)
    assert marks_ends(expected.split()) == (labels != "O")
    assert spans_of(expected.split()) == spans_of(labels.split()), "the spans stay"


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


def test_every_awkward_case_by_hand():
    sentences = [(gold.split(), predicted.split()) for gold, predicted in SENTENCES]
    expected = {"words": WORDS, "right_words": RIGHT_WORDS}
    expected |= {"spans": SPANS, "found_spans": FOUND, "right_spans": RIGHT}
    total = Counter()
    for gold, predicted in sentences:
        total.update(count(gold, predicted, True))
    assert total == expected
    found = scores(expected)
    precision, recall = RIGHT / FOUND, RIGHT / SPANS
    assert found["precision"] == pytest.approx(100 * precision)
    assert found["recall"] == pytest.approx(100 * recall)
    assert found["f1"] == pytest.approx(100 * 2 * precision * recall / (precision + recall))
    assert found["accuracy"] == pytest.approx(100 * RIGHT_WORDS / WORDS)
    # Types keep their hyphens, and may be missing.
    assert spans_of(["B-A-X-", "I-A-X-", "O", "S--"]) == [("A-X-", 0, 1), ("-", 3, 3)]
    assert [span[1:] for span in spans_of(["B", "I", "O", "S", "B", "E"])] == [(0, 1), (3, 3), (4, 5)]


def test_cut_words_are_wrong_and_outside_of_spans_and_nothing_found_is_zero():
    assert count(["X", "Y", "X"], ["X", "X"], False) == {"words": 3, "right_words": 1}
    gold = ["B-X", "I-X", "O", "B-X"]
    expected = {"words": 4, "right_words": 1, "spans": 2, "found_spans": 1, "right_spans": 0}
    assert count(gold, ["B-X"], True) == expected
    assert scores(count(["O"], ["O"], True)) == {"f1": 0, "precision": 0, "recall": 0, "accuracy": 100}
    assert scores(count(["X"], ["Y"], False)) == {"accuracy": 0}
