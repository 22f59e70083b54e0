"""Answers decoded from given scores (best span, length, window, text, odds of no answer), and the files of predictions."""

import json
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


def found(candidates: list[tuple[int, int, float]]) -> list[ScoredSpan]:
    starts, ends, scores = (np.array(column) for column in zip(*candidates, strict=True))
    settings = SquadSettings("independent", WindowLimits(), max_answer_length=3)
    return spans_of_window(starts, ends, scores, WINDOW, OWNER, settings)


def test_positions_become_tokens_of_the_context():
    """What is no span, for a reason of its own, is skipped."""
    assert found([(3, 5, 1.0), (4, 4, 2.0)]) == [ScoredSpan(2.0, 2, 2), ScoredSpan(1.0, 1, 3)]
    spans = found([(3, 3, 1.0), (3, 4, 5.0), (4, 4, 3.0), (4, 5, 4.0), (5, 5, 2.0)])
    assert [span.score for span in spans] == [5.0, 4.0, 3.0, 2.0, 1.0]
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


def decode(spans: list[ScoredSpan], null_scores: list[float], compares_null: bool = True) -> Decoded:
    return decode_question(spans, null_scores, CONTEXT, (STARTS, ENDS), compares_null)


def test_answers_are_slices_of_the_context():
    spans = [ScoredSpan(1.0, 3, 4), ScoredSpan(3.0, 0, 2), ScoredSpan(2.0, 5, 5)]
    found = [decode(spans[first:], [0.0]) for first in range(3)]
    assert [answer.text for answer in found] == ["Zoë ate  a", "Zoë ate  a", "cafe\u0301"]
    assert all(CONTEXT[answer.start :].startswith(answer.text) for answer in found)
    assert decode(spans[:1], [0.0]).text == "\uff22ig,"


def test_null_odds():
    """Of several windows the lowest null score counts; the independent head compares it with the best span."""
    spans = [ScoredSpan(4.0, 2, 2), ScoredSpan(1.0, 1, 1)]
    assert decode(spans, [6.0, 5.0]).null_odds == 1.0
    assert decode(spans, [0.5, -2.0, 3.0], compares_null=False).null_odds == -2.0
    for compares_null in (True, False):
        assert decode([], [0.0], compares_null) == ("", NO_SPAN_ODDS, None)


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> SquadSplit:
    """40 questions, 10 of them without an answer."""
    return SquadSplit(prepare_squad(tmp_path_factory.mktemp("squad"), make_squad()), "valid")


def right_answers(split: SquadSplit, odds: dict[bool, float]) -> dict[str, Decoded]:
    """The right answer, or a wrong one where there is none; odds by ``is_impossible``, a little different each."""
    found = {}
    for number, example in enumerate(split.examples):
        text = example.answers[0].text if example.answers else "wrong"
        found[example.id] = Decoded(text, odds[example.is_impossible] + number / 1000)
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
    decoded = {name: Decoded("wrong", d.null_odds) for name, d in right_answers(split, odds).items()}
    scores = write_answers(tmp_path, split, decoded)
    assert set(read(tmp_path, "predictions.json").values()) == {""}
    assert (scores["em"], scores["no_ans_em"], scores["has_ans_em"]) == (25, 100, 0)


def test_version_one_has_no_threshold(tmp_path):
    split = SquadSplit(prepare_squad(tmp_path, without_impossible(make_squad())), "valid")
    scores = write_answers(tmp_path, split, right_answers(split, {False: 100.0, True: 100.0}))
    assert scores == {"em": 100.0, "f1": 100.0}
    assert not (tmp_path / "null_odds.json").exists()
