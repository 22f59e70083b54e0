"""The recipes of TEAMS hold the numbers of its Table 5, and describe models as large as its Table 1 says."""

import re
from pathlib import Path

import pytest
import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from omegaconf import OmegaConf

from amos_fairseq.models.configuration import PaddedVocabulary
from amos_fairseq.models.teams import TeamsConfig, TeamsModel

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "pretraining" / "config"
# Layers, embedding, hidden, intermediate, heads; learning rate, batch, steps (Table 5, read by eye).
TABLE_5 = {
    "small": ((12, 128, 256, 1024, 4), 5e-4, 256, 500_000),
    "base": ((12, 768, 768, 3072, 12), 2e-4, 256, 1_000_000),
    "large": ((24, 1024, 1024, 4096, 16), 2e-4, 2048, 1_760_000),
}
PARAMETERS = {"small": 14e6, "base": 110e6, "large": 335e6}  # Table 1


def recipe(size: str):
    return OmegaConf.load(RECIPES / f"teams_{size}.yaml")


@pytest.mark.parametrize("size", TABLE_5)
def test_the_numbers_are_those_of_table_5(size: str) -> None:
    cfg = recipe(size)
    model = cfg.model
    sizes = (model.encoder_layers, model.embedding_dim or model.encoder_embed_dim, model.encoder_embed_dim)
    sizes += (model.encoder_ffn_embed_dim, model.encoder_attention_heads)
    batch = cfg.dataset.batch_size * cfg.optimization.update_freq[0]
    assert (sizes, cfg.optimization.lr[0], batch, cfg.optimization.max_update) == TABLE_5[size]
    assert model.encoder_embed_dim // model.encoder_attention_heads == 64
    assert model.generator_layers * 2 == model.encoder_layers
    # The same for all sizes.
    assert (cfg.task.mask_prob, cfg.lr_scheduler.warmup_updates, cfg.lr_scheduler.power) == (0.15, 10_000, 1.0)
    betas = tuple(float(beta) for beta in re.findall(r"[\d.]+", cfg.optimizer.adam_betas))
    assert (cfg.optimizer.adam_eps, betas, cfg.optimizer.weight_decay) == (1e-6, (0.9, 0.999), 0.01)
    assert (model.dropout, model.attention_dropout) == (0.1, 0.1)
    # Sections 3.2 and 4.1.
    assert (cfg.criterion.mlm_loss_weight, model.rtd_loss_weight, model.mws_loss_weight) == (1, 5, 2)
    assert (model.negative_samples, model.negative_sampling, model.share_layers) == (5, "sampled", "half")
    assert (cfg.task.tokens_per_sample, model.max_positions) == (512, 512)


@pytest.mark.parametrize("size", PARAMETERS)
def test_the_kept_encoder_is_as_large_as_table_1_says(size: str) -> None:
    """With BERT's 30,522 pieces; the paper rounds, and counts BERT's two token types and its pooler."""
    cfg = TeamsConfig(**{key: value for key, value in recipe(size).model.items() if key != "_name"})
    with torch.device("meta"):
        model = TeamsModel(cfg, PaddedVocabulary(30_522, pad=1, end=2, special=(0, 1, 2, 3, 4)))
    kept = {*model.embed_tokens.parameters(), *model.encoder.parameters()}
    assert sum(parameter.numel() for parameter in kept) == pytest.approx(PARAMETERS[size], rel=0.04)
    assert ARCH_MODEL_NAME_REGISTRY[f"teams_{size}"] == "teams"
