"""Answers decoded from given scores (best span, length, window, text, odds of no answer), and the files of predictions."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_squad import make_squad, prepare_squad, without_impossible

from amos_fairseq.downstream.spans.command import (
    NO_SPAN_ODDS,
    Decoded,
    ScoredSpan,
    SquadSettings,
    decode_question,
    spans_of_window,
    write_answers,
)
from amos_fairseq.downstream.spans.dataset import SquadSplit, Window, WindowLimits

# A context of six tokens; the window shows tokens 1 to 4 at positions 3 to 6.
CONTEXT = "Zoë ate  a \uff22ig, cafe\u0301 pie"
STARTS = np.array([0, 4, 9, 11, 14, 16])
ENDS = np.array([3, 7, 10, 14, 15, 21])
WINDOW = Window(example=0, number=1, begin=1, end=5, offset=3)
OWNER = np.array([0, 1, 1, 1, 2, 2])


def found(candidates: list[tuple[int, int, float]], n_best: int = 4) -> list[ScoredSpan]:
    starts, ends, scores = (np.array(column) for column in zip(*candidates, strict=True))
    settings = SquadSettings("independent", WindowLimits(), max_answer_length=3, n_best=n_best)
    return spans_of_window(starts, ends, scores, WINDOW, OWNER, settings)


def test_positions_become_tokens_of_the_context():
    """What is no span, for a reason of its own, is skipped."""
    assert found([(3, 5, 1.0), (4, 4, 2.0)]) == [ScoredSpan(2.0, 2, 2), ScoredSpan(1.0, 1, 3)]
    spans = found([(3, 3, 1.0), (3, 4, 5.0), (4, 4, 3.0), (4, 5, 4.0), (5, 5, 2.0)], n_best=2)
    assert [span.score for span in spans] == [5.0, 4.0]
    for candidate, why in (
        ((4, 3, 9.0), "ends before it starts"),
        ((3, 6, 9.0), "four tokens, three allowed"),
        ((2, 3, 9.0), "starts in the question"),
        ((0, 0, 9.0), "the null position"),
        ((5, 7, 9.0), "ends behind the window"),
        ((4, 5, float("-inf")), "ruled out by the head"),
        ((6, 6, 9.0), "its token has more context in window 2"),
    ):
        assert found([candidate, (4, 5, 0.5)]) == [ScoredSpan(0.5, 2, 3)], why


def decode(spans: list[ScoredSpan], null_scores: list[float], compares_null: bool = True, n_best: int = 4):
    return decode_question(spans, null_scores, CONTEXT, (STARTS, ENDS), compares_null, n_best)


def test_answers_are_slices_of_the_context_and_equal_ones_count_once():
    decoded = decode([ScoredSpan(1.0, 3, 4), ScoredSpan(3.0, 0, 2), ScoredSpan(2.0, 5, 5)], [0.0])
    assert list(decoded.texts) == ["Zoë ate  a", "cafe\u0301", "\uff22ig,"]
    assert decoded.best == "Zoë ate  a"
    decoded = decode([ScoredSpan(1.0, 2, 2), ScoredSpan(4.0, 2, 2), ScoredSpan(2.0, 1, 1)], [0.0])
    assert list(decoded.texts.items()) == [("a", 4.0), ("ate", 2.0)]
    assert len(decode([ScoredSpan(float(i), i, i) for i in range(6)], [0.0], n_best=3).texts) == 3


def test_null_odds():
    """Of several windows the lowest null score counts; the independent head compares it with the best span."""
    spans = [ScoredSpan(4.0, 2, 2), ScoredSpan(1.0, 1, 1)]
    assert decode(spans, [6.0, 5.0]).null_odds == 1.0
    assert decode(spans, [0.5, -2.0, 3.0], compares_null=False).null_odds == -2.0
    for compares_null in (True, False):
        nothing = decode([], [0.0], compares_null)
        assert (nothing.best, nothing.texts, nothing.null_odds) == ("", {}, NO_SPAN_ODDS)


def test_probabilities_of_the_n_best():
    entries = decode([ScoredSpan(1000.0, 2, 2), ScoredSpan(1000.0 + math.log(3), 1, 1)], [0.0]).as_json()
    assert [entry["text"] for entry in entries] == ["ate", "a"]
    assert [entry["probability"] for entry in entries] == pytest.approx([0.75, 0.25])
    assert json.loads(json.dumps(decode([], [0.0]).as_json(), allow_nan=False)) == []


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> SquadSplit:
    """40 questions, 10 of them without an answer."""
    return SquadSplit(prepare_squad(tmp_path_factory.mktemp("squad"), make_squad()), "valid")


def right_answers(split: SquadSplit, odds: dict[bool, float]) -> dict[str, Decoded]:
    """The right answer, or a wrong one where there is none; odds by ``is_impossible``, a little different each."""
    found = {}
    for number, example in enumerate(split.examples):
        text = example.answers[0].text if example.answers else "wrong"
        found[example.id] = Decoded({text: 1.0, "other": 0.5}, odds[example.is_impossible] + number / 1000)
    return found


def read(directory: Path, name: str) -> dict:
    return json.loads((directory / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("odds", [{False: -5.0, True: 3.0}, {False: 2.0, True: 9.0}, {False: -9.0, True: -4.0}])
def test_threshold_separates_answerable_questions(split, tmp_path, odds):
    """On any scale of the odds: all answers right, the threshold is that of the last answerable question."""
    decoded = right_answers(split, odds)
    scores = write_answers(tmp_path, split, decoded)
    assert scores["em"] == scores["f1"] == scores["best_em"] == scores["has_ans_f1"] == scores["no_ans_em"] == 100
    answerable = [decoded[example.id].null_odds for example in split.examples if example.answers]
    assert scores["null_threshold"] == max(answerable)
    predictions = read(tmp_path, "predictions.json")
    assert all((predictions[example.id] == "") == example.is_impossible for example in split.examples)
    assert read(tmp_path, "scores.json") == scores
    assert all(type(value) is float for value in scores.values())


@pytest.mark.parametrize("odds", [{False: 3.0, True: -5.0}, {False: -3.0, True: -5.0}])
def test_no_answer_is_best(split, tmp_path, odds):
    """Every answer is wrong: none is given, also where the odds are below 0, which the search uses for that."""
    decoded = {name: Decoded({"wrong": 1.0}, d.null_odds) for name, d in right_answers(split, odds).items()}
    scores = write_answers(tmp_path, split, decoded)
    assert set(read(tmp_path, "predictions.json").values()) == {""}
    assert (scores["em"], scores["no_ans_em"], scores["has_ans_em"]) == (25, 100, 0)


def test_version_one_has_no_threshold(tmp_path):
    split = SquadSplit(prepare_squad(tmp_path, without_impossible(make_squad())), "valid")
    scores = write_answers(tmp_path, split, right_answers(split, {False: 100.0, True: 100.0}))
    assert scores == {"em": 100.0, "f1": 100.0}
    assert not (tmp_path / "null_odds.json").exists()
