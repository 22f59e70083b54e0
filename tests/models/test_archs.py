"""Sizes of the archs: their numbers from the papers, and the parameter counts that follow, by a formula and by hand."""

import argparse

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
from small_models import small_dictionary

from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.models.configuration import PaddedVocabulary

# Layers, width, FFN width, heads, generator depths (DESIGN 3.11).
SIZES = {
    "tiny": (2, 64, 256, 2, "1,2"),
    "small": (12, 256, 1024, 4, "4,6,8"),
    "base": (12, 768, 3072, 12, "4,6,8"),
    "large": (24, 1024, 4096, 16, "4,6,8"),
}
POSITIONS, BUCKETS, ROWS = 512, 32, 32_768


def arch(size: str) -> AmosConfig:
    """What ``--arch amos_SIZE`` sets, over the defaults of the flags that were not given."""
    args = argparse.Namespace()
    ARCH_CONFIG_REGISTRY[f"amos_{size}"](args)
    return AmosConfig(**vars(args))


def count(cfg: AmosConfig) -> dict[str, int]:
    """Parameters of each part of a model on the meta device (nothing is allocated)."""
    with torch.device("meta"):
        model = AmosModel(cfg, PaddedVocabulary(ROWS, pad=1, end=2, special=(0, 1, 2, 3)))
    parts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[0]
        parts[part] = parts.get(part, 0) + parameter.numel()
    return parts


def layer_parameters(width: int, ffn: int) -> int:
    """Four D x D projections, two D x F ones, their biases, two LayerNorms."""
    return 4 * width * width + 2 * width * ffn + 4 * width + (ffn + width) + 4 * width


def encoder_parameters(layers: int, width: int, ffn: int, heads: int) -> int:
    """Positions, their LayerNorm, the bias table and the layers; no token embeddings."""
    return POSITIONS * width + 2 * width + BUCKETS * heads + layers * layer_parameters(width, ffn)


@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_parameters(size):
    layers, width, ffn, heads, depths = SIZES[size]
    cfg = arch(size)
    assert ARCH_MODEL_NAME_REGISTRY[f"amos_{size}"] == "amos"
    got = cfg.encoder_layers, cfg.encoder_embed_dim, cfg.encoder_ffn_embed_dim, cfg.encoder_attention_heads
    assert (*got, cfg.generator_depths) == SIZES[size]
    assert count(cfg) == {
        "embed_tokens": ROWS * width,
        "generators": encoder_parameters(int(depths.split(",")[-1]), width, ffn, heads),
        "mlm_heads": width * width + width + 2 * width + ROWS,
        "mixture": width,
        "discriminator": encoder_parameters(layers, width, ffn, heads),
        "detection_head": width + 1,
    }


def test_base_encoder_is_the_110_million_class_of_table_1():
    """85,054,464 of 12 layers + 393,216 positions + 1,536 + 384 table + 25,165,824 token embeddings."""
    parts = count(arch("base"))
    assert parts["discriminator"] == 85_054_464 + 393_216 + 1_536 + 384
    assert parts["discriminator"] + parts["embed_tokens"] == 110_615_424


def test_defaults_and_their_sources():
    """AMOS Appendix B (tau), Table 3 (dropout), DESIGN 3.8-3.10; the tiny one starts from wider weights."""
    base, tiny = arch("base"), arch("tiny")
    assert (base.gumbel_temperature, base.dropout, base.attention_dropout, base.activation_dropout) == (
        0.3,
        0.1,
        0.1,
        0.0,
    )
    assert (str(base.mixture), base.adversarial_mlm_multiplier, base.no_stop_gradient) == ("learned", 0.0, False)
    assert str(base.relative_position_scheme) == "t5"
    assert (base.relative_position_buckets, base.relative_position_max_distance) == (32, 128)
    assert (base.layer_norm_eps, base.init_std, base.linear_init_std, base.max_positions) == (1e-5, 0.02, 0.02, 512)
    assert tiny.linear_init_std == 0.1


def test_a_flag_wins_over_the_arch():
    args = argparse.Namespace(encoder_layers=3, generator_depths="2")
    ARCH_CONFIG_REGISTRY["amos_base"](args)
    assert (args.encoder_layers, args.generator_depths, args.encoder_embed_dim) == (3, "2", 768)


@pytest.mark.parametrize(("num_words", "num_rows"), [(58, 64), (59, 64), (60, 128), (1000, 1024)])
def test_vocabulary_is_padded_in_the_model_not_in_the_dictionary(num_words, num_rows):
    """num_words + 4 fairseq specials + <mask>, rounded up to 64; what is special or beyond is never sampled."""
    dictionary = small_dictionary(num_words)
    rows = PaddedVocabulary.of(dictionary)
    assert (len(dictionary), rows.num_tokens, rows.padded_size) == (num_words + 5, num_words + 5, num_rows)
    assert (~rows.never_sampled_mask()).nonzero().flatten().tolist() == list(range(4, 4 + num_words))


def test_initial_values():
    """N(0, init_std) embeddings, N(0, linear_init_std) linear weights, biases 0, LayerNorm 1 and 0, padding row 0."""
    torch.manual_seed(0)
    cfg = AmosConfig(
        encoder_layers=2, encoder_embed_dim=128, encoder_ffn_embed_dim=256, encoder_attention_heads=2, generator_depths="1,2",
        init_std=0.02, linear_init_std=0.1,
    )  # fmt: skip
    model = AmosModel(cfg, PaddedVocabulary.of(small_dictionary(1000)))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        elif any(part in name for part in ("embed_", "table", "mixture.v")):
            few = parameter.numel() < 1000
            assert parameter.std().item() == pytest.approx(0.02, rel=0.4 if few else 0.05), name
        else:
            few = parameter.numel() < 1000
            assert parameter.std().item() == pytest.approx(0.1, rel=0.4 if few else 0.05), name
    assert not model.embed_tokens.weight[1].any()
