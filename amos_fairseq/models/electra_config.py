"""Settings of ELECTRA and of its variants (Clark, thesis 2021, sections 5.3, 5.4.3 and 5.5), and which of them fit together."""

import dataclasses
from dataclasses import dataclass, field

from fairseq.dataclass import ChoiceEnum

from amos_fairseq.models.configuration import EncoderConfig, embedding_width, encoder_shape
from amos_fairseq.modules.encoder import EncoderShape
from amos_fairseq.modules.heads import POOLER_ACTIVATIONS


@dataclass
class ElectraConfig(EncoderConfig):
    """ELECTRA-base (thesis Table 5.1); every variant is a setting of the same model."""

    pooler_activation_fn: ChoiceEnum(list(POOLER_ACTIVATIONS)) = field(
        default="gelu", metadata={"help": "activation of a classification head"}
    )
    generator: ChoiceEnum(["masked_lm", "unigram", "uniform"]) = field(
        default="masked_lm",
        metadata={
            "help": "where replacements come from: a masked language model, the frequencies of the training text's tokens, "
            "or all tokens alike"
        },
    )
    generator_size: float = field(
        default=1 / 3,
        metadata={"help": "width, FFN width and attention heads of the generator, as a part of the encoder's"},
    )
    generator_layers: int = field(default=0, metadata={"help": "layers of the generator; 0: as many as the encoder"})
    generator_temperature: float = field(
        default=1.0, metadata={"help": "replacements follow the generator's probabilities to the power 1 / temperature"}
    )
    disallow_true_token: bool = field(
        default=False, metadata={"help": "replacements are never the original token (section 5.5)"}
    )
    share_weights: ChoiceEnum(["none", "embeddings", "all"]) = field(
        default="embeddings", metadata={"help": "what generator and discriminator share (section 5.3.1)"}
    )
    adversarial: bool = field(
        default=False,
        metadata={"help": "train the generator by REINFORCE to mislead the discriminator (section 5.3.4)"},
    )
    frozen_generator: bool = field(
        default=False,
        metadata={
            "help": "second stage of two: the generator keeps the weights of an mlm checkpoint, given as "
            "--finetune-from-model, and the discriminator starts from them (section 5.3.3)"
        },
    )
    main_objective: ChoiceEnum(["detection", "replace_mlm", "all_tokens_mlm"]) = field(
        default="detection",
        metadata={
            "help": "what the main network learns: to detect replaced tokens, or to tell the originals of those at masked "
            "positions or of all tokens (section 5.4.3)"
        },
    )


def check_settings(cfg: ElectraConfig) -> None:
    """Raise ValueError for numbers out of range, and for a setting that another one excludes or makes meaningless."""
    if cfg.generator_temperature <= 0:
        raise ValueError(f"--generator-temperature {cfg.generator_temperature:g} must be above 0")
    if cfg.generator_layers < 0:
        raise ValueError(f"--generator-layers {cfg.generator_layers} must not be negative; 0 is the encoder's number")
    check_generator(cfg)
    if cfg.adversarial and cfg.frozen_generator:
        raise ValueError("--adversarial trains the generator and --frozen-generator forbids it: give one of them")
    if cfg.adversarial and str(cfg.share_weights) == "all":
        raise ValueError(
            "--adversarial with --share-weights all would train the discriminator to fail: share embeddings or none"
        )
    if str(cfg.main_objective) != "detection" and (cfg.adversarial or cfg.frozen_generator):
        flag = "--adversarial" if cfg.adversarial else "--frozen-generator"
        raise ValueError(f"{flag} needs --main-objective detection, not {cfg.main_objective}")
    if str(cfg.share_weights) == "all" and not has_equal_sizes(cfg):
        raise ValueError(f"--share-weights all needs networks of equal size: {EQUAL_SIZES}")
    if cfg.frozen_generator and not has_equal_sizes(cfg):
        raise ValueError(
            f"--frozen-generator needs networks of equal size, since both start from one checkpoint: {EQUAL_SIZES}"
        )
    if cfg.frozen_generator and str(cfg.share_weights) != "none":
        raise ValueError(
            f"--frozen-generator with --share-weights {cfg.share_weights} would train what is frozen: give "
            "--share-weights none"
        )


EQUAL_SIZES = "give --generator-size 1 and leave --generator-layers out"


def has_equal_sizes(cfg: ElectraConfig) -> bool:
    return cfg.generator_size == 1 and cfg.generator_layers in (0, cfg.encoder_layers)


def check_generator(cfg: ElectraConfig) -> None:
    """Raise ValueError for settings of a masked language model where there is none."""
    if str(cfg.generator) == "masked_lm":
        return
    given = {
        "--generator-layers": cfg.generator_layers != 0,
        "--share-weights": str(cfg.share_weights) != "embeddings",
        "--adversarial": cfg.adversarial,
        "--frozen-generator": cfg.frozen_generator,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        raise ValueError(f"{flag} has no meaning with --generator {cfg.generator}, which has no weights: leave it out")


def generator_shape(cfg: EncoderConfig, num_layers: int = 0) -> EncoderShape:
    """The encoder's shape with ``generator_size`` of its width, FFN width and heads, and ``num_layers`` if that is not 0.

    Raises:
        ValueError: the part is not above 0, or leaves no whole number of heads.
    """
    shape, width = encoder_shape(cfg, num_layers), embedding_width(cfg)
    sizes = {name: getattr(shape, name) * cfg.generator_size for name in ("width", "ffn_width", "num_heads")}
    whole = {name: round(size) for name, size in sizes.items()}
    if any(size < 1 or abs(size - whole[name]) > 1e-6 * size for name, size in sizes.items()):
        raise ValueError(
            f"--generator-size {cfg.generator_size:g} leaves no whole width, FFN width or number of attention heads: "
            f"it must divide {shape.width}, {shape.ffn_width} and {shape.num_heads}"
        )
    return dataclasses.replace(shape, **whole, embedding_width=width)
