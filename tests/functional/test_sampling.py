"""Frequencies against the softmax, rows that must never be sampled, the top k against Gumbel noise, and the straight-through
gradient against torch.nn.functional.gumbel_softmax."""

import itertools
import math

import pytest
import torch
from frequencies import FALSE_ALARM, assert_shares, chi_square_p
from scipy import stats
from small_models import gumbel, small_amos, small_batch

from amos_fairseq.functional import sampling
from amos_fairseq.functional.mixture import adversarial_term
from amos_fairseq.functional.sampling import (
    gumbel_max,
    gumbel_noise,
    gumbel_top_k,
    gumbel_top_k_sampling,
    is_repeated,
    pick,
    sample_with_replacement,
    sample_without_replacement,
    scores_outside_top_k,
)
from amos_fairseq.models.pretraining import PretrainingBatch

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
    samples = sampling.uniform(torch.empty(10, 3), 200, 5)
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
    monkeypatch.setattr(sampling, "uniform", lambda like, *shape: torch.full((len(like), *shape), point).double())
    for num_rows in (64, 53, 1000):
        weights = some_weights(num_rows, 3.0) * scale
        possible = weights[0].nonzero().flatten().tolist()
        assert int(sample_with_replacement(weights, 1)) in possible
        # All of them, one after another.
        assert set(sample_without_replacement(weights.clone(), len(possible)).flatten().tolist()) == set(possible)


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
        sampled = [sample_with_replacement(weights, 5), sample_without_replacement(weights.clone(), 5)]
        rows = torch.cat([*sampled, gumbel_top_k_sampling(weights, 5).tokens])
        assert 0 <= rows.min() <= rows.max() < 64


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


def test_noise_has_the_gumbel_distribution():
    torch.manual_seed(0)
    noise = gumbel_noise(torch.empty(200_000, dtype=torch.bfloat16))
    assert noise.dtype == torch.float32
    assert noise.isfinite().all()
    assert stats.kstest(noise.numpy(), stats.gumbel_r.cdf).pvalue > FALSE_ALARM


@pytest.mark.parametrize("settings", [{"kernels": "reference"}, {}, {"gumbel_entries": 8}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_samples_the_mixture_of_its_depths(dtype, settings):
    """20,000 replacements of each position against softmax(sum_d gamma^(d) logits^(d)) over ordinary tokens; no other row."""
    model = small_amos(seed=2, **settings).to(dtype).eval()
    copies, batch = 20_000, small_batch((12,), slots=3)["net_input"]
    with torch.no_grad():
        logits, gamma = model.predict_logits(PretrainingBatch(**batch))
        hidden = model.generate(PretrainingBatch(**batch))[1]
    torch.manual_seed(3)
    originals = torch.zeros(copies, 3, dtype=torch.int64)
    many = [h.expand(copies, -1, -1) for h in hidden], gamma.expand(copies, -1, -1)
    with torch.set_grad_enabled("gumbel_entries" in settings):  # only training computes entries
        sampled = model.predict_and_sample(*many, originals).sampled
    mixed = torch.einsum("bmk,kbmv->bmv", gamma.double(), logits.double())[0]
    ordinary = torch.arange(4, 44)
    assert torch.isin(sampled, ordinary).all()
    for slot in range(3):
        counts = torch.bincount(sampled[:, slot], minlength=64)[ordinary]
        assert chi_square_p(counts, mixed[slot, ordinary].softmax(-1)) > FALSE_ALARM


def straight_through(logits, noise, temperature, embedding, upstream, monkeypatch):
    """Gradients of PyTorch's hard Gumbel-Softmax for the same noise: of the logits, and of the embedding."""
    logits = logits.clone().requires_grad_()
    embedding = embedding.clone().requires_grad_()
    with monkeypatch.context() as patch:
        # gumbel_softmax samples -log(Exp(1)); an exponential of exp(-noise) gives it our noise.
        patch.setattr(torch.Tensor, "exponential_", lambda self: self.copy_((-noise.to(self.dtype)).exp()))
        one_hot = torch.nn.functional.gumbel_softmax(logits, tau=temperature, hard=True)
    (one_hot @ embedding).backward(upstream)
    return one_hot.detach(), logits.grad, embedding.grad


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_gradient_is_minus_that_of_torch_gumbel_softmax(temperature, monkeypatch):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 40, generator=generator, dtype=torch.float64)
    logits[:, :4] = -math.inf
    noise = gumbel(6, 40, seed=5).double()
    embedding = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    upstream = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    one_hot, expected, of_embedding = straight_through(logits, noise, temperature, embedding, upstream, monkeypatch)
    assert torch.equal(gumbel_max(logits, noise), one_hot.argmax(-1))

    logits.requires_grad_()
    embedding.requires_grad_()
    residual = adversarial_term(logits, noise, temperature, embedding)
    assert torch.equal(residual, torch.zeros(6, 8, dtype=torch.float64))
    residual.backward(upstream)
    assert torch.allclose(logits.grad, -expected, rtol=1e-9, atol=1e-12)
    assert logits.grad.abs().max() > 1e-3
    assert not logits.grad[:, :4].any()
    # The rest of s E is the plain lookup of the sampled rows; together they are PyTorch's gradient of the embedding.
    assert embedding.grad is None or not embedding.grad.any()
    lookup = embedding.detach().clone().requires_grad_()
    lookup[gumbel_max(logits, noise)].backward(upstream)
    assert torch.allclose(lookup.grad, of_embedding, atol=1e-12)


def inclusion_by_enumeration(probabilities: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of each row to be among k rows sampled one after another without replacement, and to be the second."""
    included, second = torch.zeros_like(probabilities), torch.zeros_like(probabilities)
    for order in itertools.permutations(range(len(probabilities)), k):
        left, chance = 1.0, 1.0
        for row in order:
            chance *= float(probabilities[row]) / left
            left -= float(probabilities[row])
        included[list(order)] += chance
        second[order[1]] += chance
    return included, second


def gumbel_rows(weights: torch.Tensor, k: int) -> torch.Tensor:
    logits = weights.log()
    return gumbel_top_k(logits, gumbel_noise(logits), k)


@pytest.mark.parametrize("sample", [gumbel_rows, sample_without_replacement], ids=["reference", "fast"])
@pytest.mark.parametrize("k", [2, 3])
def test_sampling_without_replacement_matches_enumeration(k, sample):
    """100,000 samples of k of 6 rows against all their orders, within 5 standard errors."""
    torch.manual_seed(11)
    logits = torch.tensor([1.5, -math.inf, 0.0, -1.0, 0.7, 2.0, -0.5, -math.inf])
    count = 100_000
    rows = sample(logits.exp().repeat(count, 1), k)
    assert rows.shape == (count, k)
    assert all((rows[:, i] != rows[:, j]).all() for i, j in itertools.combinations(range(k), 2))
    included, second = inclusion_by_enumeration(logits.double().softmax(-1), k)
    for seen, expected in ((rows.flatten(), included), (rows[:, 1], second)):
        shares = torch.bincount(seen, minlength=len(logits)) / count
        assert_shares(shares, expected, count)
    assert included[[1, 7]].eq(0).all()
    # Sampling with replacement would be far off.
    alone = 1 - (1 - logits.double().softmax(-1)) ** k
    assert (alone - included).abs().max() > 10 * 0.5 / count**0.5
