"""The two-tower cloze model: no output depends on its own token; ends, padding, directions."""

import pytest
import torch
from reference_models import naive_cloze
from small_models import encoder_config, small_electric

from amos_fairseq.functional.attention import masked_pairs
from amos_fairseq.models.electric import TwoTower

LENGTHS = (9, 6, 1)
SCHEMES = ["none", "t5", "amos"]


def towers(scheme: str = "t5") -> TwoTower:
    torch.manual_seed(0)
    module = TwoTower(encoder_config(num_layers=2, embedding_width=6, position_scheme=scheme))
    with torch.no_grad():  # far from uniform attention, so that every path carries a gradient
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padding() -> torch.Tensor:
    return torch.arange(9) >= torch.tensor(LENGTHS)[:, None]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("padded", [True, False])
def test_output_depends_on_every_real_token_but_its_own(scheme: str, padded: bool) -> None:
    """By the gradient of a random sum of entry t, for every text and token: zero at t and at padding, nowhere else."""
    module, embeddings = towers(scheme), random(3, 9, 6).requires_grad_()
    mask = padding() if padded else None
    out = module(embeddings, mask)
    weights = random(*out.shape, seed=2)
    for b, length in enumerate(LENGTHS if padded else (9, 9, 9)):
        for t in range(length):
            (gradient,) = torch.autograd.grad((out[b, t] * weights[b, t]).sum(), embeddings, retain_graph=True)
            seen = gradient.abs().sum(-1).ne(0)
            expected = torch.zeros(3, 9, dtype=torch.bool)
            expected[b, :length] = True
            expected[b, t] = False
            assert seen.equal(expected), (b, t)


def test_padded_rows_are_finite_forward_and_backward() -> None:
    module, embeddings = towers(), random(3, 9, 6).requires_grad_()
    for side in ("past", "future"):  # not every kernel of attention has an answer for a row without a key
        assert not masked_pairs(9, padding(), side, device=embeddings.device).all(-1).any()
    out = module(embeddings, padding())
    assert out.isfinite().all()
    out.square().sum().backward()
    assert embeddings.grad.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_logits_match_a_loop(scheme: str) -> None:
    """With the learned states at both ends, each text without its padding; float32 of two layers against float64."""
    model = small_electric(relative_position_scheme=scheme)
    tokens = torch.randint(4, 44, (3, 9), generator=torch.Generator().manual_seed(4)).masked_fill(padding(), 1)
    logits = model.logits(model.generate(tokens, padding()), model.mlm_head.bias)
    for row, length in enumerate(LENGTHS):
        expected = naive_cloze(model, tokens[row, :length])
        assert torch.allclose(logits[row, :length].double(), expected, atol=1e-4)
