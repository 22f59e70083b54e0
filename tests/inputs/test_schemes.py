"""Notations of spans, by hand; spans and scores by conlleval's rules: by hand, naively, and against seqeval."""

import itertools
import random
import re
from collections import Counter

import pytest
from sklearn.metrics import classification_report

from amos_fairseq.inputs.schemes import count, name_of_notation, notation_of, scores, scores_by_name, spans_of

# Labels of a data set, the same in IOB or IOBES, and the name of the notation; a label that does not fit is missing.
NOTATIONS = [
    ("O B-NP I-NP", "O B-NP I-NP", "IOB"),
    ("O I-PER", "O I-PER", "IOB"),  # IOB1
    ("S-LOC O", "S-LOC O", "IOBES"),
    ("B-A-B I-A-B O", "B-A-B I-A-B O", "IOB"),
    ("O B-PER I-PER L-PER U-PER", "O B-PER I-PER E-PER S-PER", "BILOU"),
    ("O B I", "O B I", "IOB"),
    ("B I E S", "B I E S", "IOBES"),  # words of Chinese
]
CLASSES = ["O", "NOUN VERB", "NN -LRB- O", "B- O", "n v u m w", "N V O A E S L U", "S O", "B-NP NOUN VERB DET ADJ"]
CLASSES += ["O PER LOC", "O B_PER I_PER", "O PER-B PER-I", "o b-per i-per"]
UNFIT = {"O B-PER I-PER label": "label", "B-A B-A B-A NOUN": "NOUN", "0 0 0 B-A I-A": "0", "O B-X I-X W-X": "W-X"}


@pytest.mark.parametrize(("labels", "expected", "name"), NOTATIONS)
def test_notations_by_hand(labels, expected, name):
    notation = notation_of(labels.split())
    assert [notation[label] for label in labels.split()] == expected.split()
    assert name_of_notation(labels.split()) == name


def test_classes_and_labels_that_do_not_fit():
    assert not [labels for labels in CLASSES if notation_of(labels.split())]
    for labels, unfit in UNFIT.items():
        assert set(labels.split()) - notation_of(labels.split()).keys() == {unfit}


def naive_spans(labels: list[str]) -> list[tuple[str, int, int]]:
    """The spans of each type by a pattern of the marks of its words; a word of another type is no mark."""
    found = []
    for kind in {label.partition("-")[2] for label in labels}:
        marks = "".join(label[0] if label.partition("-")[2] == kind else "." for label in labels)
        found += [(kind or "_", *match.span()) for match in re.finditer("[BI]I*E?|[ES]", marks)]
    return sorted((kind, start, end - 1) for kind, start, end in found)


def random_labels() -> list[list[str]]:
    draw, every = random.Random(5), ["O", *"BIES", *(f"{mark}-{kind}" for mark in "BIES" for kind in ("X", "Y-Z"))]
    return [draw.choices(every, k=draw.randint(1, 8)) for _ in range(3000)]


def test_spans_of_any_labels_are_those_of_a_naive_pattern():
    for labels in random_labels():
        assert sorted(spans_of(labels)) == naive_spans(labels), labels


@pytest.mark.filterwarnings("ignore")
def test_spans_and_scores_are_those_of_seqeval():
    metrics = pytest.importorskip("seqeval.metrics")
    from seqeval.metrics.sequence_labeling import get_entities

    sentences = random_labels()
    assert [spans_of(labels) for labels in sentences] == [get_entities(labels) for labels in sentences]
    pairs = [(gold, random.Random(0).sample(gold, len(gold))) for gold in sentences]
    totals = sum((count(gold, predicted, True) for gold, predicted in pairs), Counter())
    for name in ("f1", "precision", "recall"):
        expected = getattr(metrics, f"{name}_score")(*map(list, zip(*pairs, strict=True)))
        assert scores(totals)[name] == pytest.approx(100 * expected, rel=1e-12)
    assert 0 < scores(totals)["f1"] < 100


def test_scores_of_each_name():
    """Types of spans by hand, labels of words by scikit-learn; what is found and never there has a row."""
    pairs = [("B-PER I-PER O B-LOC", "B-PER I-PER O B-PER"), ("B-LOC O O", "B-LOC O B-X"), ("I-LOC O", "O")]
    found = scores_by_name([(gold.split(), predicted.split()) for gold, predicted in pairs], True)
    third = pytest.approx(100 / 3)
    assert found == {
        "LOC": {"precision": 100, "recall": third, "f1": 50, "number": 3},
        "PER": {"precision": 50, "recall": 100, "f1": pytest.approx(200 / 3), "number": 1},
        "X": {"precision": 0, "recall": 0, "f1": 0, "number": 0},
    }
    pairs = [(gold, random.Random(0).sample(gold, len(gold))) for gold in random_labels()]
    words = (list(itertools.chain.from_iterable(each)) for each in zip(*pairs, strict=True))
    expected = classification_report(*words, output_dict=True)
    for name, values in scores_by_name(pairs, False).items():
        of_name = expected[name]
        assert values["number"] == of_name["support"]
        for score, key in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
            assert values[score] == pytest.approx(100 * of_name[key])


@pytest.mark.parametrize(
    ("labels", "iobes"),
    [
        ("O B-A I-A I-A O", "O B-A I-A E-A O"),
        ("B-A B-A I-B", "S-A S-A S-B"),
        ("I-A I-A I-B O I-A", "B-A E-A S-B O S-A"),  # IOB1
        ("B-A I-A B-A", "B-A E-A S-A"),
        ("B I I O B", "B I E O S"),
        ("O", "O"),
    ],
)
def test_iob_and_iobes_mark_the_same_spans(labels, iobes):
    assert spans_of(iobes.split()) == spans_of(labels.split())


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
