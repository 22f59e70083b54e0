"""examples/reranking.py with winners computed by hand, word errors, and the whole script on `amos score`."""

import functools
import itertools
import json

import pytest
from reranking import LAMBDAS, best_hypothesis, error_rate, main, rerank, word_errors
from saved_models import write_run


def utterance(reference, hypotheses):
    return {"reference": reference, "hypotheses": [{"text": text, "score": f} for text, f in hypotheses.items()]}


# With f + lambda PLL: "a b" wins from lambda 0.25 on (-1 - 8 l against -2 - 4 l).
FIRST = utterance("a b", {"a x": -1, "a b": -2, "x": -9.5})
# The recognizer is right; "d" wins above lambda 0.6 (-1 - 6 l against -4 - l).
SECOND = utterance("c c c", {"c c c": -1, "d": -4.0})
LISTS = {"first": FIRST, "second": SECOND}
PLLS = {"a x": -8.0, "a b": -4.0, "x": -3.0, "c c c": -6.0, "d": -1.0, "": 0.0, "long": None}


@pytest.mark.parametrize(
    ("weight", "winners"), [(0.0, (0, 0)), (0.2, (0, 0)), (0.25, (0, 0)), (0.3, (1, 0)), (0.55, (1, 0)), (0.65, (1, 1))]
)
def test_winners_change_at_the_crossings(weight, winners):
    assert tuple(best_hypothesis(each["hypotheses"], PLLS, weight) for each in LISTS.values()) == winners


@pytest.mark.parametrize(
    ("hypotheses", "winner"),
    [
        ({"": -0.5, "a x": -1.0, "a b": -2.0}, 2),  # -0.5 - 8 against -1 - 8 and -2 - 4
        ({"": 4.0, "a x": -1.0, "a b": -2.0}, 0),  # 4 - 8: the recognizer is sure that nothing was said
        ({"": -1.0, "a b": -2.0}, 0),  # the PLL of the only other one
        ({"long": 9.0, "a x": -1.0, "a b": -2.0}, 2),
        ({"long": 9.0, "": 10.0, "a b": -2.0}, 1),
        ({"long": -1.0, "": -2.0}, 0),  # no PLL at all: the recognizer's choice
        ({"": -1.0}, 0),
    ],
)
def test_empty_and_too_long_hypotheses(hypotheses, winner):
    assert best_hypothesis(utterance("a b", hypotheses)["hypotheses"], PLLS, 1.0) == winner


def test_smallest_lambda_with_the_fewest_errors():
    assert pytest.approx([0.05 * step for step in range(1, 21)]) == LAMBDAS
    result = rerank(LISTS, LISTS, PLLS, None)
    rates = result["wer_on_dev"]
    assert rates["0.25"] == 20.0  # 1 of 5 words
    assert rates["0.30"] == rates["0.60"] == 0.0
    assert rates["0.65"] == rates["1.00"] == 60.0  # "d" for "c c c": 3 of 5
    assert (result["lambda"], result["wer_before"], result["wer_after"]) == (0.3, 20.0, 0.0)
    assert result["reranked"]["first"] == {"text": "a b", "score": -2, "place": 2, "pll": -4.0}
    assert error_rate(LISTS, PLLS, 1.0) == 60.0


def test_word_errors_of_short_texts_against_all_alignments():
    """The definition by recursion: the last words are aligned with each other, or one of them with nothing."""

    @functools.cache
    def fewest(a: tuple[str, ...], b: tuple[str, ...]) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(fewest(a[:-1], b[:-1]) + (a[-1] != b[-1]), fewest(a[:-1], b) + 1, fewest(a, b[:-1]) + 1)

    texts = [text for length in range(5) for text in itertools.product("xyz", repeat=length)]
    for a, b in itertools.product(texts, texts[:121:3]):
        assert word_errors(" ".join(a), " ".join(b)) == fewest(a, b)


@pytest.mark.slow
def test_the_script(tmp_path):
    """The better of two texts, whose scores cross at a known lambda, computed from PLLs of the script itself."""
    run, nbest, out = write_run(tmp_path / "run", "mlm"), tmp_path / "nbest.json", tmp_path / "out.json"
    nbest.write_text(json.dumps({"u": utterance("the quick fox", {"a dog": 1.0, "the quick fox": 0.0})}))
    main([str(run), str(nbest), "--dev", str(nbest), "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["reranked"]["u"]["text"] == ("the quick fox" if found["wer_after"] == 0 else "a dog")
    nbest.write_text('{"u": {"reference": " ", "hypotheses": [{"text": "a", "score": 1}]}}')
    with pytest.raises(SystemExit, match=r"nbest.json is no file of n-best lists"):
        main([str(run), str(nbest), "--lambda", "1"])
