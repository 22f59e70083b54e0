"""Scores of edge probing: micro-F1, and the macro-F1 of SemEval-2010 task 8."""

import re
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

MICRO_F1 = "micro_f1"
SEMEVAL_MACRO_F1 = "semeval_macro_f1"
OTHER = "Other"
_DIRECTED = re.compile(r"(.+)\((e1,e2|e2,e1)\)")


def micro_f1(predicted: Tensor, labels: Tensor, num_impossible: int = 0) -> float:
    """Return F1 = 2 TP / (2 TP + FP + FN) over all targets and labels together, from 0 to 1; 0 without any label.

    Args:
        predicted, labels: [N,C] bool.
        num_impossible: further labels that hold and cannot be predicted, because training has not seen them.
    """
    true_positives = int((predicted & labels).sum())
    total = int(predicted.sum()) + int(labels.sum()) + num_impossible
    return 2 * true_positives / total if total else 0.0


def majority_scores(train: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return the scores of a classifier that reads nothing and always answers the most frequent label of training.

    Args:
        train, gold: the labels of each target of the training split and of the scored split.

    Returns:
        The scores from 0 to 1 by metric, with :data:`SEMEVAL_MACRO_F1` for the labels of that task.
    """
    counts = Counter(label for labels in train for label in labels)
    answer = min(counts, key=lambda label: (-counts[label], label))
    correct = sum(answer in labels for labels in gold)
    total = len(gold) + sum(map(len, gold))
    scores = {MICRO_F1: 2 * correct / total if total else 0.0}
    if is_semeval(list(counts)) and all(len(labels) == 1 for labels in gold):
        scores[SEMEVAL_MACRO_F1] = semeval_macro_f1([one for (one,) in gold], [answer] * len(gold))
    return scores


def is_semeval(labels: Sequence[str]) -> bool:
    """Return whether these are the labels of SemEval-2010 task 8: relations with a direction, and "Other"."""
    return OTHER in labels and all(label == OTHER or _DIRECTED.fullmatch(label) for label in labels)


def semeval_macro_f1(gold: Sequence[str], predicted: Sequence[str | None]) -> float:
    """Return the official score of SemEval-2010 task 8, from 0 to 1: "(9+1)-way evaluation with directionality".

    For each relation but "Other", a prediction is correct if relation and direction are. Precision divides by all predictions
    of the relation and recall by all its gold labels, in either direction: a wrong direction counts in both. The score is the
    mean of the relations' F1 (not the F1 of the means).

    Args:
        gold: such as ``Cause-Effect(e2,e1)``; its relations are those of the mean.
        predicted: None for a target without a prediction, which is wrong.
    """
    relations = sorted({relation_of(label) for label in gold} - {OTHER})
    scores = []
    for relation in relations:
        num_gold = sum(relation_of(label) == relation for label in gold)
        num_predicted = sum(label is not None and relation_of(label) == relation for label in predicted)
        pairs = zip(gold, predicted, strict=True)
        correct = sum(label == guess and relation_of(label) == relation for label, guess in pairs)
        scores.append(2 * correct / (num_gold + num_predicted))
    return sum(scores) / len(scores) if scores else 0.0


def relation_of(label: str) -> str:
    """Return ``Cause-Effect`` of ``Cause-Effect(e1,e2)``."""
    directed = _DIRECTED.fullmatch(label)
    return directed.group(1) if directed else label
