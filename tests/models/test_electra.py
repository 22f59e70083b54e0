"""ELECTRA's variants: shared parameters, samples against their probabilities, settings that exclude one another."""

import pytest
import torch
from frequencies import assert_shares
from small_models import ELECTRA_VARIANTS, NUM_TOKENS, electra_criterion, small_batch, small_electra

from amos_fairseq.models.electra import ElectraModel
from amos_fairseq.models.pretraining import PretrainingBatch

SHARED_EMBEDDINGS = ("embed_positions", "embed_token_types", "embedding_norm")


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
