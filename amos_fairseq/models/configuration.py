"""Settings that all models share: sizes of the encoder and the generators, and the padded vocabulary.

Each field of a configuration is a flag and a YAML key of the same name. The value of a choice is a ``str`` when it comes
from a flag, and a member of fairseq's ``StrEnum`` when it comes from a YAML file. Both compare equal to the plain string
and have its hash, so models compare choices with strings. The modules take plain strings: ``str(choice)`` gives one.
"""

import argparse
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import register_model_architecture
from torch import Tensor, nn

from amos_fairseq.modules.bert_encoder import BertEncoderConfig
from amos_fairseq.modules.deberta_encoder import DebertaEncoderConfig
from amos_fairseq.modules.encoder import TransformerConfig
from amos_fairseq.modules.heads import (
    CLASSIFICATION_HEADS,
    POOLINGS,
    DenseDetectionHead,
    DetectionHead,
    EmbeddingHead,
    FirstTokenDetectionHead,
    NormedDetectionHead,
)
from amos_fairseq.modules.modern_encoder import ModernBertEncoderConfig
from amos_fairseq.setting_checks import setting
from amos_fairseq.text import special_ids

BERT, MODERN, DEBERTA = "bert", "modernbert", "deberta"
# The second part of the names of ModernBERT's architectures: MODEL_modern_SIZE. DeBERTa's have that of the encoder.
MODERN_ARCH = "modern"


def sizes(layers: int, width: int, ffn_width: int, heads: int) -> dict[str, int]:
    return {
        "encoder_layers": layers,
        "encoder_embed_dim": width,
        "encoder_ffn_embed_dim": ffn_width,
        "encoder_attention_heads": heads,
    }


# base: AMOS section 4 (BERT-base). small and large: thesis Table 5.1. tiny and mini: ours, the smallest that visibly
# learns on two cores, and one for hours on a laptop.
SIZES = {
    "tiny": sizes(2, 64, 256, 2),
    "mini": sizes(6, 128, 512, 4),
    "small": sizes(12, 256, 1024, 4),
    "base": sizes(12, 768, 3072, 12),
    "large": sizes(24, 1024, 4096, 16),
}
# base and large: the released models of Warner et al. (2024). small: that of Weller et al. (2025) with 32 million parameters,
# the nearest to the cost of the other small models. mini: ours, with width, depth and number of weights of the other minis.
MODERN_SIZES = {
    "mini": sizes(6, 128, 344, 4),
    "small": sizes(10, 384, 576, 6),
    "base": sizes(22, 768, 1152, 12),
    "large": sizes(28, 1024, 2624, 16),
}
# What all of these have, besides their sizes: section 2.1 of the ModernBERT paper and the released configuration.
MODERN_SETTINGS = {
    "encoder": MODERN,
    "max_positions": 8192,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "relative_position_scheme": "none",
}
# The released DeBERTaV3 models; mini is ours.
DEBERTA_SIZES = {
    "mini": SIZES["mini"],
    "small": sizes(6, 768, 3072, 12),
    "base": sizes(12, 768, 3072, 12),
    "large": sizes(24, 1024, 4096, 16),
}
# Their configurations: position_buckets 256, each for two directions, and distances up to max_position_embeddings.
DEBERTA_SETTINGS = {
    "encoder": DEBERTA,
    "layer_norm_eps": 1e-7,
    "relative_position_scheme": "none",
    "relative_position_buckets": 512,
    "relative_position_max_distance": 512,
}
# What the mini models of all objectives have besides their sizes; a source for each value is in their YAMLs.
MINI = {"linear_init_std": 0.07, "relative_position_scheme": "t5"}
MODERN_MINI = {"linear_init_std": 0.05, "max_positions": 128}
DEBERTA_MINI = {"linear_init_std": 0.07}
# Matrix products are faster on whole tiles.
VOCABULARY_MULTIPLE = 64


@dataclass
class EncoderConfig(FairseqDataclass):
    encoder: ChoiceEnum([BERT, MODERN, DEBERTA]) = setting(
        BERT,
        "architecture of all networks: bert; modernbert (rotary positions, gated feed-forward networks, "
        "LayerNorm before each block, local attention in most layers); or deberta, of DeBERTaV3 (attention by content and by "
        "relative positions; docs/which_encoder.md)",
    )
    global_attention_every: int = setting(
        3, "modernbert: one layer in this many attends to all tokens, beginning with the first", "above 0"
    )
    local_attention: int = setting(
        128, "modernbert: window of the other layers in tokens, half of it on each side (an even number)", "2 or more"
    )
    global_rope_theta: float = setting(
        160_000.0, "modernbert: base of the rotary angles in layers that attend to all tokens", "1 or more"
    )
    local_rope_theta: float = setting(
        10_000.0, "modernbert: base of the rotary angles in the other layers", "1 or more"
    )
    encoder_layers: int = setting(12, "layers of the main encoder", "above 0")
    encoder_embed_dim: int = setting(768, "width of the encoder", "above 0")
    encoder_ffn_embed_dim: int = setting(3072, "width of the feed-forward networks", "above 0")
    encoder_attention_heads: int = setting(12, "attention heads", "above 0")
    embedding_dim: int = setting(0, "width of the token embeddings; 0: the encoder's width", "0 or more")
    token_types: int = setting(0, "token types of an imported encoder (BERT has 2)", "0 or more")
    encoder_lr_scale: float = setting(
        1.0,
        "learning rate of the encoder, its embeddings included, as a fraction of that of the rest: below 1 where the "
        "encoder starts from trained weights and the heads from new ones",
        "above 0 and at most 1",
    )
    max_positions: int = setting(512, "longest sequence, in tokens", "above 0")
    dropout: float = setting(0.1, "dropout of embeddings and layer outputs", "0 or more and below 1")
    attention_dropout: float = setting(0.1, "dropout of attention weights", "0 or more and below 1")
    activation_dropout: float = setting(0.0, "dropout inside the feed-forward networks", "0 or more and below 1")
    pooler_dropout: float = setting(0.0, "dropout of a classification head", "0 or more and below 1")
    pooler_activation_fn: ChoiceEnum(list(CLASSIFICATION_HEADS)) = setting(
        "tanh", "activation of a classification head's dense layer; linear: a head without dense layer"
    )
    pooling: ChoiceEnum(list(POOLINGS)) = setting(
        "first",
        "what a classification head reads: the state of the first token, or the mean of all; pretraining stores it as the "
        "default of fine-tuning",
    )
    freeze_encoder: bool = setting(
        False, "fine-tuning: train the head alone; the encoder keeps its weights and has no dropout"
    )
    layer_norm_eps: float = setting(1e-5, "epsilon of every LayerNorm", "above 0")
    init_std: float = setting(0.02, "standard deviation of the initial embeddings", "0 or more")
    linear_init_std: float = setting(
        0.02, "standard deviation of the initial linear weights (narrow models need about 0.1)", "0 or more"
    )
    relative_position_scheme: ChoiceEnum(["none", "t5", "amos"]) = setting(
        "none", "relative positions: none, t5, or the scheme of the released AMOS checkpoint"
    )
    relative_position_buckets: int = setting(
        32, "rows of the relative position table, also of deberta, whose scheme is none", "above 0"
    )
    relative_position_max_distance: int = setting(
        128, "distance in tokens from which on all relative positions share a bucket", "above 0"
    )
    kernels: ChoiceEnum(["fast", "triton", "reference"]) = setting(
        "fast",
        "implementation of attention, dropout and output layer; triton: this package's Triton kernels on "
        "CUDA, elsewhere as fast (docs/speed.md); reference: the slow reference implementation",
    )
    activation_checkpointing: bool = setting(
        False, "store only the input of every layer and recompute the rest in the backward pass"
    )
    compile: bool = setting(
        False, "use torch.compile for the layers while training on a GPU (on a CPU they become slower)"
    )
    cuda_graphs: bool = setting(
        False,
        "capture an update as a CUDA graph, which the host launches at once: for small models, whose kernels are faster than "
        "the host (docs/speed.md)",
    )
    deterministic: bool = setting(
        False,
        "on a GPU run only kernels that add in a fixed order: slower, and the same seed gives the same bits, as "
        "it always does on a CPU (docs/precision.md)",
    )


@dataclass
class DetectorConfig(EncoderConfig):
    disentangled_embeddings: bool = setting(
        False,
        "give the discriminator the generator's token embeddings plus a difference, and let it train only this "
        "(gradient-disentangled embedding sharing, DeBERTaV3); off: both train the same embeddings",
    )
    discriminator_lr_scale: float = setting(
        1.0,
        "learning rate of the discriminator's layers and detection head, as a fraction of that of the rest (in "
        "the mini recipes with BERT's encoder 0.2, AMOS 0.05)",
        "above 0 and at most 1",
    )


@dataclass
class DetectorWithMlmConfig(DetectorConfig):
    """The same, where the main network can also predict the original tokens."""

    encoder_mlm_weight: float = setting(
        0.0,
        "also train the main network to predict the originals at the masked positions of the text with replaced "
        "tokens, with this weight (0: no; neither ELECTRA nor AMOS has it)",
        "0 or more",
    )


DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
# Settings of an encoder that are not those of its weights, but of the process that trains or computes.
OF_PROCESS = {"freeze_encoder", "_name", "activation_checkpointing", "compile", "cuda_graphs"}
OF_PROCESS |= {"deterministic", "encoder_lr_scale", "kernels"}


def embedding_width(cfg: EncoderConfig) -> int:
    """Return E, the width of the token embeddings."""
    return cfg.embedding_dim or cfg.encoder_embed_dim


def transformer_config(
    cfg: EncoderConfig, num_layers: int | None = None, with_dropout: bool = True
) -> TransformerConfig:
    """Return the sizes of the main encoder, or of a network as wide with ``num_layers`` layers or without dropout."""
    common = {
        "num_layers": num_layers or cfg.encoder_layers,
        "width": cfg.encoder_embed_dim,
        "ffn_width": cfg.encoder_ffn_embed_dim,
        "num_heads": cfg.encoder_attention_heads,
        "max_positions": cfg.max_positions,
        **{name: getattr(cfg, name) if with_dropout else 0.0 for name in DROPOUTS},
        "layer_norm_eps": cfg.layer_norm_eps,
        "embedding_width": cfg.embedding_dim,
        "kernels": str(cfg.kernels),
        "activation_checkpointing": cfg.activation_checkpointing,
    }
    check_family(cfg)
    if cfg.encoder == MODERN:
        return ModernBertEncoderConfig(
            **common,
            global_every=cfg.global_attention_every,
            local_attention=cfg.local_attention,
            global_theta=cfg.global_rope_theta,
            local_theta=cfg.local_rope_theta,
        )
    common["position_buckets"] = cfg.relative_position_buckets
    common["position_max_distance"] = cfg.relative_position_max_distance
    if cfg.encoder == DEBERTA:
        return DebertaEncoderConfig(**common)
    return BertEncoderConfig(
        **common, position_scheme=str(cfg.relative_position_scheme), num_token_types=cfg.token_types
    )


def check_family(cfg: EncoderConfig) -> None:
    """Raise ValueError for settings that the encoder of ``--encoder`` does not have."""
    head_width = cfg.encoder_embed_dim // cfg.encoder_attention_heads
    names = ("global_attention_every", "local_attention", "global_rope_theta", "local_rope_theta")
    defaults = EncoderConfig.__dataclass_fields__
    of_modern = [(getattr(cfg, name) != defaults[name].default, f"has no {name}: leave it out") for name in names]
    positions = "rotary positions" if cfg.encoder == MODERN else "positions of its own"
    refused = [
        (cfg.relative_position_scheme != "none", f"has {positions}: give --relative-position-scheme none"),
        (cfg.token_types, "has no token types: leave --token-types out"),
        (embedding_width(cfg) != cfg.encoder_embed_dim, "has embeddings of its width: leave --embedding-dim out"),
    ]
    if cfg.encoder == BERT:
        refused = of_modern
    elif cfg.encoder == DEBERTA:
        refused += of_modern
    else:
        refused += [
            (cfg.local_attention % 2, f"needs an even --local-attention, half on each side, not {cfg.local_attention}"),
            (head_width % 2, f"rotates pairs of numbers, and cannot have heads of the odd width {head_width}"),
        ]
    for is_refused, message in refused:
        if is_refused:
            raise ValueError(f"--encoder {cfg.encoder} {message}")


def has_biases(cfg: EncoderConfig) -> bool:
    """Return whether the linear layers and LayerNorms of heads have biases, as on BERT's and DeBERTa's encoder."""
    return cfg.encoder != MODERN


def make_transform(cfg: EncoderConfig) -> EmbeddingHead | None:
    """Return the module between an encoder and the output layer of a head for fine-tuning: ModernBERT's, or None for BERT's."""
    width = cfg.encoder_embed_dim
    return None if has_biases(cfg) else EmbeddingHead(width, width, cfg.layer_norm_eps, has_biases=False)


def make_detection_head(cfg: EncoderConfig, of_bert: type[DetectionHead]) -> DetectionHead:
    """Return a detection head on the main encoder: ``of_bert``, or ModernBERT's, or DeBERTaV3's in place of ELECTRA's."""
    width = cfg.encoder_embed_dim
    if cfg.encoder == DEBERTA and of_bert is DenseDetectionHead:
        return FirstTokenDetectionHead(width, cfg.layer_norm_eps)
    return NormedDetectionHead(width, cfg.layer_norm_eps) if cfg.encoder == MODERN else of_bert(width)


def generator_config(cfg: EncoderConfig, num_layers: int = 0) -> TransformerConfig:
    """Return the sizes of a generator that has ``cfg.generator_size`` of the encoder's width, FFN width and heads.

    A fraction that gives less than one head gives one, as in ELECTRA's released code: 1/12 of base is 64 wide with one head.

    With ``num_layers`` 0 it has as many layers as the encoder.
    """
    config, width = transformer_config(cfg, num_layers), embedding_width(cfg)
    sizes = {name: getattr(config, name) * cfg.generator_size for name in ("width", "ffn_width", "num_heads")}
    if 0 < sizes["num_heads"] < 1:
        sizes["num_heads"] = 1
    whole = {name: round(size) for name, size in sizes.items()}
    if any(size < 1 or abs(size - whole[name]) > 1e-6 * size for name, size in sizes.items()):
        raise ValueError(
            f"--generator-size {cfg.generator_size:g} leaves no whole width, FFN width or number of attention heads: "
            f"it must divide {config.width}, {config.ffn_width} and, unless it gives less than one head, {config.num_heads}"
        )
    return dataclasses.replace(config, **whole, embedding_width=width)


@dataclass(frozen=True)
class PaddedVocabulary:
    """The special tokens of a dictionary, and its size rounded up to a multiple of 64.

    The padding belongs to the model's embedding, not to the dictionary, so every task that loads dict.txt and adds
    ``<mask>`` builds the same shapes. Padding entries are never an input, a target or a sample.
    """

    num_tokens: int  # of the dictionary, <mask> included
    pad: int
    end: int
    special: tuple[int, ...]  # ids of all special tokens

    @classmethod
    def of(cls, dictionary: Dictionary) -> "PaddedVocabulary":
        return cls(len(dictionary), dictionary.pad(), dictionary.eos(), tuple(special_ids(dictionary)))

    @property
    def padded_size(self) -> int:
        """V, the rows of the token embedding."""
        return -(-self.num_tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    def embedding(self, width: int) -> nn.Embedding:
        return nn.Embedding(self.padded_size, width, padding_idx=self.pad)

    def never_sampled_indices(self) -> Tensor:
        """Return the indices of special tokens and padding, which a generator never samples, ascending: int64."""
        return torch.tensor([*self.special, *range(self.num_tokens, self.padded_size)])

    def never_sampled_mask(self) -> Tensor:
        """Return True at :meth:`never_sampled_indices`: [V] bool."""
        return torch.zeros(self.padded_size, dtype=torch.bool).index_fill_(0, self.never_sampled_indices(), True)


def register_sizes(model: str, **also: dict) -> None:
    """Register ``MODEL_tiny`` to ``MODEL_large``, and ``MODEL_modern_SIZE`` and ``MODEL_deberta_SIZE`` from mini to large.

    ``also`` adds the model's own defaults for a name without that of the model, such as ``small`` or ``modern_small``;
    ``deberta`` for all of DeBERTa's sizes.
    """
    of_deberta = DEBERTA_SETTINGS | also.pop(DEBERTA, {})
    deberta = {f"{DEBERTA}_{size}": numbers | of_deberta for size, numbers in DEBERTA_SIZES.items()}
    modern = {f"{MODERN_ARCH}_{size}": numbers | MODERN_SETTINGS for size, numbers in MODERN_SIZES.items()}
    for size, settings in (SIZES | modern | deberta).items():
        register_model_architecture(model, f"{model}_{size}")(defaults_of({**settings, **also.get(size, {})}))


def defaults_of(settings: dict) -> Callable[[argparse.Namespace], None]:
    """Return fairseq's function of an architecture: it sets the settings that no flag has set."""

    def set_defaults(args: argparse.Namespace) -> None:
        for name, value in settings.items():
            if not hasattr(args, name):
                setattr(args, name, value)

    return set_defaults
