"""All encoders against their reference; padding; a last layer at some positions."""

import pytest
import torch
from small_models import deberta_config, encoder_config, modern_config

from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.modules.encoder import TransformerEncoder

CONFIGS = {"bert": encoder_config, "modernbert": modern_config, "deberta": deberta_config}


def encoder(family: str = "bert", **settings) -> TransformerEncoder:
    torch.manual_seed(0)
    return CONFIGS[family](**settings).build()


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", ["t5", "amos", "none"])
@torch.no_grad()
def test_padding_columns_change_nothing_for_real_tokens(scheme):
    module, embeddings = encoder(position_scheme=scheme).eval(), random(2, 6, 8)
    padded = torch.cat([embeddings, random(2, 4, 8, seed=3)], dim=1)
    mask = torch.tensor([[False] * 6 + [True] * 4] * 2)
    for short, long in zip(module(embeddings), module(padded, mask), strict=True):
        assert torch.allclose(short, long[:, :6], atol=1e-6)
    for without, unmasked in zip(module(embeddings), module(embeddings, mask[:, :6]), strict=True):
        assert torch.allclose(without, unmasked, atol=1e-6)


OF_BERT = [{"position_scheme": scheme, "attends_to": side} for scheme in ("t5", "none") for side in ("all", "past")]


@pytest.mark.parametrize(
    ("length", "settings"),
    [*((6, settings) for settings in OF_BERT), (10, {"family": "modernbert"}), (520, {"family": "modernbert"})],
)
def test_fast_kernels_match_the_reference(length, settings):
    """Layers in float64: some thousand roundings. One sequence has only padding, whose outputs no loss counts."""
    mask = torch.arange(length) >= torch.tensor([[length], [length - 4], [0]])
    results = []
    for kernels in ("fast", "reference"):
        module = encoder(**settings, kernels=kernels).double().train()
        embeddings = random(3, length, 8).double().requires_grad_()
        outputs = torch.stack(list(module(embeddings, mask)))
        assert outputs.isfinite().all()
        outputs = outputs[:, ~mask]
        outputs.pow(3).sum().backward()
        results.append([outputs.detach(), embeddings.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", CONFIGS)
def test_last_layer_at_some_positions_equals_that_of_all(family):
    """Values and gradients of the reference, which computes every token; position 0 marks a padded slot, twice."""
    positions = torch.tensor([[3, 5, 0, 0], [1, 9, 2, 0]])
    found = {}
    for kernels in ("fast", "reference"):
        module, embeddings = encoder(family, kernels=kernels), random(2, 10, 8).requires_grad_()
        *between, last = module(embeddings, last_positions=positions)
        assert {tuple(layer.shape) for layer in between} == {(2, 10, 8)}
        complete = module(embeddings)
        torch.testing.assert_close(last, gather_positions(complete[-1], positions))
        torch.testing.assert_close(complete.at(1, positions), gather_positions(complete[1], positions))
        last.backward(random(2, 4, 8, seed=2))
        found[kernels] = [last, embeddings.grad, *(parameter.grad for parameter in module.parameters())]
    torch.testing.assert_close(found["fast"], found["reference"], rtol=1e-4, atol=1e-5)  # float32, some layers
