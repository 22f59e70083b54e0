"""The two-tower cloze model: no output depends on its own token; ends, padding, directions."""

import pytest
import torch
from reference_models import naive_cloze
from small_models import encoder_config, small_batch, small_electric

from amos_fairseq.functional.attention import masked_pairs
from amos_fairseq.models.electric import TwoTower

LENGTHS = (9, 6, 1)
SCHEMES = ["none", "t5", "amos"]


def towers(scheme: str = "t5", **settings) -> TwoTower:
    torch.manual_seed(0)
    module = TwoTower(encoder_config(**({"num_layers": 2, "embedding_width": 6, "position_scheme": scheme} | settings)))
    with torch.no_grad():  # far from uniform attention, so that every path carries a gradient
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padding(lengths=LENGTHS, width: int = 9) -> torch.Tensor:
    return torch.arange(width) >= torch.tensor(lengths)[:, None]


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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_half_depends_on_its_own_side(scheme: str) -> None:
    module, embeddings = towers(scheme), random(1, 9, 6).requires_grad_()
    left, right = module(embeddings).chunk(2, dim=-1)
    for half, side in ((left, range(4)), (right, range(5, 9))):
        (gradient,) = torch.autograd.grad((half[0, 4] * random(8, seed=3)).sum(), embeddings, retain_graph=True)
        assert gradient[0].abs().sum(-1).nonzero().flatten().tolist() == list(side)


@torch.no_grad()
def test_states_beyond_the_ends_are_learned() -> None:
    module = towers()
    before, behind = module.boundaries.weight
    for lengths, mask in ((LENGTHS, padding()), ((9, 9, 9), None)):
        left, right = module(random(3, 9, 6), mask).chunk(2, dim=-1)
        for b, length in enumerate(lengths):
            assert left[b, 0].equal(before)
            assert not left[b, 1].equal(before)
            assert right[b, length - 1].equal(behind)
            assert length == 1 or not right[b, length - 2].equal(behind)


@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_padding_changes_nothing_for_real_tokens(scheme: str) -> None:
    """Other order of sums in the masked softmax: within float32's rounding."""
    module, embeddings = towers(scheme), random(3, 9, 6)
    out = module(embeddings, padding())
    for b, length in enumerate(LENGTHS):
        assert torch.allclose(out[b, :length], module(embeddings[b : b + 1, :length])[0], atol=1e-5)


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
    """Logits of the whole generator; float32 through two layers against float64."""
    model, batch = small_electric(relative_position_scheme=scheme), small_batch()
    tokens = batch["net_input"]["tokens"]
    logits = model.logits(model.generate(tokens, tokens.eq(1)), model.mlm_head.bias)
    for row, text in enumerate(tokens):
        text = text[text.ne(1)]
        assert torch.allclose(logits[row, : len(text)].double(), naive_cloze(model, text), atol=1e-4)
