"""Embeddings that the discriminator shares but does not train: which loss reaches which table, and what is kept of them."""

from typing import Any

import pytest
import torch
from small_models import (
    fine_tuning_task,
    gumbel,
    set_gumbel_noise,
    set_samples,
    small_amos,
    small_batch,
    small_electra,
    small_teams,
)
from torch import Tensor
from torch.nn.functional import embedding as look_up

from amos_fairseq.hugging_face.parts import encoder_part
from amos_fairseq.models.fine_tuning import DELTA
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.probing.features import PIECES, hidden_states, parts_of

BUILDERS = {"electra": small_electra, "teams": small_teams, "amos": small_amos}
DISENTANGLED = {"disentangled_embeddings": True}


def disentangled(objective: str, **settings: Any) -> Any:
    """A model with a difference that is not 0, in float64."""
    model = BUILDERS[objective](**DISENTANGLED, **settings)
    with torch.no_grad():
        model.disentangled_embedding.delta.weight.normal_(0, 0.3)
        model.disentangled_embedding.delta.weight[1] = 0  # padding
    return model.double()


def with_samples(model: Any, batch: dict[str, Tensor]) -> None:
    """Replacement tokens, and for TEAMS candidates, that do not depend on the weights."""
    generator = torch.Generator().manual_seed(5)
    sampled = torch.randint(4, 44, batch["masked_positions"].shape, generator=generator)
    candidates = None
    if hasattr(model, "mws_head"):
        others = torch.randint(4, 44, (*sampled.shape, 3), generator=generator)
        candidates = torch.cat([batch["tokens"].gather(1, batch["masked_positions"]).unsqueeze(-1), others], dim=-1)
    set_samples(model, sampled, candidates)


def discriminator_loss(output: Any) -> Tensor:
    """A sum with different gradients for all logits of the discriminator."""
    loss = (output.rtd_logits.double() ** 2).sum()
    if getattr(output, "mws_logits", None) is not None:
        loss = loss + (output.mws_logits.double() ** 3).sum()
    return loss


@pytest.mark.parametrize("objective", ["electra", "teams"])
def test_the_discriminator_trains_the_difference_and_the_generator_its_embeddings(objective: str) -> None:
    model, batch = disentangled(objective), small_batch()["net_input"]
    with_samples(model, batch)
    discriminator_loss(model(PretrainingBatch(**batch))).backward()
    assert model.embed_tokens.weight.grad is None
    assert model.disentangled_embedding.delta.weight.grad.abs().max() > 0
    model.zero_grad()
    model(PretrainingBatch(**batch)).mlm_nll.sum().backward()
    assert model.embed_tokens.weight.grad.abs().max() > 0
    assert model.disentangled_embedding.delta.weight.grad is None


@pytest.mark.parametrize("objective", ["electra", "teams"])
def test_its_gradient_is_that_of_a_table_of_its_own(objective: str) -> None:
    """A second writing in float64: the discriminator reads the sum from a separate table, a leaf of the graph."""
    model, batch = disentangled(objective), small_batch()["net_input"]
    with_samples(model, batch)
    discriminator_loss(model(PretrainingBatch(**batch))).backward()
    table = (model.embed_tokens.weight + model.disentangled_embedding.delta.weight).detach().requires_grad_()
    own = type("WithTable", (type(model),), {"encoder_embedding": lambda self, tokens: look_up(tokens, table, 1)})
    difference = model.disentangled_embedding.delta.weight.grad.clone()
    model.__class__ = own
    discriminator_loss(model(PretrainingBatch(**batch))).backward()
    torch.testing.assert_close(difference, table.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_the_reversed_gradient_of_amos_comes_from_the_table_that_the_discriminator_reads(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of v is that of y, -(dL/dx) (E + Delta)^T at the masked positions, through the softmax of logits and noise.

    Mixture and noise are float32: 1e-4.
    """
    batch, noise = small_batch()["net_input"], gumbel(4, 3, 64)
    set_gumbel_noise(monkeypatch, noise)
    model = disentangled("amos", kernels=kernels, gumbel_entries=0)
    inputs = []

    def keep(module: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        given[0].retain_grad()
        inputs.append(given[0])

    model.discriminator.register_forward_pre_hook(keep)
    discriminator_loss(model(PretrainingBatch(**batch))).backward()
    found = model.mixture.v.grad.clone()
    positions = batch["masked_positions"]
    grad = inputs[0].grad.gather(1, positions.unsqueeze(-1).expand(-1, -1, 16)) * batch["masked_weights"][..., None]

    features, hidden = model.generate(PretrainingBatch(**batch))
    v = model.mixture.v.detach().clone().requires_grad_()
    gamma = torch.stack([f.detach() @ v for f in features], dim=-1).softmax(-1)
    mixed = sum(gamma[..., d, None] * h.detach() for d, h in enumerate(hidden))
    logits = mixed @ model.embed_tokens.weight.detach().T + model.mlm_heads[0].bias.detach()
    logits = logits.masked_fill(model.never_sampled_mask, -torch.inf)
    y = ((logits + noise) / model.cfg.gumbel_temperature).softmax(-1)
    y.backward(-grad @ model.disentangled_embedding.weight.detach().T)
    torch.testing.assert_close(found, v.grad, rtol=1e-4, atol=1e-4 * found.abs().max().item())


@pytest.mark.parametrize("objective", BUILDERS)
def test_a_new_model_computes_what_plain_sharing_computes(objective: str) -> None:
    batch, outputs = small_batch()["net_input"], []
    plain, new = BUILDERS[objective]().eval(), BUILDERS[objective](**DISENTANGLED).eval()
    state = plain.state_dict()
    assert DELTA not in state
    new.upgrade_state_dict_named(state, "")
    new.load_state_dict(state)
    assert not new.disentangled_embedding.delta.weight.any()
    for model in (plain, new):
        torch.manual_seed(1)
        outputs.append(vars(model(PretrainingBatch(**batch))).values())
    for with_plain, with_difference in zip(*outputs, strict=True):
        if isinstance(with_plain, Tensor):
            assert torch.equal(with_plain, with_difference)


@torch.no_grad()
@pytest.mark.parametrize("objective", BUILDERS)
def test_what_is_used_after_pretraining_has_the_sum(objective: str) -> None:
    """Fine-tuning, export, probing and the features read one table: E + Delta."""
    model = disentangled(objective).float().eval()
    table = model.embed_tokens.weight + model.disentangled_embedding.delta.weight
    tokens = small_batch()["net_input"]["tokens"]
    expected = model.encoder(look_up(tokens, table, 1), tokens.eq(1))[-1]
    torch.testing.assert_close(model.extract_features(tokens), expected)
    assert torch.equal(encoder_part(model).weights["embed_tokens.weight"], table)
    probed = parts_of(model)["discriminator"]
    last = len(model.encoder.layers)
    states = hidden_states(probed, [PIECES, last], tokens, 1)
    torch.testing.assert_close(states[last], expected)
    torch.testing.assert_close(states[PIECES], look_up(tokens, table, 1))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned = type(model).build_model(model.cfg, fine_tuning_task()).eval()
    tuned.upgrade_state_dict_named(state, "")
    tuned.load_state_dict(state)
    assert torch.equal(tuned.embed_tokens.weight, table)
    real = tokens.ne(1)
    torch.testing.assert_close(tuned.extract_features(tokens)[real], expected[real])
