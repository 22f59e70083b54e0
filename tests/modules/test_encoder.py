"""Self-attention against a loop; padding, detached layers and dropout of the encoder."""

import pytest
import torch
from small_models import encoder_config
from torch.utils.flop_counter import FlopCounterMode

from amos_fairseq.modules.bert_encoder import BertEncoder


def encoder(**settings) -> BertEncoder:
    torch.manual_seed(0)
    return BertEncoder(encoder_config(**settings))


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


@pytest.mark.parametrize("attends_to", ["all", "past"])
@pytest.mark.parametrize("scheme", ["t5", "none"])
def test_fast_kernels_match_the_reference(scheme, attends_to):
    """Three layers in float64: some thousand roundings. One sequence has only padding, whose outputs no loss counts."""
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [True] * 6])
    results = []
    for kernels in ("fast", "reference"):
        module = encoder(position_scheme=scheme, attends_to=attends_to, kernels=kernels).double().train()
        embeddings = random(3, 6, 8).double().requires_grad_()
        outputs = torch.stack(list(module(embeddings, mask)))
        assert outputs.isfinite().all()
        outputs = outputs[:, ~mask]
        outputs.pow(3).sum().backward()
        results.append([outputs.detach(), embeddings.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


def test_last_layer_at_some_positions_equals_that_of_all():
    """Values and gradients of the reference, which computes every token; position 0 marks a padded slot, twice."""
    positions = torch.tensor([[3, 5, 0, 0], [1, 9, 2, 0]])
    found = {}
    for kernels in ("fast", "reference"):
        module, embeddings = encoder(kernels=kernels), random(2, 10, 8).requires_grad_()
        *between, last = module(embeddings, last_positions=positions)
        assert [tuple(layer.shape) for layer in (*between, last)] == [(2, 10, 8), (2, 10, 8), (2, 4, 8)]
        complete = module(embeddings)[-1]
        torch.testing.assert_close(last, complete.gather(1, positions.unsqueeze(-1).expand(-1, -1, 8)))
        last.backward(random(2, 4, 8, seed=2))
        found[kernels] = [last, embeddings.grad, *(parameter.grad for parameter in module.parameters())]
    torch.testing.assert_close(found["fast"], found["reference"], rtol=1e-4, atol=1e-5)  # float32, three layers


def test_positions_that_are_not_needed_are_not_computed():
    """Per token that is not read: D^2 multiplications of the output projection, 2 D F of the feed-forward network."""
    module, embeddings = encoder(num_layers=1, kernels="fast"), random(2, 10, 8)

    def count(**settings: torch.Tensor) -> int:
        with FlopCounterMode(display=False) as counter:
            module(embeddings, **settings)
        return counter.get_total_flops()

    not_read = 2 * (10 - 4)
    saved = count() - count(last_positions=torch.zeros(2, 4, dtype=torch.int64))
    assert saved == not_read * 2 * (8 * 8 + 2 * 8 * 12)


def test_detached_layer_passes_no_gradient_down():
    module = encoder()
    outputs = module(random(2, 6, 8), detach_after=[1])
    (outputs[2] ** 2).sum().backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in module.layers[0].parameters())
    assert all(parameter.grad is not None for parameter in module.layers[1].parameters())
    module.zero_grad()
    (outputs[0] ** 2).sum().backward()
    assert module.layers[0].ffn_out.weight.grad.any()
