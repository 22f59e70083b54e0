"""Sizes of ELECTRA's archs: the numbers of thesis Table 5.1, and what is shared."""

import argparse

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY

from amos_fairseq.models.configuration import PaddedVocabulary, generator_config
from amos_fairseq.models.electra import ElectraConfig, ElectraModel

ROWS = PaddedVocabulary(32_768, pad=1, end=2, special=(0, 1, 2, 3))


def arch(size: str, **settings) -> ElectraConfig:
    args = argparse.Namespace(**settings)
    ARCH_CONFIG_REGISTRY[f"electra_{size}"](args)
    return ElectraConfig(**vars(args))


@pytest.mark.parametrize(
    ("size", "encoder", "generator"),  # layers, width, FFN width, heads; the generator's last three; embeddings
    [
        ("small", (12, 256, 1024, 4), (64, 256, 1, 128)),
        ("base", (12, 768, 3072, 12), (256, 1024, 4, 768)),
        ("large", (24, 1024, 4096, 16), (256, 1024, 4, 1024)),
    ],
)
def test_sizes_are_those_of_the_thesis(size, encoder, generator):
    cfg = arch(size)
    assert ARCH_MODEL_NAME_REGISTRY[f"electra_{size}"] == "electra"
    got = cfg.encoder_layers, cfg.encoder_embed_dim, cfg.encoder_ffn_embed_dim, cfg.encoder_attention_heads
    assert got == encoder
    shape = generator_config(cfg)
    assert (shape.width, shape.ffn_width, shape.num_heads, shape.embedding_width) == generator
    assert shape.num_layers == encoder[0]


def test_embeddings_are_shared_and_projected_to_each_width():
    with torch.device("meta"):
        model = ElectraModel(arch("small"), ROWS)
    for name in ("embed_positions", "embedding_norm"):
        assert getattr(model.generator, name) is getattr(model.discriminator, name)
    assert model.discriminator.embedding_projection.weight.shape == (256, 128)
    assert model.generator.embedding_projection.weight.shape == (64, 128)
    with torch.device("meta"):
        base = ElectraModel(arch("base"), ROWS)
    assert base.discriminator.embedding_projection is None
    assert base.generator.embedding_projection.weight.shape == (256, 768)


@pytest.mark.parametrize("part", [0.3, 0.0, 1 / 8])
def test_a_generator_without_whole_sizes_is_refused(part):
    with pytest.raises(ValueError, match="--generator-size"):
        generator_config(arch("small", generator_size=part))
