"""Electric trained on a known distribution: energies converge to its log-probabilities, with normaliser near 1."""

from types import SimpleNamespace

import pytest
import torch
from small_models import batch_of, electric_criterion, small_dictionary
from torch import Tensor

from amos_fairseq.models.electric import ElectricConfig, ElectricModel

VOCABULARY, NOISE_SHARE, TEXTS = 5, 0.3, 256
SIZES = {"encoder_layers": 1, "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 2}
SIZES |= {"max_positions": 3, "dropout": 0.0, "attention_dropout": 0.0, "linear_init_std": 0.1}
SIZES |= {"mask_prob": NOISE_SHARE}


def joint() -> Tensor:
    """P(a, b) of two tokens: [5,5] with conditional probabilities from 0.01 to 0.9."""
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5
    return logits.flatten().softmax(0).view(VOCABULARY, VOCABULARY)


def texts(pairs: Tensor) -> Tensor:
    """[N] indices of pairs -> [N,3] tokens ``<s> a b``."""
    return torch.stack([torch.zeros_like(pairs), 4 + pairs // VOCABULARY, 4 + pairs % VOCABULARY], dim=1)


def noisy_batch(generator: torch.Generator) -> dict:
    """The second token is noise with the probability of the model's setting, independently in each text: the terms of NCE."""
    tokens = texts(torch.multinomial(joint().flatten(), TEXTS, replacement=True, generator=generator))
    weights = (torch.rand(TEXTS, 1, generator=generator) < NOISE_SHARE).float()
    masked = {"masked_positions": (2 * weights).long(), "masked_weights": weights}
    return batch_of({"tokens": tokens, "masked_tokens": tokens, **masked})


def trained(updates: int) -> ElectricModel:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    task = SimpleNamespace(source_dictionary=small_dictionary(VOCABULARY), masked_share=NOISE_SHARE)
    model = ElectricModel.build_model(ElectricConfig(**SIZES, generator_size=0.5), task)
    criterion = electric_criterion(model, discriminator_loss_weight=10.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    for _ in range(updates):
        loss, sample_size, _ = criterion(model, noisy_batch(generator))
        optimizer.zero_grad()
        (loss / sample_size).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@pytest.mark.slow
def test_scores_converge_to_the_known_log_probabilities() -> None:
    """P(b | a) of all pairs: the mean error of log p under P below 0.15 nats, normalisers within 15 % of 1.

    250 updates see 19,000 noise tokens, 770 for a pair: a count has 4 % of sampling error there, and a tail of the
    distribution several times as much.
    """
    model = trained(250)
    scores = model.token_log_probs(texts(torch.arange(VOCABULARY * VOCABULARY)))[:, 2].view(VOCABULARY, VOCABULARY)
    expected = (joint() / joint().sum(1, keepdim=True)).log()
    error = (joint() * (scores - expected).abs()).sum()
    assert error < 0.15
    assert (scores.exp().sum(1) - 1).abs().max() < 0.15
