"""Scores of probes against scikit-learn and a count by hand."""

import pytest
import torch
from sklearn.dummy import DummyClassifier
from sklearn.metrics import accuracy_score, f1_score

from amos_fairseq.probing.scores import is_semeval, majority_scores, micro_f1, semeval_macro_f1


def test_micro_f1_equals_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    predicted, labels = (torch.rand(50, 4, generator=generator) > threshold for threshold in (0.6, 0.7))
    expected = f1_score(labels.numpy(), predicted.numpy(), average="micro")
    assert micro_f1(predicted, labels) == pytest.approx(expected)
    # Two labels that training has not seen: a further column that is never predicted.
    more = torch.zeros(50, 1, dtype=torch.bool)
    unseen = more.clone()
    unseen[:2] = True
    gold, found = torch.cat([labels, unseen], 1), torch.cat([predicted, more], 1)
    expected = f1_score(gold.numpy(), found.numpy(), average="micro")
    assert micro_f1(predicted, labels, num_impossible=2) == pytest.approx(expected)
    assert micro_f1(more, more) == 0


def test_the_most_frequent_label_equals_scikit_learn():
    """With one label a target, micro-F1 is the accuracy. Other, the answer for relations, is left out of their score."""
    train, gold = ["b", "a", "b", "c", "a"], ["c", "a", "b", "a", "unseen"]
    dummy = DummyClassifier(strategy="most_frequent").fit(train, train)  # the first by name of a and b
    expected = accuracy_score(gold, dummy.predict(gold))
    assert majority_scores([[one] for one in train], [[one] for one in gold]) == {"micro_f1": pytest.approx(expected)}
    # Several labels or none: a, the answer, is right for two of four targets, which have three labels.
    assert majority_scores([["a", "b"], ["a"], []], [["a", "b"], ["a"], [], []]) == {"micro_f1": pytest.approx(4 / 7)}
    relations = [["Other"], ["Other"], ["Cause-Effect(e1,e2)"]]
    assert majority_scores(relations, relations) == {"micro_f1": pytest.approx(2 / 3), "semeval_macro_f1": 0}
    assert majority_scores(relations[1:] + relations[2:], relations)["semeval_macro_f1"] == pytest.approx(2 / 4)


def test_semeval_score_by_hand():
    """Cause-Effect: 1 correct of 3 gold and 3 predicted, one of both in the wrong direction: F1 = 2/6.
    Message-Topic: 1 correct of 2 gold (one without a prediction) and 2 predicted: F1 = 2/4. Other is left out.
    """
    gold_and_predicted = [
        ("Cause-Effect(e1,e2)", "Cause-Effect(e1,e2)"),
        ("Cause-Effect(e2,e1)", "Cause-Effect(e1,e2)"),
        ("Cause-Effect(e2,e1)", "Other"),
        ("Message-Topic(e1,e2)", "Message-Topic(e1,e2)"),
        ("Message-Topic(e2,e1)", None),
        ("Other", "Cause-Effect(e1,e2)"),
        ("Other", "Message-Topic(e1,e2)"),
        ("Other", "Other"),
    ]
    gold, predicted = zip(*gold_and_predicted, strict=True)
    assert semeval_macro_f1(gold, predicted) == pytest.approx((2 / 6 + 2 / 4) / 2)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(["Cause-Effect(e2,e1)", "Other"], True), (["NOUN", "Other"], False), (["Cause-Effect(e2,e1)"], False)],
)
def test_labels_of_semeval_are_recognized(labels: list[str], expected: bool):
    assert is_semeval(labels) == expected
