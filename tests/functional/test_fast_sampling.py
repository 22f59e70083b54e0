"""Sampling from few random samples a position: frequencies, rows that must never be sampled, top k against Gumbel noise."""

import math

import pytest
import torch
from frequencies import FALSE_ALARM, chi_square_p
from scipy import stats

from amos_fairseq.functional import fast_sampling
from amos_fairseq.functional.fast_sampling import (
    gumbel_top_k_sampling,
    is_repeated,
    pick,
    sample_with_replacement,
    sample_without_replacement,
    scores_outside_top_k,
)

LAST = 1 - 2**-53  # the largest number that torch.rand gives in float64


def some_weights(num_rows: int, spread: float) -> torch.Tensor:
    """One position [1,V] with rows of weight 0 at both ends and in between, a whole block of them too."""
    generator = torch.Generator().manual_seed(num_rows)
    weights = (torch.randn(1, num_rows, generator=generator) * spread).exp()
    zeros = [0, num_rows // 2, num_rows - 1, *range(num_rows // 4, num_rows // 4 + 2 * math.isqrt(num_rows))]
    weights[:, zeros] = 0
    return weights


@pytest.mark.parametrize(("num_rows", "spread"), [(64, 1.0), (53, 1.0), (1000, 0.5), (1024, 3.0)])
def test_samples_follow_the_weights(num_rows: int, spread: float) -> None:
    """60,000 samples, many of a position and one of many; 53 rows are a single block."""
    torch.manual_seed(0)
    weights = some_weights(num_rows, spread)
    for sampled in (sample_with_replacement(weights, 60_000), sample_with_replacement(weights.repeat(60_000, 1), 1)):
        counts = torch.bincount(sampled.flatten(), minlength=num_rows)
        assert len(counts) == num_rows
        assert chi_square_p(counts, weights[0].double() / weights.double().sum()) > FALSE_ALARM
        wrong = weights[0].double() ** 1.3  # the test would see it
        assert chi_square_p(counts, wrong / wrong.sum()) < FALSE_ALARM


def test_uniform_samples_are_finer_than_float32() -> None:
    """Steps of 2^-24 would make blocks of a probability below 6e-8 twice as likely, or impossible."""
    samples = fast_sampling.uniform(torch.empty(10, 3), 200, 5)
    assert samples.shape == (10, 200, 5)
    assert 0 <= samples.min() < samples.max() < 1
    assert (samples * 2**24).frac().ne(0).float().mean() > 0.99


def test_positions_and_samples_are_independent() -> None:
    """Two tokens of probability 1/2: neighbours agree in half of 100,000 pairs, within 5 standard deviations."""
    torch.manual_seed(1)
    rows = sample_with_replacement(torch.ones(1000, 4) * torch.tensor([0.0, 1.0, 0.0, 1.0]), 100).eq(1)
    spread = 5 * math.sqrt(100_000) / 2
    assert abs(int((rows[1:] == rows[:-1]).sum()) - 99_900 / 2) < spread
    assert abs(int((rows[:, 1:] == rows[:, :-1]).sum()) - 99_000 / 2) < spread


@pytest.mark.parametrize("point", [0.0, 0.5, LAST])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1 / 3, 1e30])
def test_rows_of_weight_0_are_never_sampled(point: float, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first one at the point 0, nor the last one at the largest point."""
    monkeypatch.setattr(fast_sampling, "uniform", lambda like, *shape: torch.full((len(like), *shape), point).double())
    for num_rows in (64, 53, 1000):
        weights = some_weights(num_rows, 3.0) * scale
        possible = weights[0].nonzero().flatten()
        sampled = {
            int(sample_with_replacement(weights, 1)),
            *sample_without_replacement(weights.clone(), len(possible)).flatten().tolist(),
        }
        assert sampled == set(possible.tolist())  # all of them, one after another


def test_pick_by_cumulative_sums() -> None:
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0, 1.0, 0.0])
    points = torch.tensor([0.0, 0.4999, 0.5001, 0.7499, 0.7501, LAST]).double()
    assert pick(weights, points).tolist() == [1, 1, 3, 3, 4, 4]


def test_rare_tokens_beside_a_likely_one_keep_their_probability() -> None:
    """2 million samples of 1,023 tokens of 2e-7 each and one of nearly 1; the smallest float32 steps below 1 are 6e-8."""
    torch.manual_seed(2)
    weights = torch.full((1, 1024), 2e-7)
    weights[:, 300] = 1.0
    sampled = torch.cat([sample_with_replacement(weights, 250_000) for _ in range(8)], dim=1)
    others = sampled[sampled.ne(300)]
    assert abs(len(others) - 409) < 5 * math.sqrt(409)
    assert len(others.unique()) > 300  # 409 samples of 1,023 tokens: some 338 different ones


def test_zero_nan_and_infinite_weights_give_valid_rows() -> None:
    """An overflow must reach the loss, which stops or skips the update; it must not end in an index out of range."""
    for value in (0.0, math.nan, math.inf):
        weights = torch.full((3, 64), value)
        for sampled in (
            sample_with_replacement(weights, 5),
            sample_without_replacement(weights.clone(), 5),
            gumbel_top_k_sampling(weights, 5).tokens,
        ):
            assert sampled.ge(0).all()
            assert sampled.lt(64).all()


def test_repeated_rows() -> None:
    rows = torch.tensor([[3, 1, 3, 2, 1, 3], [0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]])
    expected = [[row in line[:place] for place, row in enumerate(line)] for line in rows.tolist()]
    assert is_repeated(rows).tolist() == expected


def perturbed(weights: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """log w + Gumbel noise of every row, from the top k and the rows outside; and the first row."""
    top_k = gumbel_top_k_sampling(weights, k)
    unseen = scores_outside_top_k(weights, top_k)
    seen = torch.full_like(unseen, -math.inf).scatter_reduce(1, top_k.tokens, top_k.scores, "amax")
    assert (unseen.isneginf() | seen.isneginf()).all()
    # The entries are the largest: no other row is above them.
    # No row is twice among them.
    num_rows = [len(set(rows)) for rows in top_k.tokens.tolist()]
    assert top_k.scores.isfinite().sum(1).tolist() == num_rows
    lowest = top_k.scores.masked_fill(top_k.scores.isneginf(), math.inf).amin(1)
    assert unseen.amax(1).le(lowest).all()
    return torch.maximum(seen, unseen), top_k.tokens[:, 0]


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_gumbel_top_k_is_gumbel_noise_on_every_row(spread: float) -> None:
    """30,000 times the top 5 of 9 rows: each row's noise is Gumbel(0, 1), any two are uncorrelated, the first is the
    largest and follows the softmax."""
    torch.manual_seed(3)
    logits = torch.linspace(-1, 1, 10) * spread
    logits[4] = -math.inf
    possible = torch.arange(10).ne(4)
    scores, first = perturbed(logits.exp().repeat(30_000, 1), 5)
    assert scores[:, 4].isneginf().all()
    assert torch.equal(scores.argmax(1), first)
    noise = (scores - logits)[:, possible].double()
    for row in noise.T:
        assert stats.kstest(row.numpy(), stats.gumbel_r.cdf).pvalue > FALSE_ALARM
    correlations = torch.corrcoef(noise.T) - torch.eye(9)
    assert correlations.abs().max() < 5 / math.sqrt(30_000)
    counts = torch.bincount(first, minlength=10)
    assert chi_square_p(counts, logits.double().softmax(-1)) > FALSE_ALARM


def test_gumbel_top_k_shifts_with_the_scale_of_the_weights() -> None:
    weights = some_weights(64, 2.0).repeat(3, 1)
    torch.manual_seed(4)
    one = gumbel_top_k_sampling(weights, 20)
    torch.manual_seed(4)
    other = gumbel_top_k_sampling(weights * 2**-40, 20)
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.scores - 40 * math.log(2), other.scores, rtol=0, atol=1e-5)
