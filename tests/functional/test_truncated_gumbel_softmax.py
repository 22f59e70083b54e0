"""The gradient of Gumbel-Softmax through its largest entries against the one through all rows."""

import math

import pytest
import torch

from amos_fairseq.functional import mixture as module
from amos_fairseq.functional.mixture import (
    TopEntries,
    adversarial_term,
    mix_logits,
    truncated_adversarial_term,
    truncated_mass,
)
from amos_fairseq.functional.sampling import gumbel_top_k_sampling, scores_outside_top_k

TAU = 0.3


class Mixture:
    """K depths at N positions with V rows, in float64; ``spread`` is the standard deviation of a depth's logits."""

    def __init__(self, num_positions: int, num_rows: int, width: int, spread: float, num_depths: int = 3):
        generator = torch.Generator().manual_seed(0)
        shapes = ((num_depths, num_positions, width), (num_positions, num_depths), (num_rows, width), (1, num_rows))
        values = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
        hidden, weights, self.embedding, self.bias = values
        self.hidden = (hidden * spread / math.sqrt(width)).requires_grad_()
        # gamma's own logits: a constant in the gradient of gamma, which a softmax takes away, does not count.
        self.scores = weights.requires_grad_()
        self.upstream = torch.randn(num_positions, width, generator=generator, dtype=torch.float64)

    @property
    def weights(self) -> torch.Tensor:
        return self.scores.softmax(-1)

    def logits(self, hidden_gradient: float) -> torch.Tensor:
        return mix_in_double(self.hidden, self.bias, self.weights, self.embedding, hidden_gradient)

    def entries(self, k: int) -> tuple[TopEntries, torch.Tensor]:
        """Entries of the fast sampler, and the corresponding noise [N,V] of all rows."""
        logits = self.logits(0.0).detach()
        weights = (logits - logits.amax(-1, keepdim=True)).exp().float()
        top_k = gumbel_top_k_sampling(weights, k)
        others = scores_outside_top_k(weights, top_k)
        scores = others.scatter_reduce(1, top_k.tokens, top_k.scores, "amax").double()
        rows = top_k.tokens
        of_depth = self.hidden.detach() @ self.embedding.T + self.bias
        kept = of_depth.gather(-1, rows.expand(len(of_depth), -1, -1)).permute(1, 2, 0)
        return TopEntries(rows, top_k.scores.double(), kept), scores - logits

    def truncated(self, entries: TopEntries, hidden_gradient: float) -> torch.Tensor:
        return truncated_adversarial_term(
            entries, self.hidden, self.weights, self.embedding, self.embedding, TAU, hidden_gradient
        )

    def gradients(self, residual: torch.Tensor) -> list[torch.Tensor]:
        found = torch.autograd.grad(residual, [self.scores, self.hidden], self.upstream, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]


def mix_in_double(hidden, bias, weights, embedding, hidden_gradient) -> torch.Tensor:
    """:func:`mix_logits` rounds to float32, which the comparison below would see."""
    states = hidden * hidden_gradient + (hidden - hidden * hidden_gradient).detach()
    return torch.einsum("nk,kne,ve->nv", weights, states, embedding) + bias


def test_mix_in_double_is_mix_logits() -> None:
    mixture = Mixture(4, 30, 6, 1.0)
    mixed = mix_logits(list(mixture.hidden), list(mixture.bias), mixture.weights, mixture.embedding)
    torch.testing.assert_close(mixed, mixture.logits(0.0).float())


@pytest.mark.parametrize("multiplier", [0.0, 0.5])
def test_gradient_is_exact_if_all_rows_are_entries(multiplier: float, monkeypatch) -> None:
    """2,000 entries contain all of 12 rows, most of them often; gathered two positions at a time."""
    monkeypatch.setattr(module, "chunks", lambda count, *_: [slice(i, i + 2) for i in range(0, count, 2)])
    torch.manual_seed(1)
    mixture = Mixture(5, 12, 6, 1.0)
    entries, noise = mixture.entries(2000)
    assert all(set(rows) == set(range(12)) for rows in entries.tokens.tolist())
    residual = mixture.truncated(entries, multiplier)
    assert torch.equal(residual, torch.zeros(5, 6, dtype=torch.float64))
    expected = adversarial_term(mixture.logits(multiplier), noise, TAU, mixture.embedding)
    got, wanted = mixture.gradients(residual), mixture.gradients(expected)
    assert len(got) == (2 if multiplier else 1)
    for ours, theirs in zip(got, wanted, strict=False):
        assert theirs.abs().max() > 1e-3
        # Scores are kept in float32: 6e-8 of numbers below 10, over tau.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("spread", "bound"), [(0.01, 1e-3), (1.0, 1e-3), (3.0, 2e-3), (8.0, 1e-3)])
def test_gradient_of_128_entries_of_32768_rows_is_near_the_exact_one(spread: float, bound: float) -> None:
    """Typically 1e-4 of the norm; the bound allows for positions whose largest entries are close to each other."""
    torch.manual_seed(2)
    mixture = Mixture(32, 32_768, 16, spread)
    entries, noise = mixture.entries(128)
    got = mixture.gradients(mixture.truncated(entries, 1.0))
    expected = mixture.gradients(adversarial_term(mixture.logits(1.0), noise, TAU, mixture.embedding))
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).norm() < bound * theirs.norm()
    few = TopEntries(entries.tokens[:, :4], entries.scores[:, :4], entries.logits[:, :4])
    four = mixture.gradients(mixture.truncated(few, 1.0))
    assert (four[0] - expected[0]).norm() > 10 * (got[0] - expected[0]).norm()


def test_truncated_mass_is_the_softmax_outside_the_entries() -> None:
    torch.manual_seed(3)
    mixture = Mixture(6, 500, 8, 1.0)
    logits = mixture.logits(0.0).detach()
    weights = (logits - logits.amax(-1, keepdim=True)).exp().float()
    top_k = gumbel_top_k_sampling(weights, 10)
    others = scores_outside_top_k(weights, top_k)
    lost = truncated_mass(top_k.scores, others, TAU)
    for position in range(6):
        seen = [math.exp(score / TAU) for score in top_k.scores[position].tolist()]
        unseen = [math.exp(score / TAU) for score in others[position].tolist()]
        assert lost[position].item() == pytest.approx(sum(unseen) / (sum(seen) + sum(unseen)), rel=1e-4)
    assert (lost > 1e-6).all()


def test_bfloat16_embeddings_keep_the_softmax_in_float32() -> None:
    """The error is the rounding of two products (2^-8)."""
    torch.manual_seed(4)
    mixture = Mixture(16, 300, 8, 1.0)
    entries, _ = mixture.entries(40)
    rounded, upstream = mixture.embedding.bfloat16(), mixture.upstream.bfloat16()
    table = rounded.double()
    exact = truncated_adversarial_term(entries, mixture.hidden, mixture.weights, table, table, TAU)
    mixture.upstream = upstream.double()
    (expected,) = mixture.gradients(exact)
    weights = mixture.scores.detach().float().requires_grad_()
    entries = TopEntries(entries.tokens, entries.scores.float(), entries.logits.float())
    gamma = weights.softmax(-1)
    residual = truncated_adversarial_term(entries, mixture.hidden.bfloat16(), gamma, rounded, rounded, TAU)
    assert residual.dtype == torch.bfloat16
    residual.backward(upstream)
    assert (weights.grad.double() - expected).norm() < 2**-7 * expected.norm()
