"""The AMOS model as a whole: its output, padding, dropout, precision and settings."""

import copy

import pytest
import torch
from reference_models import ReferenceAmos, assert_close, losses_and_gradients
from small_models import AMOS_SETTINGS, amos_criterion, gumbel, set_gumbel_noise, small_amos, small_batch

from amos_fairseq.models.amos import AmosOutput
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.modules import mixture as mixtures

PAD = 1


@pytest.fixture
def fixed_noise(monkeypatch):
    """Noise that does not depend on the batch's shape: position (b, m) of a batch gets row (b, m)."""
    noise = gumbel(8, 8, 64, seed=3)
    monkeypatch.setitem(AMOS_SETTINGS, "kernels", "reference")  # the fast kernels do not sample position by position
    monkeypatch.setattr(mixtures, "gumbel_noise", lambda like: noise[: like.size(0), : like.size(1)])


def tensors_of(output: AmosOutput) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(output).items() if torch.is_tensor(value)}


def test_shapes_dtypes_and_replaced_tokens():
    model, batch = small_amos(gumbel_entries=20), small_batch()
    net_input = batch["net_input"]
    output = model(PretrainingBatch(**net_input))
    shapes = {
        "mlm_nll": ((3, 4, 3), torch.float32),
        "mlm_correct": ((3, 4, 3), torch.bool),
        "mixture_weights": ((4, 3, 3), torch.float32),
        "sampled_tokens": ((4, 3), torch.int64),
        "corrupted_tokens": ((4, 12), torch.int64),
        "replaced": ((4, 12), torch.bool),
        "rtd_logits": ((4, 12), torch.float32),
        "rtd_states": ((4, 12, AMOS_SETTINGS["encoder_embed_dim"]), torch.float32),
        "truncated_mass": ((4,), torch.float32),
    }
    assert output.predictions is None
    assert {name: (tuple(value.shape), value.dtype) for name, value in tensors_of(output).items()} == shapes
    corrupted = net_input["tokens"].clone()
    for row, slot in net_input["masked_weights"].nonzero().tolist():
        corrupted[row, net_input["masked_positions"][row, slot]] = output.sampled_tokens[row, slot]
    assert torch.equal(output.corrupted_tokens, corrupted)
    assert torch.equal(output.replaced, corrupted != net_input["tokens"])
    assert not output.replaced[net_input["tokens"] == PAD].any()


def test_sample_equal_to_the_original_counts_as_original(monkeypatch):
    """Noise that always selects the original leaves nothing replaced."""
    model, batch = small_amos(), small_batch()
    tokens, positions = batch["net_input"]["tokens"], batch["net_input"]["masked_positions"]
    originals = torch.nn.functional.one_hot(tokens.gather(1, positions), 64).float()
    set_gumbel_noise(monkeypatch, originals * 1e4)
    output = model(PretrainingBatch(**batch["net_input"]))
    assert torch.equal(output.corrupted_tokens, tokens)
    assert not output.replaced.any()


def test_output_without_padding_mask_is_equal_if_nothing_is_padded(fixed_noise):
    model, batch = small_amos(), small_batch((12, 12))
    with_mask = model(PretrainingBatch(**batch["net_input"]))
    without = model(PretrainingBatch(**batch["net_input"], has_padding=False))
    for name, value in tensors_of(with_mask).items():
        assert torch.allclose(value.float(), getattr(without, name).float(), atol=1e-5), name


def test_generator_has_no_dropout_and_the_discriminator_has(fixed_noise):
    model, batch = small_amos(dropout=0.3, attention_dropout=0.3), small_batch()
    first, second = (model(PretrainingBatch(**batch["net_input"])) for _ in range(2))
    assert torch.equal(first.mlm_nll, second.mlm_nll)
    assert torch.equal(first.corrupted_tokens, second.corrupted_tokens)
    assert not torch.equal(first.rtd_logits, second.rtd_logits)
    model.eval()
    assert torch.equal(*(model(PretrainingBatch(**batch["net_input"])).rtd_logits for _ in range(2)))


def test_predict_logits_and_features_match_forward():
    model, batch = small_amos().eval(), small_batch()
    net_input = batch["net_input"]
    output = model(PretrainingBatch(**net_input))
    logits, gamma = model.predict_logits(PretrainingBatch(**net_input))
    originals = net_input["tokens"].gather(1, net_input["masked_positions"])
    nll = -logits.log_softmax(-1).gather(-1, originals.expand(3, -1, -1).unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(nll, output.mlm_nll, atol=1e-5)
    assert torch.allclose(gamma, output.mixture_weights, atol=1e-6)
    features = model.extract_features(output.corrupted_tokens)
    assert torch.allclose(model.detection_head(features), output.rtd_logits, atol=1e-5)


def test_bfloat16_stays_near_float32_and_reports_float32(fixed_noise):
    """bfloat16 rounds to 8 bits, 2^-8; over a dozen products in a row a few times that."""
    model, batch = small_amos(init_std=0.05, linear_init_std=0.1), small_batch()
    exact = model(PretrainingBatch(**batch["net_input"]))
    rounded = copy.deepcopy(model).bfloat16()(PretrainingBatch(**batch["net_input"]))
    assert (rounded.mlm_nll - exact.mlm_nll).abs().max() < 0.1
    assert (rounded.mixture_weights - exact.mixture_weights).abs().max() < 0.05
    assert rounded.mlm_nll.dtype == rounded.mixture_weights.dtype == rounded.rtd_logits.dtype == torch.float32


@pytest.mark.parametrize("settings", [{"kernels": "reference"}, {}, {"gumbel_entries": 20}], ids=str)
def test_nan_reaches_the_loss_without_an_error(settings):
    model = small_amos(**settings)
    with torch.no_grad():
        model.discriminator.layers[0].ffn_in.weight[0, 0] = float("nan")
        model.mlm_heads[0].dense.weight[0, 0] = float("nan")
    loss, _, log = amos_criterion()(model, small_batch())
    assert loss.isnan()
    loss.backward()
    assert log["_logits"].sum() == 41


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
    noise = gumbel(4, 5, 64, seed=4)
    set_gumbel_noise(monkeypatch, noise)
    return noise


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_losses_samples_and_all_gradients_match_the_reference(name, way, noise):
    """Four columns, and two or three slots of each block, are padding; what the model samples for such a slot is not read."""
    model, batch = small_amos(**SETTINGS[name], **WAYS[way]), small_batch(num_columns=16, slots=5)
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
    model(PretrainingBatch(**small_batch(num_columns=16, slots=5)["net_input"])).rtd_logits.sum().backward()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    receivers = {name.partition(".")[0] for name, grad in named.items() if grad is not None and grad.any()}
    assert receivers == {"discriminator", "detection_head", "embed_tokens"}
