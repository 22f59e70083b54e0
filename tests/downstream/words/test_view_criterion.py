"""The divergence of two predictions: words by hand, a float64 loop, classes that are excluded, gradients."""

import math

import pytest
import torch

from amos_fairseq.downstream.words.views import summed_divergence


def test_two_words_by_hand() -> None:
    """p = (3/4, 1/4) and q = (1/2, 1/2): 3/4 ln 3/2 + 1/4 ln 1/2. The second word is predicted alike; a third slot is
    padded."""
    fixed = torch.tensor([[[math.log(3), 0.0], [5.0, 5.0], [9.0, 0.0]]])
    scores = torch.tensor([[[1.0, 1.0], [-2.0, -2.0], [0.0, 9.0]]])
    found = summed_divergence(fixed, scores, torch.tensor([[True, True, False]]))
    assert float(found) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)


def test_a_loop_in_float64() -> None:
    """Edges of trees: classes in two dimensions, some of them excluded on both sides; the gradient reaches q alone."""
    generator = torch.Generator().manual_seed(1)
    fixed, scores = (torch.randn(2, 3, 4, 2, generator=generator).requires_grad_() for _ in range(2))
    is_word = torch.tensor([[True, True, True], [True, False, False]])
    excluded = torch.zeros(2, 3, 4, 1, dtype=torch.bool)
    excluded[:, :, 3], excluded[0, 1, 2] = True, True
    total = summed_divergence(*(own.masked_fill(excluded, -math.inf) for own in (fixed, scores)), is_word)
    expected = 0.0
    for row, word in is_word.nonzero().tolist():
        kept = [candidate for candidate in range(4) if not excluded[row, word, candidate]]
        p, q = (own[row, word, kept].double().flatten().softmax(0) for own in (fixed, scores))
        expected += sum(float(a * (a / b).log()) for a, b in zip(p, q, strict=True))
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)  # float32 sums of 4 words
    total.backward()
    assert fixed.grad is None
    assert scores.grad.isfinite().all()
    # d KL / d scores = q - p, 0 at padded slots and excluded classes.
    own = [fixed.detach().masked_fill(excluded, -math.inf), scores.detach().masked_fill(excluded, -math.inf)]
    p, q = (one.flatten(2).softmax(-1).view_as(one) for one in own)
    torch.testing.assert_close(scores.grad, (q - p) * is_word[..., None, None])
