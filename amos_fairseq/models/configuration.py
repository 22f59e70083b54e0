"""Settings and sizes of the encoder that all models share. Each field is a flag and a YAML key of the same name."""

import argparse
from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import register_model_architecture

from amos_fairseq.modules.encoder import EncoderShape
from amos_fairseq.modules.heads import POOLER_ACTIVATIONS

# Layers, width, FFN width and heads. base: AMOS section 4 (BERT-base). small and large: thesis Table 5.1. tiny: ours, the
# smallest that visibly learns on two cores.
SIZES = {
    "tiny": {"encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 256, "encoder_attention_heads": 2},
    "small": {
        "encoder_layers": 12,
        "encoder_embed_dim": 256,
        "encoder_ffn_embed_dim": 1024,
        "encoder_attention_heads": 4,
    },
    "base": {
        "encoder_layers": 12,
        "encoder_embed_dim": 768,
        "encoder_ffn_embed_dim": 3072,
        "encoder_attention_heads": 12,
    },
    "large": {
        "encoder_layers": 24,
        "encoder_embed_dim": 1024,
        "encoder_ffn_embed_dim": 4096,
        "encoder_attention_heads": 16,
    },
}


@dataclass
class EncoderConfig(FairseqDataclass):
    """The encoder; defaults are BERT-base."""

    encoder_layers: int = field(default=12, metadata={"help": "layers of the main encoder"})
    encoder_embed_dim: int = field(default=768, metadata={"help": "width of the encoder"})
    encoder_ffn_embed_dim: int = field(default=3072, metadata={"help": "width of the feed-forward networks"})
    encoder_attention_heads: int = field(default=12, metadata={"help": "attention heads"})
    embedding_dim: int = field(default=0, metadata={"help": "width of the token embeddings; 0: the encoder's"})
    token_types: int = field(default=0, metadata={"help": "token types of an imported encoder (BERT has 2)"})
    max_positions: int = field(default=512, metadata={"help": "longest sequence, in tokens"})
    dropout: float = field(default=0.1, metadata={"help": "dropout of embeddings and layer outputs"})
    attention_dropout: float = field(default=0.1, metadata={"help": "dropout of attention weights"})
    activation_dropout: float = field(default=0.0, metadata={"help": "dropout inside the feed-forward networks"})
    pooler_dropout: float = field(default=0.0, metadata={"help": "dropout of a classification head"})
    pooler_activation_fn: ChoiceEnum(list(POOLER_ACTIVATIONS)) = field(
        default="tanh", metadata={"help": "activation of a classification head"}
    )
    layer_norm_eps: float = field(default=1e-5, metadata={"help": "epsilon of every LayerNorm"})
    init_std: float = field(default=0.02, metadata={"help": "standard deviation of the initial embeddings"})
    linear_init_std: float = field(
        default=0.02,
        metadata={"help": "standard deviation of the initial linear weights (narrow models need about 0.1)"},
    )
    relative_position_scheme: ChoiceEnum(["none", "t5", "amos"]) = field(
        default="none", metadata={"help": "relative positions: none, t5, or those of the released AMOS checkpoint"}
    )
    relative_position_buckets: int = field(default=32, metadata={"help": "rows of the relative position table"})
    relative_position_max_distance: int = field(
        default=128, metadata={"help": "distance in tokens from which on all relative positions share a bucket"}
    )
    kernels: ChoiceEnum(["fast", "triton", "reference"]) = field(
        default="fast",
        metadata={
            "help": "how attention, dropout, linear and output layers are computed; triton: on CUDA with this package's Triton "
            "kernels (not run on a GPU yet; with --amp attention stays PyTorch's), elsewhere as fast; reference: slowly, as "
            "their definitions read"
        },
    )
    activation_checkpointing: bool = field(
        default=False,
        metadata={"help": "keep only the input of every layer and compute the rest again in the backward pass"},
    )
    compile: bool = field(
        default=False,
        metadata={"help": "on a GPU: torch.compile for the layers while training (on a CPU they become slower)"},
    )


def check_encoder(cfg: EncoderConfig) -> None:
    """Raise ValueError for sizes that are not positive and probabilities that are none."""
    sizes = ("encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads", "max_positions")
    for name in (*sizes, "layer_norm_eps"):
        if not getattr(cfg, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)} must be above 0")
    for name in ("embedding_dim", "token_types"):
        if getattr(cfg, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)} must not be negative")
    for name in ("dropout", "attention_dropout", "activation_dropout", "pooler_dropout"):
        if not 0 <= getattr(cfg, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(cfg, name)} must be a probability below 1")


def embedding_width(cfg: EncoderConfig) -> int:
    """E, the width of the token embeddings."""
    return cfg.embedding_dim or cfg.encoder_embed_dim


def encoder_shape(cfg: EncoderConfig, num_layers: int | None = None, with_dropout: bool = True) -> EncoderShape:
    """The shape of the main encoder, or of another with ``num_layers`` layers and, if wished, without dropout."""
    return EncoderShape(
        num_layers=num_layers or cfg.encoder_layers,
        width=cfg.encoder_embed_dim,
        ffn_width=cfg.encoder_ffn_embed_dim,
        num_heads=cfg.encoder_attention_heads,
        max_positions=cfg.max_positions,
        dropout=cfg.dropout if with_dropout else 0.0,
        attention_dropout=cfg.attention_dropout if with_dropout else 0.0,
        activation_dropout=cfg.activation_dropout if with_dropout else 0.0,
        layer_norm_eps=cfg.layer_norm_eps,
        position_scheme=str(cfg.relative_position_scheme),
        position_buckets=cfg.relative_position_buckets,
        position_max_distance=cfg.relative_position_max_distance,
        embedding_width=cfg.embedding_dim,
        num_token_types=cfg.token_types,
        kernels=str(cfg.kernels),
        activation_checkpointing=cfg.activation_checkpointing,
    )


def register_sizes(model: str, **also: dict) -> None:
    """Register ``MODEL_tiny`` to ``MODEL_large``; ``also`` adds the model's own defaults for a size."""
    for size, sizes in SIZES.items():
        defaults = {**sizes, **also.get(size, {})}

        def set_defaults(args: argparse.Namespace, defaults: dict = defaults) -> None:
            for name, value in defaults.items():
                if not hasattr(args, name):
                    setattr(args, name, value)

        register_model_architecture(model, f"{model}_{size}")(set_defaults)
