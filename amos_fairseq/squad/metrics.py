"""Exact match and F1 as SQuAD's official scripts count them (Rajpurkar et al., 2016, section 6.1, and 2018, section 5).

The same numbers as ``squad_evaluate`` of ``transformers``, which removed it in version 5.19 or 5.20 (a test compares them).
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Dict, List, Optional, Tuple

from amos_fairseq.errors import UserError
from amos_fairseq.squad.official_files import Question

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and articles, words separated by single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(gold: str, predicted: str) -> float:
    """1.0 where both are equal after normalization, else 0.0."""
    return float(normalize_answer(gold) == normalize_answer(predicted))


def f1(gold: str, predicted: str) -> float:
    """Harmonic mean of precision and recall over the words of both, each as often as it occurs.

    Where one of them has no word the score is 1.0 if neither has, else 0.0.
    """
    gold_words, words = (normalize_answer(text).split() for text in (gold, predicted))
    if not gold_words or not words:
        return float(gold_words == words)
    common = sum((Counter(gold_words) & Counter(words)).values())
    return 2 * common / (len(gold_words) + len(words))


def evaluate(
    questions: Iterable[Question],
    predictions: Dict[str, str],
    null_odds: Optional[Dict[str, float]] = None,
    null_threshold: float = float("inf"),
) -> Tuple[Dict[str, float], int]:
    """Scores of one prediction file.

    Args:
        null_odds: how likely each question has no answer, on any scale; with them the best thresholds are searched.
        null_threshold: a question whose odds are above it counts as not answered, whatever is predicted for it. The
            official script's own default, 1.0, is meant for probabilities; ours takes predictions as they stand.

    Returns:
        ``exact``, ``f1`` (percent) and ``total``; the same with ``HasAns_`` and ``NoAns_`` where there are such
        questions; with ``null_odds`` also ``best_exact``, ``best_exact_thresh``, ``best_f1``, ``best_f1_thresh``. And
        the number of questions without a prediction, which no score counts (as in the official script of 2.0).

    Raises:
        UserError: no question has a prediction, or one that has lacks its null odds.
    """
    questions = list(questions)
    answered = {question.id: golds_of(question) for question in questions if question.id in predictions}
    has_answer = {question.id: bool(question.answers) for question in questions}
    if not answered:
        raise UserError("no question of the data set has a prediction: do both files belong together?")
    if null_odds is not None:
        without = next((number for number in answered if number not in null_odds), None)
        if without is not None:
            raise UserError(f"the question {without} has a prediction, but no null odds: give the file of the same run")
    scores: Dict[str, float] = {}
    raw = {}
    for name, measure in (("exact", exact_match), ("f1", f1)):
        raw[name] = {number: best_of(measure, golds, predictions[number]) for number, golds in answered.items()}
    groups = {
        "": list(answered),
        "HasAns_": [number for number in answered if has_answer[number]],
        "NoAns_": [number for number in answered if not has_answer[number]],
    }
    for prefix, numbers in groups.items():
        if not numbers:
            continue
        for name, of_name in raw.items():
            counted = (
                float(not has_answer[number])
                if null_odds is not None and null_odds[number] > null_threshold
                else of_name[number]
                for number in numbers
            )
            scores[f"{prefix}{name}"] = 100.0 * sum(counted) / len(numbers)
        scores[f"{prefix}total"] = len(numbers)
    if null_odds is not None:
        for name, of_name in raw.items():
            best, threshold = best_threshold(of_name, has_answer, predictions, null_odds)
            scores[f"best_{name}"], scores[f"best_{name}_thresh"] = best, threshold
    return scores, len(questions) - len(answered)


def golds_of(question: Question) -> List[str]:
    """The texts that count as right: those with a word in them, or the empty text where there is none."""
    return [answer.text for answer in question.answers if normalize_answer(answer.text)] or [""]


def best_of(measure: Callable[[str, str], float], golds: List[str], predicted: str) -> float:
    return max(measure(gold, predicted) for gold in golds)


def best_threshold(
    scores: Dict[str, float], has_answer: Dict[str, bool], predictions: Dict[str, str], null_odds: Dict[str, float]
) -> Tuple[float, float]:
    """The largest mean score in percent, and the null odds up to which predictions are then taken.

    Questions are answered one after another, from the lowest odds on; each answer adds its score, or takes away what an
    unanswered question without an answer scores.
    """
    current = best = float(sum(not has_answer[number] for number in scores))
    threshold = 0.0
    for number in sorted(null_odds, key=lambda number: null_odds[number]):
        if number not in scores:
            continue
        if has_answer[number]:
            current += scores[number]
        elif predictions[number]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[number]
    return 100.0 * best / len(scores), threshold
