"""Exact match and F1: cases by hand, and the library's scores of random predictions."""

import argparse
import json
import random

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
