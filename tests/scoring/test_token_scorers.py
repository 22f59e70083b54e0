"""Log-probabilities of tokens against loops over single sequences; of ELECTRA against an enumeration of all cases."""

import dataclasses
import math

import pytest
import torch
from saved_models import SCORED_SIZES, pretrained, sequences

from amos_fairseq.errors import UserError
from amos_fairseq.functional.replaced_token_detection import energies_of, log_prob_of_original
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.electric import ElectricConfig, ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.scoring.token_scorers import build_pair_scorer, build_token_scorer

NUM_WORDS = 5
LENGTHS = (4, 1, 6, 0, 4, 2)
# Padding and batch change the order of sums in float32.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ELECTRIC = {"electric": {"generator_size": 0.5}, "electra_tt": {"generator_size": 0.5}}
ELECTRIC |= {"two_tower": {"generator_size": 1.0, "generator_loss_tokens": "all"}}
SHARE = 0.25
TEXT = (0.7, 0.2, 0.08, 0.02)  # P of four words in one context
NOISE = (0.4, 0.1, 0.3, 0.2)  # q


@torch.no_grad()
def logits_where_masked(model, tokens, position):
    """Logits [V] of the MLM at one masked position of one sequence [L], in float64."""
    masked = tokens.clone()
    masked[position] = 4 + NUM_WORDS  # <mask> comes after the words
    states = model.transformer(model.embed_tokens(masked[None]))[-1]
    hidden = model.mlm_head(states)[0, position]
    return hidden.double() @ model.embed_tokens.weight.double().T + model.mlm_head.bias.double()


@pytest.mark.parametrize("tokens_per_batch", [1, 20, 4096])
def test_mlm_masks_one_token_at_a_time(tokens_per_batch):
    loaded = pretrained(MlmModel, EncoderConfig(**SCORED_SIZES, relative_position_scheme="t5"), NUM_WORDS)
    texts = sequences(loaded.dictionary, LENGTHS, NUM_WORDS)
    found = build_token_scorer(loaded, tokens_per_batch).log_probs(texts)
    for tokens, values in zip(texts, found, strict=True):
        assert values[0] == values[-1] == 0, "<s> and </s> have no score"
        for position in range(1, len(tokens) - 1):
            expected = logits_where_masked(loaded.model, tokens, position).log_softmax(-1)[tokens[position]]
            torch.testing.assert_close(values[position].double(), expected, **CLOSE)


@pytest.mark.parametrize("variant", ELECTRIC)
@pytest.mark.parametrize("tokens_per_batch", [1, 20, 4096])
def test_batches_of_one_pass_models_equal_single_sequences(variant, tokens_per_batch):
    config = ElectricConfig(**SCORED_SIZES, electric_variant=variant, mask_prob=0.15, **ELECTRIC[variant])
    loaded = pretrained(ElectricModel, config, NUM_WORDS)
    texts = sequences(loaded.dictionary, LENGTHS, NUM_WORDS)
    for tokens, values in zip(texts, build_token_scorer(loaded, tokens_per_batch).log_probs(texts), strict=True):
        alone = loaded.model.token_log_probs(tokens[None])[0]
        torch.testing.assert_close(values, alone, **CLOSE)
        assert values[0] == values[-1] == 0
        assert bool((values[1:-1] != 0).all())


def odds_of_replaced(word: int, sampled_is_noise: bool) -> float:
    """Of all cases in which a position has ``word``: the probability of the label "replaced" over that of "original"."""
    replaced = unreplaced = 0.0
    for original, probability in enumerate(TEXT):
        if original == word:
            unreplaced += probability * (1 - SHARE)
        sampled = probability * SHARE * NOISE[word]
        if sampled_is_noise or original != word:
            replaced += sampled
        else:
            unreplaced += sampled
    return replaced / unreplaced


def test_optimal_detector_gives_the_probability():
    """With the labels of each formula, and not with those of the other."""
    log_q = torch.tensor(NOISE).log()
    for sampled_is_noise in (False, True):
        logits = torch.tensor([math.log(odds_of_replaced(word, sampled_is_noise)) for word in range(4)])
        exact = log_prob_of_original(logits, log_q, SHARE).exp()
        thesis = (-energies_of(logits, log_q, SHARE)).exp()
        right, wrong = (thesis, exact) if sampled_is_noise else (exact, thesis)
        assert right.tolist() == pytest.approx(TEXT, rel=1e-5)
        assert wrong[0].item() != pytest.approx(TEXT[0], rel=0.05)


def test_no_probability_exceeds_one():
    logits = torch.linspace(-60, 60, 121)
    log_q = torch.linspace(-30, 0, 61)
    found = log_prob_of_original(logits[:, None], log_q, 0.15)
    assert bool((found <= 0).all())
    assert bool(found.isfinite().all())


def electra(**settings):
    config = ElectraConfig(**(SCORED_SIZES | {"generator_size": 0.5, "init_std": 0.5} | settings))
    return pretrained(ElectraModel, config, NUM_WORDS, SHARE)


@torch.no_grad()
def naive(model, tokens, temperature=1.0):
    """Log q of each word by one pass a word, and the discriminator's logits, in float64."""
    log_q = []
    for position in range(1, len(tokens) - 1):
        masked = tokens.clone()
        masked[position] = 4 + NUM_WORDS
        hidden = model.mlm_head(model.generator(model.embed_tokens(masked[None]))[-1])[0, position].double()
        logits = hidden @ model.embed_tokens.weight.double().T + model.mlm_head.bias.double()
        words = (logits[4 : 4 + NUM_WORDS] / temperature).log_softmax(0)  # no special token is ever sampled
        log_q.append(words[tokens[position] - 4])
    logits = model.detection_head(model.discriminator(model.embed_tokens(tokens[None]))[-1])[0, 1:-1].double()
    return torch.stack(log_q), logits


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_generator_gets_masked_tokens_and_discriminator_the_text(temperature):
    loaded = electra(generator_temperature=temperature)
    texts = sequences(loaded.dictionary, (4, 1, 6, 2), NUM_WORDS)
    scorer = build_token_scorer(loaded, 20)
    for tokens, values in zip(texts, scorer.log_probs(texts), strict=True):
        assert scorer.num_passes(tokens) == len(tokens) - 2 + 1
        log_q, logits = naive(loaded.model, tokens, temperature)
        # Two networks in float32 behind logarithms.
        expected = log_prob_of_original(logits, log_q, SHARE)
        torch.testing.assert_close(values[1:-1].double(), expected, rtol=1e-3, atol=1e-4)
        assert values[0] == values[-1] == 0


def test_the_masked_share_is_that_at_the_end_of_the_training():
    loaded = electra()
    loaded.task["tokens_per_sample"] = 64
    loaded.task["phases"] = "[{length: 32, share: 0.5}, {length: 64, share: 0.5, mask_prob: 0.4}]"
    (tokens,) = sequences(loaded.dictionary, (4,), NUM_WORDS)
    (found,) = build_token_scorer(loaded, 4096).log_probs([tokens])
    log_q, logits = naive(loaded.model, tokens)
    # Two networks in float32 behind logarithms.
    torch.testing.assert_close(found[1:-1].double(), log_prob_of_original(logits, log_q, 0.4), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_generator_without_context():
    loaded = electra(generator="uniform", generator_size=1 / 2)
    (tokens,) = sequences(loaded.dictionary, (4,), NUM_WORDS)
    logits = loaded.model.detection_head(loaded.model.extract_features(tokens[None]))[0, 1:-1]
    expected = log_prob_of_original(logits, torch.full((4,), -math.log(NUM_WORDS)), SHARE)
    (found,) = build_token_scorer(loaded, 4096).log_probs([tokens])
    torch.testing.assert_close(found[1:-1], expected, rtol=1e-4, atol=1e-5)


def test_models_without_a_score_are_refused():
    """One is not trained to have it, or was imported without a head."""
    mlm, new = pretrained(MlmModel, EncoderConfig(**SCORED_SIZES), NUM_WORDS), {"mlm_head", "generator"}
    config = ElectricConfig(**SCORED_SIZES, mask_prob=0.15, generator_size=0.5)
    untrained = pretrained(ElectricModel, config, NUM_WORDS, discriminator_loss_weight=0.0)
    for build, loaded, is_new, reason in (
        (build_token_scorer, mlm, new, "was imported without mlm_head, which is random: import a model that"),
        (build_token_scorer, electra(), new, "was imported without mlm_head"),
        (build_token_scorer, electra(), {"detection_head"}, "without detection_head"),
        (build_pair_scorer, electra(), {"detection_head"}, "without detection_head"),
        (build_token_scorer, untrained, {}, "gives no probability of a token: its discriminator was not trained"),
        (build_token_scorer, electra(disallow_true_token=True), {}, "gives no .*never allowed to sample"),
    ):
        with pytest.raises(UserError, match=f"tiny.pt .*{reason}"):
            build(dataclasses.replace(loaded, is_new=frozenset(is_new)), 4096)
    build_pair_scorer(dataclasses.replace(electra(), is_new=frozenset(new)), 4096)
