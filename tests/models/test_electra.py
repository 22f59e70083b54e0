"""ELECTRA's variants: shared and frozen parameters, samples against their probabilities, settings that exclude one another."""

import pytest
import torch
from fairseq.optim.fp16_optimizer import FP16Optimizer
from frequencies import assert_shares
from omegaconf import OmegaConf
from small_models import (
    ELECTRA_VARIANTS,
    ENCODER_SETTINGS,
    NUM_TOKENS,
    electra_criterion,
    small_batch,
    small_electra,
    small_task,
)

from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.electra import ElectraModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.optim.grouped_adam import GroupedAdam, GroupedAdamConfig

SHARED_EMBEDDINGS = ("embed_positions", "embed_token_types", "embedding_norm")
FROZEN = {"generator", "generator_embed_tokens", "mlm_head"}  # parts of a model with a frozen generator


def step(model: ElectraModel, **settings) -> torch.Tensor:
    loss, _, _ = electra_criterion(**settings)(model, small_batch())
    loss.backward()
    return loss


def trained(model: ElectraModel) -> set[str]:
    """Parameters, by each of their names, with a gradient that is not 0."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if parameter.grad is not None and parameter.grad.any()}


def test_shared_parameters_are_one_object_and_receive_both_gradients() -> None:
    none, embeddings, everything = (small_electra(**ELECTRA_VARIANTS[name]) for name in ("none", "plain", "all"))
    for name in SHARED_EMBEDDINGS:
        if getattr(none.generator, name) is not None:
            assert getattr(none.generator, name) is not getattr(none.discriminator, name)
        assert getattr(embeddings.generator, name) is getattr(embeddings.discriminator, name)
    assert none.generator_embedding is not none.embed_tokens
    assert embeddings.generator_embedding is embeddings.embed_tokens
    assert embeddings.generator.layers[0] is not embeddings.discriminator.layers[0]
    assert everything.generator is everything.discriminator
    names = {name.partition(".")[0] for name, _ in everything.named_parameters()}
    assert names == {"embed_tokens", "discriminator", "mlm_head", "detection_head"}

    # Without a detection loss only the generator and the parameters that it shares learn.
    for model, shares in ((none, False), (embeddings, True), (everything, True)):
        step(model, discriminator_loss_weight=0.0)
        learning = trained(model)
        assert ("embed_tokens.weight" in learning) == shares
        assert ("discriminator.embed_positions.weight" in learning) == shares
        assert ("discriminator.layers.0.ffn_in.weight" in learning) == (model is everything)
        assert "generator.layers.0.ffn_in.weight" in learning


def test_reward_trains_only_the_generator_and_its_baseline() -> None:
    """Without a detection loss the discriminator learns nothing, and the baseline nothing but itself."""
    model = small_electra(adversarial=True)
    step(model, discriminator_loss_weight=0.0)
    assert "generator.layers.0.ffn_in.weight" in trained(model)
    assert "discriminator.layers.1.ffn_in.weight" not in trained(model)
    model.zero_grad()
    criterion, batch = electra_criterion(), small_batch()
    output = model(PretrainingBatch(**batch["net_input"]))
    output.baseline_logits.sum().backward()
    assert trained(model) == {"baseline.weight"}
    assert not criterion.rewards(output, PretrainingBatch(**batch["net_input"])).requires_grad
    assert not output.mlm_nll.requires_grad  # no maximum likelihood in this mode


def mlm_weights(**settings) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    config = EncoderConfig(**(ENCODER_SETTINGS | {"embedding_dim": 8} | settings))
    return MlmModel.build_model(config, small_task()).state_dict()


def test_second_stage_starts_from_the_first_and_does_not_change_the_generator() -> None:
    """Both networks have the first model's weights; after updates the generator's bits are the same, the others are not."""
    model, first = small_electra(**ELECTRA_VARIANTS["frozen"]), mlm_weights()
    head = {name: value.clone() for name, value in model.detection_head.state_dict().items()}
    with pytest.raises(UserError, match="--finetune-from-model"):
        model.check_ready()
    model.set_num_updates(20)  # fairseq sets the first stage's updates before it loads its weights
    model.load_state_dict(dict(first))
    model.check_ready()
    here = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in first.items():
        if name.startswith("transformer."):
            for network in ("generator.", "discriminator."):
                assert here[network + name.removeprefix("transformer.")].equal(value), name
        elif name.startswith("embed_tokens."):
            assert here[name].equal(value)
            assert here["generator_" + name].equal(value)
        else:
            assert here[name].equal(value), name
    assert all(here[f"detection_head.{name}"].equal(value) for name, value in head.items())

    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        step(model)
        optimizer.step()
    for name, value in model.state_dict().items():
        part = name.partition(".")[0]
        is_frozen = part in FROZEN
        assert value.equal(here[name]) == is_frozen or part == "token_noise", name
    # Continued: a checkpoint of this stage holds all that is needed.
    again = small_electra(seed=1, **ELECTRA_VARIANTS["frozen"])
    again.load_state_dict(model.state_dict())
    again.check_ready()
    assert all(value.equal(model.state_dict()[name]) for name, value in again.state_dict().items())


def test_second_stage_without_the_weights_of_the_first() -> None:
    """The generator, of half the width, has the first model's weights, everything else the initial values of this model."""
    model = small_electra(**ELECTRA_VARIANTS["frozen_random"])
    assert model.generator.shape.width * 2 == model.discriminator.shape.width
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    first = mlm_weights(encoder_embed_dim=8, encoder_ffn_embed_dim=12, encoder_attention_heads=1)
    model.load_state_dict(dict(first))
    model.check_ready()
    for name, value in model.state_dict().items():
        part, _, rest = name.partition(".")
        of_first = {"generator": f"transformer.{rest}", "mlm_head": name}
        of_first |= {"generator_embed_tokens": f"embed_tokens.{rest}"}
        assert value.equal(first[of_first[part]] if part in of_first else initial[name]), name
    assert not model.embed_tokens.weight.equal(model.generator_embed_tokens.weight)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_optimizer_does_not_change_a_frozen_generator(precision: torch.dtype) -> None:
    """fairseq's trainer passes the parameters that learn to the optimizer; in bf16 only these have masters."""
    model = small_electra(**ELECTRA_VARIANTS["frozen"])
    model.load_state_dict(mlm_weights())
    model.to(precision)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    flags = GroupedAdamConfig(weight_decay=0.5, decay_all_parameters=True, lr=[0.1])
    if precision == torch.bfloat16:
        common = {"bf16": True, "fp16_no_flatten_grads": True, "fp16_scale_window": 4}
        cfg = OmegaConf.create({"common": common, "optimizer": vars(flags) | {"_name": "grouped_adam"}})
        optimizer = FP16Optimizer.build_optimizer(cfg, learning)
    else:
        optimizer = GroupedAdam(flags, learning)
    for _ in range(2):
        optimizer.zero_grad()
        loss, _, _ = electra_criterion()(model, small_batch())
        optimizer.backward(loss)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.equal(before[name]) == (name.partition(".")[0] in FROZEN), name
    assert len(optimizer.state_dict()["state"]) == len(learning)


def test_a_frozen_generator_has_no_dropout_and_the_discriminator_keeps_its_own() -> None:
    model = small_electra(**ELECTRA_VARIANTS["frozen"], dropout=0.1, attention_dropout=0.1).train()
    net_input = small_batch()["net_input"]
    batch = PretrainingBatch(**net_input)
    assert model.generate(batch).equal(model.generate(batch))
    assert not model.extract_features(net_input["tokens"]).equal(model.extract_features(net_input["tokens"]))


def test_a_first_stage_of_other_sizes_is_refused() -> None:
    with pytest.raises(UserError, match=r"another encoder.*discriminator"):
        small_electra(**ELECTRA_VARIANTS["frozen"]).load_state_dict(mlm_weights(encoder_layers=1))


ORDINARY = slice(4, 4 + NUM_TOKENS)
NUM_SAMPLES = 20_000


def frequencies(model: ElectraModel, hidden: torch.Tensor | None, original: int) -> torch.Tensor:
    """Shares of each row among samples for one position: [V]."""
    originals = torch.full((1, NUM_SAMPLES), original)
    if hidden is None:
        sampled = model.predict_and_sample(None, originals).sampled
    elif model.is_fast:
        sampled = model.predict_and_sample_in_chunks(hidden.expand(1, NUM_SAMPLES, -1), originals).sampled
    else:
        sampled = model.sample(model.noise_logits(hidden.expand(1, NUM_SAMPLES, -1), originals))
    return torch.bincount(sampled.flatten(), minlength=len(model.never_sampled_mask)) / NUM_SAMPLES


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("disallows", [False, True])
@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_samples_follow_temperature_and_forbidden_originals(temperature: float, disallows: bool, kernels: str) -> None:
    """p^(1/T), without special tokens, padding rows and, where it is forbidden, the original, normalised again."""
    model = small_electra(generator_temperature=temperature, disallow_true_token=disallows, kernels=kernels)
    torch.manual_seed(3)
    # Likely and unlikely tokens: a temperature that is 10 % off is then seen.
    hidden, original = torch.randn(1, 1, 8) * 2.0, 9
    logits = torch.nn.functional.linear(hidden[0, 0], model.embed_tokens.weight, model.mlm_head.bias).double()
    expected = logits.exp() ** (1 / temperature)
    expected[model.never_sampled_mask] = 0
    if disallows:
        expected[original] = 0
    seen = frequencies(model, hidden, original)
    assert_shares(seen, expected / expected.sum(), NUM_SAMPLES)
    assert (seen[original] == 0) == disallows


def test_unigram_samples_follow_the_counts_of_the_text() -> None:
    model, counts = small_electra(generator="unigram"), torch.arange(4 + NUM_TOKENS + 1)
    assert model.awaits_token_counts
    model.set_token_counts(counts)
    assert not model.awaits_token_counts
    expected = torch.zeros(len(model.never_sampled_mask), dtype=torch.float64)
    expected[ORDINARY] = counts[ORDINARY].double()  # special tokens occur and are not sampled
    assert_shares(frequencies(model, None, 9), expected / expected.sum(), NUM_SAMPLES)
    # They are part of the checkpoint: another model of the same settings needs no text.
    other = small_electra(seed=1, generator="unigram")
    other.load_state_dict(model.state_dict())
    assert not other.awaits_token_counts
    assert other.token_noise.counts.equal(model.token_noise.counts)


def test_uniform_samples() -> None:
    model = small_electra(generator="uniform")
    expected = torch.zeros(len(model.never_sampled_mask), dtype=torch.float64)
    expected[ORDINARY] = 1 / NUM_TOKENS
    assert_shares(frequencies(model, None, 9), expected, NUM_SAMPLES)
    assert not model.awaits_token_counts
    assert model.depth_names == ["uniform"]
    logits, weights = model.predict_logits(PretrainingBatch(**small_batch()["net_input"]))
    assert logits.shape == (1, 4, 3, len(expected))
    assert weights.shape == (4, 3, 1)
