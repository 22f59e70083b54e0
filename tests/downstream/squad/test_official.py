"""Exact match and F1: cases by hand, and a naive implementation on random predictions."""

import argparse
import json
import random
import re
import string
from collections import Counter

import pytest
from synthetic_squad import write_json

from amos_fairseq.downstream.squad.official import evaluate, fitting_units, print_scores
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


def test_files_that_do_not_belong_together_are_refused():
    with pytest.raises(UserError, match="no question of the data set has a prediction"):
        evaluate({"q": ["x"]}, {"other": "x"})
    with pytest.raises(UserError, match="'q' has no null odds"):
        evaluate({"q": ["x"]}, {"q": "x"}, {"other": 1.0})


# Counted by hand. "iPhone手机" is "iphone", "手", "机"; punctuation is no character, and repeated characters count.
BY_CHARACTERS = [
    ("中国人民", "中国人", 0, 2 * 3 / (4 + 3)),
    ("北京市。", "《北京市》", 1, 1),
    ("iPhone手机", "手机", 0, 2 * 2 / (3 + 2)),
    ("在1998年", "1998 年", 0, 2 * 2 / (3 + 2)),
    ("the 中文", "中文", 0, 2 * 2 / (3 + 2)),
    ("哈哈", "哈哈哈", 0, 2 * 2 / (2 + 3)),
    ("ประเทศ", "ประเ", 0, 2 * 4 / (6 + 4)),
    ("カタカナ", "ひらがな", 0, 0),
    ("。", "", 1, 1),
]


@pytest.mark.parametrize(("answer", "prediction", "exact", "f1"), BY_CHARACTERS)
def test_characters_by_hand(answer, prediction, exact, f1):
    scores = evaluate({"q": [answer]}, {"q": prediction}, units="characters")
    assert (scores["exact"], scores["f1"]) == (100 * exact, pytest.approx(100 * f1))


def test_what_is_compared_follows_the_contexts(tmp_path, capsys):
    """Three of four characters are right. A flag chooses SQuAD's own rule, which takes a Chinese answer as one word."""
    assert fitting_units(["Die Stadt 北京 (Peking)", "Ein Satz"]) == fitting_units(["대한 민국"]) == "words"
    assert fitting_units(["2008年 NBA 在北京举行", "比赛"]) == fitting_units(["ประเทศไทย"]) == "characters"
    asked = {"id": 7, "question": "x?", "answers": [{"text": "中国人民", "answer_start": 2}]}
    write_json(tmp_path / "dev.json", {"data": [{"paragraphs": [{"context": "我爱中国人民", "qas": [asked]}]}]})
    write_json(tmp_path / "predictions.json", {"7": "中国人"})
    files = [tmp_path / "predictions.json", tmp_path / "dev.json"]
    for score_by, expected in ((None, 600 / 7), ("characters", 600 / 7), ("words", 0)):
        print_scores(argparse.Namespace(evaluate=files, null_odds=None, null_threshold=None, score_by=score_by))
        printed = capsys.readouterr()
        assert json.loads(printed.out) == pytest.approx(
            {"exact": 0, "f1": expected, "total": 1, "HasAns_exact": 0, "HasAns_f1": expected, "HasAns_total": 1}
        )
        assert ("dev.json: EM and F1 compare characters, as MLQA's" in printed.err) == (score_by != "words")
