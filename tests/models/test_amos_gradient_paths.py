"""The parameters that receive a gradient from each loss (AMOS section 3.3, Eq. 4), stated by parameter names.

test_amos_gradients.py compares all values; these tests state which gradients are zero, reversed or proportional.
"""

import pytest
import torch
from small_models import AMOS_SETTINGS, amos_criterion, gumbel, set_gumbel_noise, small_amos, small_batch

from amos_fairseq.functional import mixture as mixture_functions
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.modules import mixture as mixtures

DEPTHS = [1, 2, 4]
ENTRY = {"generators.0.embed_positions", "generators.0.embedding_norm"}
WAYS = {
    "reference": {"kernels": "reference"},
    "all entries": {"kernels": "fast", "gumbel_entries": 0},
    "some entries": {"kernels": "fast", "gumbel_entries": 20},
}


@pytest.fixture(autouse=True, params=WAYS.values(), ids=WAYS)
def way(monkeypatch, request):
    """Every statement holds for each implementation of the output layer."""
    for setting, value in request.param.items():
        monkeypatch.setitem(AMOS_SETTINGS, setting, value)
    set_gumbel_noise(monkeypatch, gumbel(4, 3, 64, seed=3))


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of ``loss`` that are not zero everywhere, by name."""
    model.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    named = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad for name, grad in named.items() if grad.any()}


def owner(name: str) -> str:
    """The part of the model that a parameter belongs to: ``generators.0.layers.3``, ``mlm_heads.0``, ``mixture``, ..."""
    parts = name.split(".")
    if parts[0] == "generators":
        return ".".join(parts[: 4 if parts[2] == "layers" else 3])
    return ".".join(parts[:2]) if parts[0] == "mlm_heads" else parts[0]


def layers(*numbers: int) -> set[str]:
    return {f"generators.0.layers.{number - 1}" for number in numbers}


SHARED = {"mlm_heads.0", "embed_tokens", "generators.0.relative_position"}


@pytest.mark.parametrize(("depth", "own"), [(0, ENTRY | layers(1)), (1, layers(2)), (2, layers(3, 4))])
def test_mlm_loss_of_a_depth_trains_its_own_block_and_what_is_shared(depth, own):
    model = small_amos()
    output = model(PretrainingBatch(**small_batch()["net_input"]))
    assert {owner(name) for name in gradients(model, output.mlm_nll[depth].sum())} == SHARED | own


def test_without_stop_gradient_a_deep_loss_trains_every_block_below():
    model = small_amos(no_stop_gradient=True)
    output = model(PretrainingBatch(**small_batch()["net_input"]))
    assert {owner(name) for name in gradients(model, output.mlm_nll[2].sum())} == SHARED | ENTRY | layers(1, 2, 3, 4)


def test_detection_loss_reaches_v_and_features_but_no_mlm_head():
    model = small_amos()
    output = model(PretrainingBatch(**small_batch()["net_input"]))
    receivers = {owner(name) for name in gradients(model, output.rtd_logits.sum())}
    generator = ENTRY | layers(1, 2, 3, 4) | {"generators.0.relative_position"}
    assert receivers == generator | {"discriminator", "detection_head", "embed_tokens", "mixture"}


@pytest.mark.parametrize(
    "settings",
    [
        {"mixture": "uniform"},
        {"mixture": "random_layer"},
        {"mixture": "layer_switch"},
        {"mixture": "fixed", "fixed_mixture_weights": "0.2,0.3,0.5"},
        {"generator_depths": "4"},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_without_a_learned_mixture_detection_stays_in_the_discriminator(settings, monkeypatch):
    """And the vocabulary-wide products of the adversarial path are not computed."""
    for residual in ("adversarial_term", "truncated_adversarial_term"):
        monkeypatch.setattr(mixtures, residual, None)
    model = small_amos(**settings)
    output = model(PretrainingBatch(**small_batch()["net_input"]))
    receivers = {owner(name) for name in gradients(model, output.rtd_logits.sum())}
    assert receivers == {"discriminator", "detection_head", "embed_tokens"}


def test_embedding_receives_only_the_ordinary_gradient_of_the_input_tokens():
    """Adversarial path open to h alone: no row but those of the texts read; E and b get none through the logits."""
    model = small_amos(mixture="uniform", adversarial_mlm_multiplier=0.5, separate_generators=True)
    batch = small_batch()
    for generator in model.generators:
        generator.requires_grad_(False)
    output = model(PretrainingBatch(**batch["net_input"]))
    got = gradients(model, output.rtd_logits.sum())
    rows = got["embed_tokens.weight"].abs().sum(1).nonzero().flatten().tolist()
    read = set(output.corrupted_tokens.flatten().tolist()) | set(batch["net_input"]["masked_tokens"].flatten().tolist())
    assert set(rows) <= read - {1}
    assert {"mlm_heads.0.dense.weight", "mlm_heads.2.norm.weight"} <= got.keys()
    assert not {f"mlm_heads.{k}.bias" for k in range(3)} & got.keys()


def test_reversal_changes_the_sign_for_the_mixture_and_nothing_in_the_discriminator(monkeypatch):
    model, batch = small_amos(), small_batch()
    reversed_ = gradients(model, model(PretrainingBatch(**batch["net_input"])).rtd_logits.sum())
    monkeypatch.setattr(mixture_functions, "reverse_gradient", lambda x: x * 1)
    straight = gradients(model, model(PretrainingBatch(**batch["net_input"])).rtd_logits.sum())
    assert reversed_.keys() == straight.keys()
    for name, grad in reversed_.items():
        if name.startswith(("mixture", "generators")):
            assert torch.allclose(grad, -straight[name], atol=1e-6), name
        elif name != "embed_tokens.weight":
            assert torch.equal(grad, straight[name]), name
    # The embedding has both: reversed through the features of block 1, ordinary at the rows that the discriminator reads.
    mean = (reversed_["embed_tokens.weight"] + straight["embed_tokens.weight"]) / 2
    uniform = small_amos(mixture="uniform")
    with torch.no_grad():  # the same parameters, no adversarial path
        uniform.load_state_dict({k: v for k, v in model.state_dict().items() if k != "mixture.v"})
    monkeypatch.setattr(uniform.mixture, "forward", lambda features: model.mixture(features).detach())
    ordinary = gradients(uniform, uniform(PretrainingBatch(**batch["net_input"])).rtd_logits.sum())[
        "embed_tokens.weight"
    ]
    assert torch.allclose(mean, ordinary, atol=1e-5)


@pytest.mark.parametrize("multiplier", [0.0, 0.1])
def test_lambda_enters_once(multiplier):
    """Twice lambda gives twice the adversarial gradient, none gives none."""
    model, batch = small_amos(adversarial_mlm_multiplier=multiplier), small_batch()

    def of(weight: float) -> dict[str, torch.Tensor]:
        return gradients(model, amos_criterion(weight)(model, batch)[0])

    none, once, twice = of(0.0), of(50.0), of(100.0)
    assert not [name for name in none if name.startswith(("mixture", "discriminator", "detection_head"))]
    for name, gradient in once.items():
        zero, two = none.get(name, 0), twice[name]
        assert torch.allclose(two - zero, 2 * (gradient - zero), atol=1e-5 * two.abs().max()), name
