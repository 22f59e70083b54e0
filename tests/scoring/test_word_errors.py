"""Word error rate against hand-counted cases and a search over all alignments."""

import functools
import itertools

import pytest

from amos_fairseq.scoring.reranking import WordErrors, edit_distance


@pytest.mark.parametrize(
    ("reference", "hypothesis", "errors"),
    [
        ("the cat sat", "the cat sat", 0),
        ("the cat sat", "the bat sat", 1),
        ("the cat sat", "cat sat", 1),
        ("the cat sat", "the the cat sat", 1),
        ("the cat sat", "", 3),
        ("the cat sat", "sat cat the", 2),
        ("a b c d", "b c d e", 2),
        ("The cat", "the cat", 1),
        ("", "um", 1),
    ],
)
def test_hand_counted(reference, hypothesis, errors):
    assert WordErrors.of(reference, hypothesis) == WordErrors(errors, len(reference.split()))


def test_every_short_pair_against_all_alignments():
    """The definition by recursion: the last words are aligned with each other, or one of them with nothing."""

    @functools.cache
    def fewest(a: tuple[str, ...], b: tuple[str, ...]) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(fewest(a[:-1], b[:-1]) + (a[-1] != b[-1]), fewest(a[:-1], b) + 1, fewest(a, b[:-1]) + 1)

    texts = [text for length in range(5) for text in itertools.product("xyz", repeat=length)]
    for a, b in itertools.product(texts, texts[:121:3]):
        assert edit_distance(list(a), list(b)) == fewest(a, b)


def test_rate_is_of_all_words_not_a_mean_of_rates():
    total = WordErrors.total([WordErrors(1, 2), WordErrors(0, 6)])
    assert total.rate == 12.5
    assert WordErrors.of("a", "b c d").rate == 300
