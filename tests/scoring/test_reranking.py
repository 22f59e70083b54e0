"""Re-ranking of n-best lists with winners computed by hand, invalid files, and word error rates."""

import functools
import itertools
import json
import math

import pytest

from amos_fairseq.errors import UserError
from amos_fairseq.scoring.reranking import (
    LAMBDAS,
    TextScore,
    WordErrors,
    choose_lambda,
    edit_distance,
    error_rates,
    read_nbest,
    winners,
)


def utterance(reference, hypotheses):
    return {"reference": reference, "hypotheses": [{"text": text, "score": f} for text, f in hypotheses.items()]}


# With f + lambda PLL: "a b" wins from lambda 0.25 on (-1 - 8 l against -2 - 4 l).
FIRST = utterance("a b", {"a x": -1, "a b": -2, "x": -9.5})
# The recogniser is right; "d" wins above lambda 0.6 (-1 - 6 l against -4 - l).
SECOND = utterance("c c c", {"c c c": -1, "d": -4.0})
PLLS = {"a x": -8.0, "a b": -4.0, "x": -3.0, "c c c": -6.0, "d": -1.0}
SCORES = {text: TextScore(pll, num_tokens=2 + len(text.split())) for text, pll in PLLS.items()}
EMPTY, TOO_LONG = TextScore(0.0, num_tokens=2), TextScore(None, num_tokens=900)


@pytest.fixture
def utterances(tmp_path):
    return read(tmp_path, {"first": FIRST, "second": SECOND})


def read(tmp_path, content):
    file = tmp_path / "nbest.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_nbest(file)


def test_winners_change_at_the_crossings(utterances):
    def texts(weight):
        return [winner["text"] for winner in winners(utterances, SCORES, weight).values()]

    assert texts(0.0) == texts(0.2) == ["a x", "c c c"]
    assert texts(0.3) == texts(0.55) == ["a b", "c c c"]
    assert texts(0.65) == ["a b", "d"]
    expected = {"text": "a b", "place": 2, "score": -2.0, "pll": -4.0, "word_errors": 0}
    assert winners(utterances, SCORES, 0.3)["first"] == expected
    # Equal sums keep the order of the recogniser.
    assert winners(utterances, SCORES, 0.25)["first"]["place"] == 1


@pytest.mark.parametrize(
    ("hypotheses", "winner"),
    [
        ({"": -0.5, "a x": -1.0, "a b": -2.0}, "a b"),  # -0.5 - 8 against -1 - 8 and -2 - 4
        ({"": 4.0, "a x": -1.0, "a b": -2.0}, ""),  # 4 - 8: the recognizer is sure that nothing was said
        ({"": -1.0, "a b": -2.0}, ""),  # the PLL of the only other one
        ({"long": 9.0, "a x": -1.0, "a b": -2.0}, "a b"),
        ({"long": 9.0, "": 10.0, "a b": -2.0}, ""),
        ({"long": -1.0, "": -2.0}, "long"),  # no PLL at all: the recognizer's choice
        ({"": -1.0}, ""),
    ],
)
def test_empty_and_too_long_hypotheses(tmp_path, hypotheses, winner):
    lists = read(tmp_path, {"u": utterance("a b", hypotheses)})
    found = winners(lists, SCORES | {"": EMPTY, "long": TOO_LONG}, 1.0)["u"]
    assert (found["text"], found["pll"]) == (winner, {"": 0.0, "long": None}.get(winner, -4.0))


def test_smallest_lambda_with_the_fewest_errors(utterances):
    weight, rates = choose_lambda(utterances, SCORES)
    assert pytest.approx([0.05 * step for step in range(1, 21)]) == LAMBDAS
    assert weight == 0.3
    assert rates["0.25"] == 20.0  # 1 of 5 words
    assert rates["0.30"] == rates["0.60"] == 0.0
    assert rates["0.65"] == rates["1.00"] == 60.0  # "d" for "c c c": 3 of 5


def test_error_rates_before_after_and_oracle(utterances):
    rates = error_rates(utterances, SCORES, 1.0)
    assert rates == {"utterances": 2, "words": 5, "wer_before": 20.0, "wer_after": 60.0, "wer_oracle": 0.0}


def test_oracle_above_zero(tmp_path):
    lists = read(tmp_path, {"u": utterance("p q", {"r s": 0, "p": -9})})
    assert error_rates(lists, {"r s": TextScore(-1.0, 4), "p": TextScore(-5.0, 3)}, 0.5)["wer_oracle"] == 50.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"nbest.json is missing: give a JSON file of n-best lists"),
        ("[]", "expected an object"),
        ("{}", "expected an object"),
        ("{", "is not JSON .*: give a JSON file of n-best lists"),
        ({"u": {"hypotheses": []}}, "utterance 'u' needs a string 'reference'"),
        ({"u": "a b"}, "utterance 'u' needs a string 'reference'"),
        ({"u": utterance("a", {})}, "utterance 'u' needs a list 'hypotheses' with at least one entry"),
        ({"u": {"reference": "a", "hypotheses": [{"text": "a"}]}}, "hypothesis 1 of 'u' needs a 'text' and a finite"),
        ({"u": utterance("a", {"a": True})}, "hypothesis 1 of 'u'"),
        ({"u": utterance("a", {"a": 1, "b": math.nan})}, "hypothesis 2"),
        ({"u": utterance(" ", {"a": 1})}, "all references are empty"),
        ('{"u": {"reference": "a"}, "u": {"reference": "b"}}', "'u' occurs 2 times"),
    ],
)
def test_invalid_files_are_refused(tmp_path, content, message):
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path, content)
    assert str(tmp_path / "nbest.json") in str(error.value)


def test_word_errors_by_hand():
    hypotheses = {"the cat sat": 0, "the bat sat": 1, "cat sat": 1, "the the cat sat": 1, "": 3, "sat cat the": 2}
    for text, errors in hypotheses.items():
        assert WordErrors.of("the cat sat", text) == WordErrors(errors, 3), text
    assert WordErrors.of("a b c d", "b c d e") == WordErrors(2, 4)
    assert WordErrors.of("The cat", "the cat") == WordErrors(1, 2)
    assert WordErrors.of("", "um") == WordErrors(1, 0)
    assert WordErrors.of("a", "b c d").rate == 300
    assert WordErrors.total([WordErrors(1, 2), WordErrors(0, 6)]).rate == 12.5  # over all words


def test_edit_distance_of_short_texts_against_all_alignments():
    """The definition by recursion: the last words are aligned with each other, or one of them with nothing."""

    @functools.cache
    def fewest(a: tuple[str, ...], b: tuple[str, ...]) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(fewest(a[:-1], b[:-1]) + (a[-1] != b[-1]), fewest(a[:-1], b) + 1, fewest(a, b[:-1]) + 1)

    texts = [text for length in range(5) for text in itertools.product("xyz", repeat=length)]
    for a, b in itertools.product(texts, texts[:121:3]):
        assert edit_distance(list(a), list(b)) == fewest(a, b)
