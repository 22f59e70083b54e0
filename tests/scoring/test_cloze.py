"""Log-probabilities of tokens against loops over single sequences."""

import pytest
import torch
from saved_models import SCORED_SIZES, pretrained, sequences

from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.electric import ElectricConfig, ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.scoring.token_scorers import build_token_scorer

NUM_WORDS = 5
LENGTHS = (4, 1, 6, 0, 4, 2)
# Padding and batch change the order of sums in float32.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
ELECTRIC = {"electric": {"generator_size": 0.5}, "electra_tt": {"generator_size": 0.5}}
ELECTRIC |= {"two_tower": {"generator_size": 1.0, "generator_loss_tokens": "all"}}


def mlm(**settings):
    return pretrained(MlmModel, EncoderConfig(**(SCORED_SIZES | settings)), NUM_WORDS)


def electric(variant):
    config = ElectricConfig(**SCORED_SIZES, electric_variant=variant, mask_prob=0.15, **ELECTRIC[variant])
    return pretrained(ElectricModel, config, NUM_WORDS)


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
    loaded = mlm(relative_position_scheme="t5")
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
    loaded = electric(variant)
    texts = sequences(loaded.dictionary, LENGTHS, NUM_WORDS)
    for tokens, values in zip(texts, build_token_scorer(loaded, tokens_per_batch).log_probs(texts), strict=True):
        alone = loaded.model.token_log_probs(tokens[None])[0]
        torch.testing.assert_close(values, alone, **CLOSE)
        assert values[0] == values[-1] == 0
        assert bool((values[1:-1] != 0).all())
