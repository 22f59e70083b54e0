"""Exact match and F1: cases by hand, a naive implementation, and the library's scores of random predictions."""

import argparse
import json
import random
import re
import string
from collections import Counter

import pytest
from synthetic_squad import write_json

from amos_fairseq.downstream.squad.official import evaluate, print_scores
from amos_fairseq.errors import UserError


@pytest.mark.parametrize(
    ("answers", "prediction", "exact", "f1"),
    [
        (["the Black Death"], "Black death.", 100, 100),
        (["an apple"], "Apple", 100, 100),
        (["theatre"], "the atre", 0, 0),
        (["U.S.A."], "USA", 100, 100),
        (["well-known man"], "well known man", 0, 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2) * 100),
        (["in the 10th century"], "10th century", 0, 80),
        (["10th century", "in the 10th century"], "10th century", 100, 100),
        (["a a b b"], "b b b", 0, 80),
        (["café"], "cafe", 0, 0),
        (["CAFÉ  au\u00a0lait"], "café au lait", 100, 100),
        (["中国"], "中国", 100, 100),
        (["“quoted”"], '"quoted"', 0, 0),
        ([], "", 100, 100),
        ([], "something", 0, 0),
        (["something"], "", 0, 0),
        (["the"], "", 100, 100),
    ],
)
def test_cases_by_hand(answers, prediction, exact, f1):
    """Articles, ASCII punctuation, case and repeated spaces are ignored; accents and typographic quotes are not.

    As in the official script, an answer that is only an article is empty.
    """
    scores = evaluate({"q": answers}, {"q": prediction})
    assert (scores["exact"], scores["f1"]) == (exact, pytest.approx(f1))


def naive_words(text: str) -> list[str]:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def naive_f1(gold: list[str], found: list[str]) -> float:
    if not gold or not found:
        return float(gold == found)
    same = sum((Counter(gold) & Counter(found)).values())
    return 0.0 if same == 0 else 2 * same / (len(gold) + len(found))


def naive_scores(questions, predictions) -> tuple[float, float]:
    exact = f1 = 0.0
    for name, answers in questions.items():
        golds = [words for answer in answers if (words := naive_words(answer))] or [[]]
        found = naive_words(predictions[name])
        exact += max(found == gold for gold in golds)
        f1 += max(naive_f1(gold, found) for gold in golds)
    return 100 * exact / len(questions), 100 * f1 / len(questions)


@pytest.fixture(scope="module")
def random_file():
    generator = random.Random(4)
    words = ["the", "a", "An", "cat", "Cat.", "dog", "x-y", "naïve", "3", "—", "!"]

    def text() -> str:
        return " ".join(generator.choices(words, k=generator.randint(0, 4)))

    questions = {f"q{i}": [text() for _ in range(generator.randint(0, 3))] for i in range(400)}
    predictions = {name: text() for name in questions}
    centres = [-40.0, -1.5, -0.1, 0.0, 0.2, 3.0, 55.5]
    odds = {name: generator.choice(centres) + generator.random() for name in questions}
    return questions, predictions, odds


def test_random_predictions_against_a_naive_implementation(random_file):
    questions, predictions, _ = random_file
    scores = evaluate(questions, predictions)
    assert (scores["exact"], scores["f1"]) == pytest.approx(naive_scores(questions, predictions))
    for prefix, chosen in (("HasAns", True), ("NoAns", False)):
        part = {name: answers for name, answers in questions.items() if bool(answers) == chosen}
        expected = naive_scores(part, predictions)
        assert (scores[f"{prefix}_exact"], scores[f"{prefix}_f1"]) == pytest.approx(expected)
        assert scores[f"{prefix}_total"] == len(part)
    assert not any(name.startswith("best") for name in scores)


def test_best_thresholds_by_exhaustive_search(random_file):
    """No threshold gives a better score than the reported one, which gives the reported score.

    The official search counts texts that normalise to nothing as answers: here there are none. A half of the answers is right.
    """
    questions, predictions, odds = random_file
    questions = {name: list(filter(naive_words, answers)) for name, answers in questions.items()}
    predictions = {name: text if naive_words(text) else "" for name, text in predictions.items()}
    predictions |= {name: answers[0] for name, answers in list(questions.items())[::2] if answers}
    scores = evaluate(questions, predictions, odds)
    single = {
        name: {text: naive_scores({name: answers}, {name: text}) for text in ("", predictions[name])}
        for name, answers in questions.items()
    }
    scores_at = {}
    for threshold in (-1e9, *odds.values()):
        each = [single[name]["" if odds[name] > threshold else text] for name, text in predictions.items()]
        scores_at[threshold] = [sum(column) / len(questions) for column in zip(*each, strict=True)]
    for column, name in enumerate(("exact", "f1")):
        best = max(values[column] for values in scores_at.values())
        assert (scores[f"best_{name}"], scores_at[scores[f"best_{name}_thresh"]][column]) == pytest.approx((best, best))
    at_zero = evaluate(questions, predictions, odds, null_threshold=0.0)
    taken = {name: "" if odds[name] > 0 else text for name, text in predictions.items()}
    assert at_zero["NoAns_exact"] == pytest.approx(evaluate(questions, taken)["NoAns_exact"])


def test_equal_to_the_library(random_file):
    """With everything the library's own call gets, and with questions that have no prediction; up to rounding."""
    squad_metrics = pytest.importorskip("transformers.data.metrics.squad_metrics", reason="removed from transformers")
    from transformers.data.processors.squad import SquadExample

    questions, predictions, odds = random_file
    few = {name: predictions[name] for name in list(predictions)[::3]}
    examples = [
        SquadExample(name, "?", "", None, None, "", [{"text": text} for text in answers], not answers)
        for name, answers in list(questions.items())[::3]
    ]
    few_odds = {name: odds[name] for name in few}
    scores = evaluate(questions, few, odds)
    assert scores == pytest.approx(dict(squad_metrics.squad_evaluate(examples, few, few_odds, float("inf"))), rel=1e-12)
    scores = evaluate(questions, few, odds, 1.0)
    assert scores == pytest.approx(dict(squad_metrics.squad_evaluate(examples, few, few_odds)), rel=1e-12)


def test_files_that_do_not_belong_together_are_refused():
    with pytest.raises(UserError, match="no question of the data set has a prediction"):
        evaluate({"q": ["x"]}, {"other": "x"})
    with pytest.raises(UserError, match="'q' has a prediction, but no null odds"):
        evaluate({"q": ["x"]}, {"q": "x"}, {"other": 1.0})


def test_f1_of_a_script_without_blanks_is_that_of_the_script_and_said(tmp_path, capsys):
    """Three of four characters are right: the official F1 compares words, and a Chinese answer is one."""
    context = "\u4e00\u4e01\u4e02\u4e03\u4e04\u4e05"
    asked = {"id": 7, "question": "x?", "answers": [{"text": context[1:5], "answer_start": 1}]}
    write_json(tmp_path / "dev.json", {"data": [{"paragraphs": [{"context": context, "qas": [asked]}]}]})
    write_json(tmp_path / "predictions.json", {"7": context[1:4]})
    files = [tmp_path / "predictions.json", tmp_path / "dev.json"]
    print_scores(argparse.Namespace(evaluate=files, null_odds=None, null_threshold=None))
    printed = capsys.readouterr()
    scores = json.loads(printed.out)
    assert (scores["exact"], scores["f1"], scores["total"]) == (0, 0, 1)
    assert "dev.json: most answers are in a script without blanks between words" in printed.err
