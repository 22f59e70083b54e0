"""What the generator reads at masked positions: shares against probability bands, and blocks that nothing else changes."""

from pathlib import Path

import numpy as np
import pytest
from made_up_blocks import block_dictionary, made_up_lines, make_dataset
from synthetic_corpus import make_task, write_corpus

from amos_fairseq.data.masked_blocks import TREATMENTS, treat_masked
from amos_fairseq.special_tokens import special_ids

MASK = 999
WORDS = np.arange(10, 60)
DRAWS = 40_000
# 5 standard deviations of a share of 40,000 draws.
BAND = 5 * np.sqrt(0.25 / DRAWS)


def shares(name: str) -> tuple[float, float, float]:
    """How many of many masked tokens became ``<mask>``, another token, and stayed (a random draw can be the original)."""
    originals = np.full(DRAWS, WORDS[0])
    treated = treat_masked(originals, TREATMENTS[name], MASK, WORDS, np.random.default_rng(1))
    masked, unchanged = (treated == MASK).mean(), (treated == originals).mean()
    assert np.isin(treated, [MASK, *WORDS]).all()
    return masked, 1 - masked - unchanged, unchanged


def test_shares_are_those_of_the_papers() -> None:
    assert shares("mask") == (1.0, 0.0, 0.0)
    by_chance = 0.1 / len(WORDS)  # random tokens that are the original
    assert shares("bert") == pytest.approx((0.8, 0.1 - by_chance, 0.1 + by_chance), abs=BAND)
    masked, random, unchanged = shares("electra")
    assert random == pytest.approx(0, abs=1e-12)
    assert (masked, unchanged) == pytest.approx((0.85, 0.15), abs=BAND)


def test_random_tokens_are_uniform_over_the_words() -> None:
    treated = treat_masked(np.full(DRAWS, 5), TREATMENTS["bert"], MASK, WORDS, np.random.default_rng(2))
    counts = np.array([(treated == word).sum() for word in WORDS])
    expected = DRAWS * 0.1 / len(WORDS)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_the_treatment_changes_neither_blocks_nor_positions_and_repeats_itself() -> None:
    lines = made_up_lines(100)
    plain, bert = (make_dataset(lines, treatment=TREATMENTS[name]) for name in ("mask", "bert"))
    special = set(special_ids(block_dictionary()))
    treated = 0
    for index in range(20):
        one, other, again = plain[index], bert[index], bert[index]
        assert one["positions"].equal(other["positions"])
        assert one["tokens"].equal(other["tokens"])
        assert other["masked"].equal(again["masked"])
        assert one["masked"].eq(plain.mask).all()
        not_masked = other["masked"].ne(bert.mask)
        assert not set(other["masked"][not_masked].tolist()) & special
        treated += int(not_masked.sum())
    assert treated > 0
    batch = bert.collater([bert[3], bert[4]])["net_input"]
    for row, index in enumerate((3, 4)):
        sample = bert[index]
        assert batch["masked_tokens"][row, sample["positions"]].equal(sample["masked"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"objective": "mlm"}, "bert"),
        ({"objective": "electra"}, "electra"),
        ({"objective": "amos"}, "mask"),
        ({"objective": "teams"}, "mask"),
        ({"objective": "mlm", "mask_treatment": "mask"}, "mask"),
        ({"objective": "amos", "mask_treatment": "electra"}, "electra"),
    ],
)
def test_the_default_goes_by_the_objective(tmp_path: Path, settings: dict, expected: str) -> None:
    task = make_task(write_corpus(tmp_path / "corpus"), **settings)
    assert task.mask_treatment == TREATMENTS[expected]
    task.load_dataset("train")
    assert task.datasets["train"].treatment == TREATMENTS[expected]
