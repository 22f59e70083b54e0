"""Losses and gradients of AMOS, every parameter and every ablation, against the float64 reference."""

import pytest
import torch
from reference_models import ReferenceAmos, assert_close, losses_and_gradients
from small_models import amos_criterion, gumbel, set_gumbel_noise, small_amos, small_batch

from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.modules import mixture as mixtures

SETTINGS = {
    "amos": {},
    "other depths": {"generator_depths": "2,3"},
    "every layer": {"generator_depths": "1,2,3,4"},
    "single depth": {"generator_depths": "3"},
    "no stop-gradient": {"no_stop_gradient": True},
    "separate generators": {"separate_generators": True, "generator_depths": "1,2,3"},
    "equal generators": {"separate_generators": True, "generator_depths": "2,2,2"},
    "adversarial MLM": {"adversarial_mlm_multiplier": 0.1},
    "adversarial MLM, uniform": {"adversarial_mlm_multiplier": 1.0, "mixture": "uniform"},
    "adversarial MLM, single depth": {"adversarial_mlm_multiplier": 2.0, "generator_depths": "2"},
    "uniform": {"mixture": "uniform"},
    "fixed": {"mixture": "fixed", "fixed_mixture_weights": "0.2,0.3,0.5"},
    "no relative positions": {"relative_position_scheme": "none"},
    "temperature": {"gumbel_temperature": 1.7},
}
SEPARATE = {"separate_generators": True, "generator_depths": "1,2"}
SETTINGS["adversarial MLM, separate"] = {"adversarial_mlm_multiplier": 0.5, **SEPARATE}
CONSTANT = {"single depth": [1.0], "adversarial MLM, single depth": [1.0], "fixed": [0.2, 0.3, 0.5]}
# Of 64 rows 40 are ordinary tokens, so 40 entries are exact.
WAYS = {
    "reference": {"kernels": "reference"},
    "exact": {"kernels": "fast", "gumbel_entries": 0},
    "entries": {"kernels": "fast", "gumbel_entries": 40},
}
WEIGHT, SHARE = 50.0, 3 / 12


@pytest.fixture
def noise(monkeypatch):
    noise = gumbel(4, 3, 64, seed=3)
    set_gumbel_noise(monkeypatch, noise)
    return noise


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_losses_samples_and_all_gradients_match_the_reference(name, way, noise):
    model, batch = small_amos(**SETTINGS[name], **WAYS[way]), small_batch()
    expected = ReferenceAmos(model).run(batch, noise, WEIGHT, SHARE, CONSTANT.get(name, [1 / 3] * 3))
    loss, log, gradients = losses_and_gradients(model, amos_criterion(WEIGHT), batch)

    total = expected.generator_loss + WEIGHT * SHARE * expected.detection_loss
    assert float(loss) == pytest.approx(total, rel=1e-5)
    assert float(log["rtd_loss"]) == pytest.approx(expected.detection_loss, rel=1e-5)
    output = model(PretrainingBatch(**batch["net_input"]))
    for row, count in enumerate((3, 2, 3, 3)):
        assert output.sampled_tokens[row, :count].tolist() == expected.sampled[row]
        assert torch.allclose(output.mixture_weights[row, :count].double(), expected.mixture_weights[row], atol=1e-6)
    assert_close(gradients, expected.gradients)


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
@pytest.mark.parametrize("way", WAYS)
def test_without_a_learned_mixture_detection_stays_in_the_discriminator(settings, way, noise, monkeypatch):
    """And the vocabulary-wide products of the adversarial path are not computed."""
    for residual in ("adversarial_term", "truncated_adversarial_term"):
        monkeypatch.setattr(mixtures, residual, None)
    model = small_amos(**settings, **WAYS[way])
    model(PretrainingBatch(**small_batch()["net_input"])).rtd_logits.sum().backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    receivers = {name.partition(".")[0] for name, grad in named.items() if grad is not None and grad.any()}
    assert receivers == {"discriminator", "detection_head", "embed_tokens"}
