"""Configurations of Hugging Face's models: ours | theirs, in both directions, and the checks of a foreign ``config.json``."""

import reprlib
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.weights import CUSTOM, DEBERTA_V2, FAMILIES, exported_token_types
from amos_fairseq.models.configuration import DEBERTA, MODERN
from amos_fairseq.modules.deberta_encoder import DebertaEncoderConfig
from amos_fairseq.modules.encoder import TransformerConfig
from amos_fairseq.modules.heads import POOLER_ACTIVATIONS
from amos_fairseq.modules.modern_encoder import ModernBertEncoderConfig
from amos_fairseq.untrusted import LAST_KEYS, finite_number, read_json, whole_number

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_FILE = "config.json"
WHOLE_FOLDER = "give the whole folder of a Hugging Face model"
DETECTION_LABELS = ("original", "replaced")
# Constants in MPNet's code, whatever its configuration says; one in DistilBERT's.
MPNET_BUCKETS, MPNET_MAX_DISTANCE = 32, 128
DISTILBERT_LAYER_NORM_EPS = 1e-12
# Number of first rows of the position table that belong to no position.
POSITION_OFFSET = {"mpnet": 2, "roberta": 2, "electra": 0, "bert": 0, "distilbert": 0, "modernbert": 0, CUSTOM: 2}
POSITION_OFFSET |= {DEBERTA_V2: 0}
# Other names of model_type: the same classes with another vocabulary.
SAME_AS = {"xlm-roberta": "roberta"}
# What the encoders here compute: the value of a setting, if the configuration has it. In transformers 5, only families that can
# be decoders have is_decoder. MPNet and RoBERTa compute positions from the padding id.
_BERT = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
_COMPUTED = {
    "bert": _BERT,
    "electra": _BERT,
    "roberta": _BERT | {"pad_token_id": 1},
    "mpnet": _BERT | {"pad_token_id": 1, "relative_attention_num_buckets": MPNET_BUCKETS},
    "distilbert": {"activation": "gelu"},
    "modernbert": {
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"), False),
        "decoder_bias": True,
    },
    # DeBERTaV3's; version 2 has a convolution, and position projections of its own.
    DEBERTA_V2: {
        "hidden_act": "gelu",
        **dict.fromkeys(("relative_attention", "share_att_key"), True),
        "position_biased_input": False,
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": 0,
        "type_vocab_size": 0,
    },
}
# Kinds of layers of ModernBERT.
GLOBAL, LOCAL = "full_attention", "sliding_attention"
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000  # transformers makes lists of them
MOST_LABELS = 1_000_000  # transformers creates a name for each

# fmt: off
# our flag                | TransformerConfig  | most families                | ModernBERT          | DistilBERT
_SIZES = (
    ("encoder_layers",         "num_layers",        "num_hidden_layers",           "num_hidden_layers",  "n_layers"),
    ("encoder_embed_dim",      "width",             "hidden_size",                 "hidden_size",        "dim"),
    ("encoder_ffn_embed_dim",  "ffn_width",         "intermediate_size",           "intermediate_size",  "hidden_dim"),
    ("encoder_attention_heads","num_heads",         "num_attention_heads",         "num_attention_heads","n_heads"),
)
_FRACTIONS = (
    ("dropout",                "dropout",           "hidden_dropout_prob",         "embedding_dropout",  "dropout"),
    ("attention_dropout",      "attention_dropout", "attention_probs_dropout_prob","attention_dropout",  "attention_dropout"),
    ("activation_dropout",     "activation_dropout","",                            "mlp_dropout",        ""),
    ("layer_norm_eps",         "layer_norm_eps",    "layer_norm_eps",              "norm_eps",           ""),
)
# fmt: on
_COLUMN = {"modernbert": 3, "distilbert": 4}  # of the others: 2
_MORE_SIZES = (
    "max_position_embeddings",
    "embedding_size",
    "type_vocab_size",
    "position_buckets",
    "local_attention",
    "global_attn_every_n_layers",
)


def config_class(family: str) -> type["PretrainedConfig"]:
    import transformers

    return getattr(transformers, f"{FAMILIES[family].name}Config")


def hugging_face_config(
    family: str, shape: TransformerConfig, num_rows: int, kind: "type[PretrainedConfig] | None" = None, **others: Any
) -> "PretrainedConfig":
    """Return the configuration of ``family``, or of the ``kind`` that code derives from it, for an encoder of ``shape``.

    ``others``: ids of special tokens, labels, ...
    """
    kind, column = kind or config_class(family), _COLUMN.get(family, 2)
    settings = {row[column]: getattr(shape, row[1]) for row in _SIZES + _FRACTIONS if row[column]}
    settings |= {"vocab_size": num_rows, "max_position_embeddings": shape.max_positions + POSITION_OFFSET[family]}
    if isinstance(shape, ModernBertEncoderConfig):
        settings |= {
            "local_attention": shape.local_attention,
            # Names of transformers 4; version 5 converts them to layer_types and rope_parameters.
            "global_attn_every_n_layers": shape.global_every,
            "global_rope_theta": shape.global_theta,
            "local_rope_theta": shape.local_theta,
            "cls_token_id": others.get("bos_token_id"),
            "sep_token_id": others.get("eos_token_id"),
        }
        return kind(**settings, **others)
    settings["hidden_act"] = "gelu"
    if isinstance(shape, DebertaEncoderConfig):
        settings |= _COMPUTED[family] | {
            "position_buckets": shape.position_buckets // 2,
            "max_relative_positions": shape.position_max_distance,
            "pos_att_type": ["p2c", "c2p"],
        }
        return kind(**settings, **others)
    if family in ("mpnet", CUSTOM):
        settings["relative_attention_num_buckets"] = shape.position_buckets
    else:
        settings["type_vocab_size"] = exported_token_types(family, shape.num_token_types)
    if family == CUSTOM:
        settings["relative_attention_max_distance"] = shape.position_max_distance
    if family == "electra":
        settings["embedding_size"] = shape.embedding_width or shape.width
    return kind(**settings, **others)


def encoder_settings(family: str, config: "PretrainedConfig") -> dict[str, Any]:
    """Return the encoder's settings under the names of our flags: the inverse of :func:`hugging_face_config`."""
    column = _COLUMN.get(family, 2)
    settings = {row[0]: getattr(config, row[column]) for row in _SIZES + _FRACTIONS if row[column]}
    width = config.hidden_size
    embedding_width = getattr(config, "embedding_size", width)
    settings |= {
        "embedding_dim": 0 if embedding_width == width else embedding_width,  # 0: as wide as the encoder
        "token_types": getattr(config, "type_vocab_size", 0),
        "max_positions": config.max_position_embeddings - POSITION_OFFSET[family],
        "relative_position_scheme": "t5" if family == "mpnet" else "none",
    }
    if family == "modernbert":
        rope = rope_parameters(config)
        return settings | {
            "encoder": MODERN,
            "global_attention_every": global_every(config),
            "local_attention": config.local_attention,
            "global_rope_theta": rope[GLOBAL]["rope_theta"],
            "local_rope_theta": rope[LOCAL]["rope_theta"],
        }
    if family == DEBERTA_V2:
        longest = config.max_relative_positions
        return settings | {
            "encoder": DEBERTA,
            "relative_position_buckets": 2 * config.position_buckets,
            "relative_position_max_distance": longest if longest > 0 else config.max_position_embeddings,
            "pooler_activation_fn": config.pooler_hidden_act,
        }
    if family == "distilbert":
        settings["layer_norm_eps"] = DISTILBERT_LAYER_NORM_EPS
    return settings | {
        "pooler_activation_fn": "gelu" if family == "electra" else "tanh",
        "relative_position_buckets": MPNET_BUCKETS,
        "relative_position_max_distance": MPNET_MAX_DISTANCE,
    }


def global_every(config: "PretrainedConfig") -> int | None:
    """Return n if just the layers 1, 1 + n, 1 + 2 n, ... of a ModernBERT attend to all tokens; None without such an n."""
    types = getattr(config, "layer_types", None)
    if types is None:  # transformers 4
        return config.global_attn_every_n_layers
    layers = len(types)
    after_first = [i for i in range(1, layers) if types[i] == GLOBAL]
    every = after_first[0] if after_first else max(layers, getattr(config, "global_attn_every_n_layers", 1))
    return every if types == [LOCAL if i % every else GLOBAL for i in range(layers)] else None


def rope_parameters(config: "PretrainedConfig") -> dict[str, dict[str, Any]]:
    """Return the settings of the rotary positions of a ModernBERT for both kinds of layers."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # transformers 4
        thetas = {GLOBAL: config.global_rope_theta, LOCAL: config.local_rope_theta}
        parameters = {layers: {"rope_type": "default", "rope_theta": theta} for layers, theta in thetas.items()}
    local = dict(parameters[LOCAL])
    if local.get("rope_theta") is None:  # null: as in global layers
        local["rope_theta"] = parameters[GLOBAL].get("rope_theta")
    return parameters | {LOCAL: local}


def read_config(path: Path) -> tuple[str, "PretrainedConfig"]:
    """Return the family of a ``config.json``, and the configuration with the defaults of its class."""
    content = read_json(path, WHOLE_FOLDER, **LAST_KEYS)
    model_type = content.get("model_type")
    known = [name for name in (*FAMILIES, *SAME_AS) if name != CUSTOM]
    if model_type not in known:
        problem = f"its model_type {reprlib.repr(model_type)} is none that this package computes"
        raise UserError(f"{path}: {problem}: give a folder of {', '.join(known)}")
    family = SAME_AS.get(model_type, model_type)
    check_values(path, content)  # after the type: the values of other types have other ranges
    try:
        config = config_class(family).from_dict(content)
    except Exception as error:  # transformers raises whatever its code meets: IndexError, its own classes
        reason = short_reason(error)
        raise UserError(
            f"{path} is no configuration of a {family} model ({reason}): take it from the model again"
        ) from error
    problems = [
        f"{name} is {reprlib.repr(getattr(config, name))}, not {computed!r}"
        for name, computed in _COMPUTED[family].items()
        if getattr(config, name, computed) != computed
    ]
    if family == DEBERTA_V2:
        if sorted(config.pos_att_type or ()) != ["c2p", "p2c"]:
            problems.append(f"pos_att_type is {reprlib.repr(config.pos_att_type)}, not c2p and p2c")
        if config.pooler_hidden_act not in POOLER_ACTIVATIONS:
            problems.append(f"pooler_hidden_act is {reprlib.repr(config.pooler_hidden_act)}, not gelu or tanh")
    if problem := problems[0] if problems else family == "modernbert" and _unsupported_layers(config):
        raise UserError(f"{path}: {problem}, which this package does not compute")
    return family, config


def check_values(path: Path, content: dict[str, Any]) -> None:
    """Refuse values that the code of transformers or of this package would not survive."""
    content.pop("attribute_map", None)  # gives settings other names, so that what is checked would not be what is used
    for name, value in content.items():
        try:
            if any(name in row[2:] for row in _SIZES) or name in _MORE_SIZES:
                smallest = 0 if name == "type_vocab_size" else 1  # 0: DeBERTa, whose tokenizer may be given
                whole_number(value, smallest, MOST_LAYERS if name in _SIZES[0] else LARGEST_SIZE)
            elif any(name in row[2:] for row in _FRACTIONS):
                finite_number(value, 0, 1)
            elif name == "num_labels":
                whole_number(value, 0, MOST_LABELS)
        except (ValueError, TypeError) as error:
            problem = f"{name} is {reprlib.repr(value)}, which is not valid"
            raise UserError(f"{path}: {problem}: take the file from the model again") from error


def short_reason(error: Exception) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, width=300, placeholder=" ...")


def _unsupported_layers(config: "PretrainedConfig") -> str | None:
    """Return how the layer types, rotary positions or window of a ModernBERT differ from what is computed here, or None."""
    if global_every(config) is None:
        return "layer_types do not repeat: every n-th layer, from the first on, must be full_attention"
    for layers, rope in rope_parameters(config).items():
        theta = rope.get("rope_theta")
        if rope.get("rope_type", "default") != "default" or rope.keys() - {"rope_type", "rope_theta"}:
            return f"rope_parameters of {layers} are {reprlib.repr(rope)}, not of the type 'default'"
        if not isinstance(theta, int | float) or not 1 <= theta <= LARGEST_SIZE:
            return f"rope_theta of {layers} is {reprlib.repr(theta)}, not a number from 1 on"
    if config.local_attention < 2 or config.local_attention % 2:
        return f"local_attention is {config.local_attention}, not an even number from 2 on"
    return None
