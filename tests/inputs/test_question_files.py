"""Data sets in other layouts than SQuAD's own, what is wrong with an answer, and the official scores by the scripts' rules."""

import json
import random
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from synthetic_squad import make_squad, write_json

from amos_fairseq.errors import UserError
from amos_fairseq.inputs.question_files import evaluate, fitting_units, read_squad

SQUAD = make_squad()


def write_rows(path: Path) -> Path:
    """As load_dataset("squad_v2") gives them."""
    rows = []
    for paragraph in SQUAD["data"][0]["paragraphs"]:
        for asked in paragraph["qas"]:
            answers = {key: [answer[key] for answer in asked["answers"]] for key in ("text", "answer_start")}
            row = {"id": asked["id"], "title": "Synthetic", "context": paragraph["context"]}
            rows.append(row | {"question": asked["question"], "answers": answers})
    if path.suffix == ".jsonl":
        path.write_text("\ufeff" + "".join(json.dumps(row | {"is_impossible": None}) + "\n" for row in rows), "utf-8")
    else:
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_list(rows)
        table.to_parquet(path) if path.suffix else table.save_to_disk(path)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "folder"])
def test_flat_rows_are_the_same_questions(name, tmp_path):
    official = read_squad(write_json(tmp_path / "official.json", SQUAD))
    assert read_squad(write_rows(tmp_path / name)).paragraphs == official.paragraphs
    assert sum(question.is_impossible for question in official.questions) == 10


def test_what_was_read_is_printed(tmp_path, capsys):
    read_squad(write_json(tmp_path / "a.json", squad_of("a b c", ("b", 2))))
    said = f"prepare: {tmp_path / 'a.json'}"
    expected = f"{said}: SQuAD's JSON: 1 questions on 1 paragraphs\n{said}: the first: ? -> b; context: a b c\n"
    assert capsys.readouterr().err == expected
    unlabeled = write_json(tmp_path / "a.json", json.loads(OFFICIAL.replace("answers", "no_answers")))
    assert read_squad(unlabeled, labeled=False).questions[0][2:] == ((), True)
    said = f"squad: {unlabeled}"
    expected = f"{said}: SQuAD's JSON: 1 questions on 1 paragraphs\n{said}: the first: ?; context: a b c\n"
    assert capsys.readouterr().err == expected


def squad_of(context: str, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    """A question for each answer, whose id is a number."""
    asked = [
        {"id": n, "question": "?", "answers": [{"text": a, "answer_start": s}]} for n, (a, s) in enumerate(answers)
    ]
    return {"data": [{"paragraphs": [{"context": context, "qas": [own | more for own in asked]}]}]}


def test_numbers_as_ids_and_questions_without_an_answer(tmp_path):
    """A question without answers, or with an empty one, is impossible, with and without the flag."""
    squad = squad_of("a b c", ("a", 0), ("", 0), is_impossible=False)
    squad["data"][0]["paragraphs"][0]["qas"].append({"id": 7, "question": "?", "answers": []})
    questions = read_squad(write_json(tmp_path / "a.json", squad)).questions
    assert [(question.id, question.is_impossible) for question in questions] == [("0", False), ("1", True), ("7", True)]


OFFICIAL = json.dumps(squad_of("a b c", ("b", 2)))
FLAT = {"id": 1, "context": "a b c", "question": "?", "answers": {"text": ["b"], "answer_start": [2]}}
FLAT = json.dumps(FLAT) + "\n"
FORMS = "questions are read from SQuAD's JSON, .* docs/converting.md"
LAYOUT = "does not have the layout .{}.*: " + FORMS
# What is replaced in a file with one question, by what, and the message.
REFUSED_VALUES = [
    (OFFICIAL, OFFICIAL, '{"data": []}', f"holds 0 questions with 0 different ids: {FORMS}"),
    (OFFICIAL, OFFICIAL, f"[{OFFICIAL}]", LAYOUT.format(".*, not an object")),
    (OFFICIAL, OFFICIAL, FLAT + FLAT, LAYOUT.format("is not JSON")),
    (OFFICIAL, '"data"', '"rows"', LAYOUT.format("'data' is missing")),
    (OFFICIAL, '{"paragraphs"', '[], {"paragraphs"', LAYOUT.format("")),
    (OFFICIAL, '"a b c"', "null", LAYOUT.format("None is not a string of")),
    (OFFICIAL, '"id": 0', f'"id": "{"x" * 2000}"', "is not a printable string of 1 to 1,000 characters"),
    (OFFICIAL, '"id": 0', r'"id": "a\n\u001b[31m"', "is not a printable string"),
    (OFFICIAL, '"answer_start": 2', '"answer_start": "2"', LAYOUT.format("'2' is not an integer from")),
    (OFFICIAL, '"answer_start": 2', '"answer_start": NaN', "has NaN, which is not a finite number"),
    (FLAT, FLAT, FLAT + FLAT, "holds 2 questions with 1 different ids .1 occurs more than once."),
    (FLAT, '["b"]', "[]", LAYOUT.format("zip")),
    (FLAT, '{"text": ["b"], "answer_start": [2]}', '"b"', LAYOUT.format("")),
    (FLAT, '"answers"', '"answer"', LAYOUT.format("'answers' is missing")),
    (FLAT, FLAT, FLAT + '{"id": 2, "con\n', "line 2 is not JSON"),
]


@pytest.mark.parametrize("case", range(len(REFUSED_VALUES)))
def test_values_that_cannot_be_read(case, tmp_path):
    """One line that names the file and the place, also of hostile values."""
    content, old, new, message = REFUSED_VALUES[case]
    assert old in content
    path = tmp_path / ("a.json" if content == OFFICIAL else "a.jsonl")
    path.write_text(content.replace(old, new, 1))
    with pytest.raises(UserError, match=rf"a\.json.*{message}") as refusal:
        read_squad(path)
    assert len(str(refusal.value)) < 600


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


def test_what_is_compared_follows_the_contexts():
    assert fitting_units(["Die Stadt 北京 (Peking)", "Ein Satz"]) == fitting_units(["대한 민국"]) == "words"
    assert fitting_units(["2008年 NBA 在北京举行", "比赛"]) == fitting_units(["ประเทศไทย"]) == "characters"
