"""Archs: the papers' sizes, parameter counts, shared parameters of generators; choices from flags and from YAML."""

import argparse
from collections import Counter
from typing import Any

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from omegaconf import OmegaConf
from small_models import AMOS_SETTINGS, EQUAL_SIZES, model_and_criterion, small_batch, small_dictionary, small_task

from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.models.configuration import PaddedVocabulary, generator_config
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.electric import ElectricConfig, ElectricModel
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.models.teams import TeamsConfig, TeamsModel

# Layers, width, FFN width, heads.
SIZES = {
    "tiny": (2, 64, 256, 2),
    "small": (12, 256, 1024, 4),
    "base": (12, 768, 3072, 12),
    "large": (24, 1024, 4096, 16),
}
# Thesis Table 5.1: width, FFN width and heads of ELECTRA's generator and of each tower of Electric; width of the embeddings.
GENERATORS = {"small": (64, 256, 1, 128), "base": (256, 1024, 4, 768), "large": (256, 1024, 4, 1024)}
POSITIONS, BUCKETS = 512, 32
VOCABULARY = PaddedVocabulary(32_768, pad=1, end=2, special=(0, 1, 2, 3))


def arch(name: str, **settings: Any) -> Any:
    """The settings of ``--arch NAME``; other flags have their defaults."""
    args = argparse.Namespace(**settings)
    ARCH_CONFIG_REGISTRY[name](args)
    return MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[name]](**vars(args))


def on_meta(model_class: type, name: str, **settings: Any) -> Any:
    """A model in its real size without values."""
    with torch.device("meta"):
        return model_class(arch(name, **settings), VOCABULARY)


def sizes(config: Any) -> tuple[int, ...]:
    return config.encoder_layers, config.encoder_embed_dim, config.encoder_ffn_embed_dim, config.encoder_attention_heads


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("objective", ["amos", "electra", "electric", "mlm", "teams"])
def test_sizes_of_the_encoder(objective: str, size: str) -> None:
    assert ARCH_MODEL_NAME_REGISTRY[f"{objective}_{size}"] == objective
    assert sizes(arch(f"{objective}_{size}")) == SIZES[size]


@pytest.mark.parametrize("size", GENERATORS)
def test_sizes_of_generators_are_those_of_the_thesis(size: str) -> None:
    electric = on_meta(ElectricModel, f"electric_{size}")
    towers = electric.generator.past.shape, electric.generator.future.shape
    for shape in (generator_config(arch(f"electra_{size}")), *towers):
        assert (shape.width, shape.ffn_width, shape.num_heads) == GENERATORS[size][:3]
        assert shape.num_layers == SIZES[size][0]
        assert shape.embedding_width in (0, GENERATORS[size][3])
    assert [tower.attends_to for tower in towers] == ["past", "future"]
    assert electric.mlm_head.dense.weight.shape == (GENERATORS[size][3], 2 * GENERATORS[size][0])
    assert electric.depth_names == [str(SIZES[size][0])]


def test_electra_embeddings_are_projected_to_each_width() -> None:
    small, base = (on_meta(ElectraModel, f"electra_{size}") for size in ("small", "base"))
    assert small.discriminator.embedding_projection.weight.shape == (256, 128)
    assert small.generator.embedding_projection.weight.shape == (64, 128)
    assert base.discriminator.embedding_projection is None
    assert base.generator.embedding_projection.weight.shape == (256, 768)


def test_two_tower_has_two_encoders_of_full_size_and_nothing_else() -> None:
    settings = {"electric_variant": "two_tower", "generator_size": 1.0, "generator_loss_tokens": "all"}
    model = on_meta(ElectricModel, "electric_base", **settings)
    assert model.generator.past.shape.width == model.generator.future.shape.width == 768
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"embed_tokens", "generator", "mlm_head"}


def layer_parameters(width: int, ffn: int) -> int:
    """Four D x D projections, two D x F ones, their biases, two LayerNorms."""
    return 4 * width * width + 2 * width * ffn + 4 * width + (ffn + width) + 4 * width


def encoder_parameters(layers: int, width: int, ffn: int, heads: int) -> int:
    """Positions, their LayerNorm, the bias table and the layers; no token embeddings."""
    return POSITIONS * width + 2 * width + BUCKETS * heads + layers * layer_parameters(width, ffn)


@pytest.mark.parametrize("size", SIZES)
def test_amos_parameters(size: str) -> None:
    layers, width, ffn, heads = SIZES[size]
    depths = "1,2" if size == "tiny" else "4,6,8"
    assert arch(f"amos_{size}").generator_depths == depths
    counts: Counter[str] = Counter()
    for name, parameter in on_meta(AmosModel, f"amos_{size}").named_parameters():
        counts[name.partition(".")[0]] += parameter.numel()
    assert counts == {
        "embed_tokens": VOCABULARY.padded_size * width,
        "generators": encoder_parameters(int(depths[-1]), width, ffn, heads),
        "mlm_heads": width * width + width + 2 * width + VOCABULARY.padded_size,
        "mixture": width,
        "discriminator": encoder_parameters(layers, width, ffn, heads),
        "detection_head": width + 1,
    }


@pytest.mark.parametrize(("num_ordinary", "padded_size"), [(58, 64), (59, 64), (60, 128), (1000, 1024)])
def test_vocabulary_is_padded_in_the_model_not_in_the_dictionary(num_ordinary, padded_size):
    """num_ordinary + 4 fairseq specials + <mask>, rounded up to 64; special tokens and padding rows are never sampled."""
    dictionary = small_dictionary(num_ordinary)
    vocabulary = PaddedVocabulary.of(dictionary)
    assert len(dictionary) == vocabulary.num_tokens == num_ordinary + 5
    assert vocabulary.padded_size == padded_size
    assert (~vocabulary.never_sampled_mask()).nonzero().flatten().tolist() == list(range(4, 4 + num_ordinary))


@pytest.mark.parametrize("objective", ["amos", "electra", "teams", "electric"])
def test_protected_tokens_are_neither_samples_nor_negatives(objective, monkeypatch):
    """Where they are half of the vocabulary, and the softmax gives them nearly all of its mass."""
    dictionary = small_dictionary()
    dictionary.protected_symbols = [f"word{number}" for number in range(20)]
    monkeypatch.setattr("small_models.small_dictionary", lambda *_: dictionary)
    model = model_and_criterion(objective)[0]
    for parameter in model.parameters():
        if len(parameter) == 64 and parameter.ndim == 1:  # the bias of the output layer
            parameter.data[4:24] = 20.0
    output = model(PretrainingBatch(**small_batch()["net_input"]))
    negatives = getattr(output, "candidates", None)
    drawn = [output.sampled_tokens, *([] if negatives is None else [negatives[..., 1:]])]
    assert all(((tokens >= 24) & (tokens < 44)).all() for tokens in drawn)


def test_initial_values():
    """N(0, init_std) embeddings, N(0, linear_init_std) linear weights, biases 0, LayerNorm 1 and 0, padding row 0."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 2, "encoder_embed_dim": 128, "encoder_ffn_embed_dim": 256, "encoder_attention_heads": 2}
    cfg = AmosConfig(**sizes, generator_depths="1,2", init_std=0.02, linear_init_std=0.1)
    model = AmosModel(cfg, PaddedVocabulary.of(small_dictionary(1000)))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            expected = 0.02 if any(part in name for part in ("embed_", "table", "mixture.v")) else 0.1
            few = parameter.numel() < 1000
            assert parameter.std().item() == pytest.approx(expected, rel=0.4 if few else 0.05), name
    assert not model.embed_tokens.weight[1].any()


VARIANTS = [
    (AmosModel, AmosConfig, {"mixture": "uniform", "relative_position_scheme": "amos"}),
    (AmosModel, AmosConfig, {"kernels": "reference", "pooler_activation_fn": "gelu"}),
    (ElectraModel, ElectraConfig, {"generator": "unigram", "main_objective": "all_tokens_mlm"}),
    (ElectraModel, ElectraConfig, {"share_weights": "none", "main_objective": "replace_mlm", **EQUAL_SIZES}),
    (ElectraModel, ElectraConfig, {"share_weights": "all", **EQUAL_SIZES}),
    (ElectricModel, ElectricConfig, {"electric_variant": "electra_tt", "generator_loss_tokens": "all", **EQUAL_SIZES}),
    (ElectricModel, ElectricConfig, {"electric_variant": "two_tower", "generator_loss_tokens": "all", **EQUAL_SIZES}),
    (TeamsModel, TeamsConfig, {"share_layers": "all", "task_heads": "ffn", "negative_sampling": "hardest"}),
    (TeamsModel, TeamsConfig, {"share_layers": "none", "task_heads": "extra_layer", "representation": "rtd"}),
]


@pytest.mark.parametrize(("model_class", "config_class", "choices"), VARIANTS, ids=lambda value: str(value))
def test_choices_from_flags_and_from_yaml_are_the_same(model_class, config_class, choices) -> None:
    known = config_class.__dataclass_fields__
    settings = {name: value for name, value in AMOS_SETTINGS.items() if name in known} | choices
    settings |= {"mask_prob": 0.25} if "mask_prob" in known else {}
    from_flags = config_class(**settings)
    from_yaml = OmegaConf.merge(OmegaConf.structured(config_class), settings)
    for name in choices:
        if not isinstance(choices[name], float):
            assert (type(getattr(from_flags, name)), type(getattr(from_yaml, name)).__name__) == (str, "Choices")
    results = []
    for cfg in (from_flags, from_yaml):
        torch.manual_seed(0)
        model = model_class.build_model(cfg, small_task())
        torch.manual_seed(1)
        results.append((str(model), model.depth_names, vars(model(PretrainingBatch(**small_batch()["net_input"])))))
    assert results[0][:2] == results[1][:2]
    torch.testing.assert_close(results[0][2], results[1][2], rtol=0, atol=0)
