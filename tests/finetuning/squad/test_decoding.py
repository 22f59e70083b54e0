"""Answers decoded from given scores: best span, length, window, text, and the odds of no answer."""

import json
import math

import numpy as np
import pytest

from amos_fairseq.data.squad import Window
from amos_fairseq.finetuning.squad.decoding import (
    NO_SPAN_ODDS,
    DecodingLimits,
    ScoredSpan,
    decode_question,
    spans_of_window,
)

# A context of six tokens; the window shows tokens 1 to 4 at positions 3 to 6.
CONTEXT = "Zoë ate  a \uff22ig, cafe\u0301 pie"
STARTS = np.array([0, 4, 9, 11, 14, 16])
ENDS = np.array([3, 7, 10, 14, 15, 21])
WINDOW = Window(example=0, number=1, begin=1, end=5, offset=3)
OWNER = np.array([0, 1, 1, 1, 2, 2])
LIMITS = DecodingLimits(max_answer_length=3, n_best=4)


def found(candidates: list[tuple[int, int, float]], limits: DecodingLimits = LIMITS) -> list[ScoredSpan]:
    starts, ends, scores = (np.array(column) for column in zip(*candidates, strict=True))
    return spans_of_window(starts, ends, scores, WINDOW, OWNER, limits)


def test_positions_become_tokens_of_the_context():
    assert found([(3, 5, 1.0), (4, 4, 2.0)]) == [ScoredSpan(2.0, 2, 2), ScoredSpan(1.0, 1, 3)]


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        ((4, 3, 9.0), "ends before it starts"),
        ((3, 6, 9.0), "four tokens, three allowed"),
        ((2, 3, 9.0), "starts in the question"),
        ((0, 0, 9.0), "the null position"),
        ((5, 7, 9.0), "ends behind the window"),
        ((4, 5, float("-inf")), "ruled out by the head"),
        ((6, 6, 9.0), "its token has more context in window 2"),
    ],
)
def test_invalid_spans_are_skipped(candidate, why):
    assert found([candidate, (4, 5, 0.5)]) == [ScoredSpan(0.5, 2, 3)], why


def test_longest_answer_is_allowed():
    assert found([(3, 5, 1.0)]) == [ScoredSpan(1.0, 1, 3)]


def test_n_best_spans():
    spans = found([(3, 3, 1.0), (3, 4, 5.0), (4, 4, 3.0), (4, 5, 4.0), (5, 5, 2.0)], LIMITS._replace(n_best=2))
    assert [span.score for span in spans] == [5.0, 4.0]


def decode(spans: list[ScoredSpan], null_scores: list[float], compares_null: bool = True, n_best: int = 4):
    limits = LIMITS._replace(n_best=n_best)
    return decode_question(spans, null_scores, CONTEXT, (STARTS, ENDS), compares_null, limits)


def test_answer_is_a_slice_of_the_context():
    decoded = decode([ScoredSpan(1.0, 3, 4), ScoredSpan(3.0, 0, 2), ScoredSpan(2.0, 5, 5)], [0.0])
    assert [text for text, _ in decoded.texts] == ["Zoë ate  a", "cafe\u0301", "\uff22ig,"]
    assert decoded.best == "Zoë ate  a"


def test_equal_texts_count_once_with_the_better_score():
    decoded = decode([ScoredSpan(1.0, 2, 2), ScoredSpan(4.0, 2, 2), ScoredSpan(2.0, 1, 1)], [0.0])
    assert [(text, score) for text, score in decoded.texts] == [("a", 4.0), ("ate", 2.0)]
    assert len(decode([ScoredSpan(float(i), i, i) for i in range(6)], [0.0], n_best=3).texts) == 3


def test_null_odds():
    """Of several windows the lowest null score counts; the independent head compares it with the best span."""
    spans = [ScoredSpan(4.0, 2, 2), ScoredSpan(1.0, 1, 1)]
    assert decode(spans, [6.0, 5.0]).null_odds == 1.0
    assert decode(spans, [0.5, -2.0, 3.0], compares_null=False).null_odds == -2.0
    for compares_null in (True, False):
        nothing = decode([], [0.0], compares_null)
        assert (nothing.best, nothing.texts, nothing.null_odds) == ("", [], NO_SPAN_ODDS)


def test_probabilities_of_the_n_best():
    entries = decode([ScoredSpan(1000.0, 2, 2), ScoredSpan(1000.0 + math.log(3), 1, 1)], [0.0]).as_json()
    assert [entry["text"] for entry in entries] == ["ate", "a"]
    assert [entry["probability"] for entry in entries] == pytest.approx([0.75, 0.25])
    assert json.loads(json.dumps(decode([], [0.0]).as_json(), allow_nan=False)) == []
