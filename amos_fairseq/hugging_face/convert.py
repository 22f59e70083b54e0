"""Conversion of weights and settings, ours | Hugging Face's, in both directions, with the tables of :mod:`.families`; and the
model that ``amos export`` writes with them."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from amos_fairseq.checkpoints.write import NEVER_PREDICTED, Weights, count_layers, expand_names
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.export_tokenizer import FolderTokenizer
from amos_fairseq.hugging_face.families import (
    CONFIG_FILE,
    CUSTOM,
    FAMILIES,
    MPNET_BUCKETS,
    MPNET_MAX_DISTANCE,
    POSITION_OFFSET,
    RENAMED_ONLY,
    WEIGHTS_FILE,
    Family,
    PartKind,
)
from amos_fairseq.hugging_face.parts import ExportedPart
from amos_fairseq.models.configuration import MODERN
from amos_fairseq.modules.encoder import TransformerConfig
from amos_fairseq.modules.modern_encoder import ModernBertEncoderConfig
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT
from amos_fairseq.text.tokenization.tokenizer import BOS, EOS, PAD

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TOKEN_TYPES, PROJECTION = "encoder.embed_token_types.weight", "encoder.embedding_projection."
# A linear classification head in classes that have a dense layer: this layer multiplies states by the first number, the
# activation is there nearly linear with the second as its slope, and the output layer divides by both. A state x is changed
# by the factor 1 - (2^-12 x)^2 / 3 (tanh) or 1 + 0.8 * 2^-24 x (gelu): less than float32 rounding of its sums.
LINEAR_HEAD_SCALES = {"tanh": (2.0**-12, 1.0), "gelu": (2.0**-24, 0.5)}
# Kinds of layers of ModernBERT.
GLOBAL, LOCAL = "full_attention", "sliding_attention"
# Token types of an exported BERT where our encoder has none: tokenizers send types 0 and 1 for pairs.
EXPORTED_TOKEN_TYPES = 2
# Names of LayerNorm weights in the first BERTs.
_FORMER_NAMES = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))
_SPECIAL_IDS = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}
# A constant in DistilBERT's code.
DISTILBERT_LAYER_NORM_EPS = 1e-12


@torch.no_grad()
def write_model(folder: Path, part: ExportedPart, tokenizer: FolderTokenizer) -> None:
    """Write ``model.safetensors``, float32, and ``config.json``; for custom positions also their code.

    AutoModel adds a pooling layer to a bare encoder. It gets the identity: ``pooler_output`` is then tanh of the first state,
    not random.
    """
    ids = {name: tokenizer.special_ids.get(symbol) for name, symbol in _SPECIAL_IDS.items()}
    config = hugging_face_config(
        part.family, part.shape, tokenizer.num_rows, **part.settings, **ids, architectures=[part.class_name]
    )
    if part.family == CUSTOM:
        from amos_fairseq.hugging_face.custom_code import modeling_amos as classes

        config.auto_map = custom_code.model_auto_map()
        custom_code.write_model_code(folder)
    else:
        import transformers as classes
    model = getattr(classes, part.class_name)(config)
    weights = in_their_rows(part.weights, tokenizer.ids, tokenizer.num_rows)
    state = to_hugging_face(part.family, part.kind, weights)
    if part.kind == PartKind.ENCODER and getattr(model, "pooler", None) is not None:
        width = part.shape.width
        state |= {"pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
    model.load_state_dict(state, strict=True)
    model.eval().save_pretrained(folder, safe_serialization=True)
    # safetensors creates files that only their owner can read; all other files follow the user's umask.
    (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)


def to_hugging_face(family: str, kind: PartKind, weights: Weights) -> Weights:
    """Return the state of the class of this family, complete for ``load_state_dict(strict=True)``.

    A bare encoder is the class without a pooling layer. Tensors are copies, except the tied ones. Rows of a position table
    that belong to no position (the first two of MPNet and RoBERTa) are zeros, as are token types that our encoder lacks.

    Args:
        family: mpnet, electra, bert, roberta, modernbert or ``CUSTOM``.
        kind: of the part; one that the family has.
        weights: ours, flat, with at least the encoder and the head of ``kind``; others are ignored.

    Raises:
        KeyError: a weight of the encoder or of the head is missing, or the family has no such part.
    """
    table = FAMILIES[family]
    ours_by_name = dict(weights)
    names = table.encoder + (table.heads[kind] if kind != PartKind.ENCODER else ())
    expected = {row.ours for row in names}
    if TOKEN_TYPES in expected - weights.keys():
        positions = weights["encoder.embed_positions.weight"]
        ours_by_name[TOKEN_TYPES] = positions.new_zeros(EXPORTED_TOKEN_TYPES, positions.size(1))
    if "classification_head.dense.*" in expected and "classification_head.dense.weight" not in weights:
        # A dense layer after which the linear head computes the same as before.
        scale, slope = LINEAR_HEAD_SCALES["gelu" if family == "electra" else "tanh"]
        output = weights["classification_head.output.weight"]
        ours_by_name |= {
            "classification_head.dense.weight": torch.eye(output.size(1)) * scale,
            "classification_head.dense.bias": torch.zeros(output.size(1)),
            "classification_head.output.weight": output / (scale * slope),
        }
    converted: Weights = {}
    for ours, theirs, conversion in expand_names(names, count_layers(weights, "encoder.layers.")):
        if ours.startswith(PROJECTION) and ours not in ours_by_name:
            continue  # embeddings as wide as the encoder
        converted.update(zip(theirs, (conversion or RENAMED_ONLY).to_theirs(ours_by_name[ours]), strict=True))
    if kind == PartKind.MASKED_LM:
        converted.update({copy: converted[source] for copy, source in table.tied.items()})
    if kind == PartKind.ENCODER:
        return {name.removeprefix(f"{table.prefix}."): tensor for name, tensor in converted.items()}
    return converted


class Converted(NamedTuple):
    """Weights under our names, and the names, as the file spells them, of weights that have no counterpart here."""

    weights: Weights
    unexpected_keys: list[str]


def from_hugging_face(family: str, weights: Weights, heads: Collection[PartKind] = ()) -> Converted:
    """Return the encoder of a Hugging Face state, and some of its heads, under our names.

    Values are bit for bit those of the state, except for a detection classifier whose first row is not 0: the difference of
    its rows computes the same function.

    Args:
        family: mpnet, electra, bert, roberta, distilbert or modernbert.
        weights: a state with or without a head; names with or without the prefix of the encoder.
        heads: kinds of parts whose heads must be present.

    Raises:
        UserError: a weight is missing, or the output layer of a requested masked language model is not tied.
    """
    table = FAMILIES[family]
    names = _current_names(table, weights)
    rows = table.encoder + tuple(row for kind in heads for row in table.heads[kind])
    converted: Weights = {}
    used: set[str] = set()
    for ours, theirs, conversion in expand_names(rows, count_layers(names, f"{table.prefix}.{table.layers}")):
        absent = [name for name in theirs if name not in names]
        if absent and ours.startswith(PROJECTION):
            continue
        if absent:
            raise UserError(
                f"the weight {absent[0]} is missing: these are not the whole weights of a {family} model"
                + "".join(f" with the head {kind.label}" for kind in heads)
            )
        tensors = [weights[names[name]] for name in theirs]
        shapes = [list(tensor.shape) for tensor in tensors]
        if [] in shapes or shapes.count(shapes[0]) < len(shapes):
            raise UserError(f"{' and '.join(theirs)} have the shapes {shapes}: these are not the weights of a model")
        converted[ours] = (conversion or RENAMED_ONLY).to_ours(*tensors)
        used.update(theirs)
    for copy, source in table.tied.items():
        if copy not in names or source not in used:
            continue
        if torch.equal(weights[names[copy]], weights[names[source]]):
            used.add(copy)
        elif PartKind.MASKED_LM in heads:
            raise UserError(
                f"{names[copy]} differs from {names[source]}: the output layer of a masked language model is tied to "
                "the token embeddings here, so this one cannot be imported; import the encoder alone (--arch amos_base, no "
                "--generator)"
            )
    return Converted(converted, sorted(original for current, original in names.items() if current not in used))


def _current_names(table: Family, weights: Weights) -> dict[str, str]:
    """Return each name as the table spells it (current LayerNorm names, with the prefix of the encoder) -> the file's name."""
    bare = not any(name.startswith(f"{table.prefix}.") for name in weights)
    names = {}
    for name in weights:
        current = name
        for former, now in _FORMER_NAMES:
            current = current.replace(former, now)
        names[f"{table.prefix}.{current}" if bare else current] = name
    return names


def in_their_rows(weights: Weights, ids: Tensor, num_rows: int) -> Weights:
    """Return ``weights`` with the vocabulary in the order of Hugging Face's ids, [num_rows, ...].

    Ids without a token, in the gaps of a foreign vocabulary, have zeros, and an MLM head never predicts them.

    Args:
        ids: [dictionary size] int64, the Hugging Face id of each of our rows, -1 where there is none.
    """
    known = (ids != ABSENT).nonzero().squeeze(1)
    result = dict(weights)
    for name, value_without_token in (("embed_tokens.weight", 0.0), ("mlm_head.bias", NEVER_PREDICTED)):
        if name in weights:
            ours = weights[name]
            result[name] = ours.new_full((num_rows, *ours.shape[1:]), value_without_token)
            result[name][ids[known]] = ours[known]
    return result


def their_config_class(family: str) -> type["PretrainedConfig"]:
    if family == CUSTOM:
        from amos_fairseq.hugging_face.custom_code.modeling_amos import AmosConfig

        return AmosConfig
    from transformers import (
        BertConfig,
        DistilBertConfig,
        ElectraConfig,
        ModernBertConfig,
        MPNetConfig,
        RobertaConfig,
    )

    classes = (MPNetConfig, ElectraConfig, BertConfig, RobertaConfig, DistilBertConfig, ModernBertConfig)
    return {config.model_type: config for config in classes}[family]


def hugging_face_config(family: str, shape: TransformerConfig, num_rows: int, **others: Any) -> "PretrainedConfig":
    """Return the configuration of ``family`` for an encoder of ``shape`` with ``num_rows`` rows of vocabulary.

    ``others``: ``pad_token_id``, ``bos_token_id``, ``eos_token_id``, labels, ``classifier_dropout``, ``architectures``.
    """
    settings: dict[str, Any] = {
        "vocab_size": num_rows,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn_width,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": shape.max_positions + POSITION_OFFSET[family],
    }
    if isinstance(shape, ModernBertEncoderConfig):
        settings |= {
            "embedding_dropout": shape.dropout,
            "attention_dropout": shape.attention_dropout,
            "mlp_dropout": shape.activation_dropout,
            "norm_eps": shape.layer_norm_eps,
            "local_attention": shape.local_attention,
            # Names of transformers 4; version 5 converts them to layer_types and rope_parameters.
            "global_attn_every_n_layers": shape.global_every,
            "global_rope_theta": shape.global_theta,
            "local_rope_theta": shape.local_theta,
            "cls_token_id": others.get("bos_token_id"),
            "sep_token_id": others.get("eos_token_id"),
        }
        return their_config_class(family)(**settings, **others)
    settings |= {
        "hidden_act": "gelu",
        "hidden_dropout_prob": shape.dropout,
        "attention_probs_dropout_prob": shape.attention_dropout,
        "layer_norm_eps": shape.layer_norm_eps,
    }
    if family in ("mpnet", CUSTOM):
        settings["relative_attention_num_buckets"] = shape.position_buckets
    else:
        settings["type_vocab_size"] = shape.num_token_types or EXPORTED_TOKEN_TYPES
    if family == CUSTOM:
        settings["relative_attention_max_distance"] = shape.position_max_distance
    if family == "electra":
        settings["embedding_size"] = shape.embedding_width or shape.width
    return their_config_class(family)(**settings, **others)


def encoder_settings(family: str, config: "PretrainedConfig") -> dict[str, object]:
    """Return the encoder's settings under the names of our flags: the inverse of :func:`hugging_face_config`."""
    if family == "modernbert":
        return modern_settings(config)
    if family == "distilbert":
        own = {"intermediate_size": config.hidden_dim, "hidden_dropout_prob": config.dropout}
        own |= {"attention_probs_dropout_prob": config.attention_dropout, "layer_norm_eps": DISTILBERT_LAYER_NORM_EPS}
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        config = SimpleNamespace(**own, **{name: getattr(config, name) for name in names})
    width = config.hidden_size
    embedding_width = getattr(config, "embedding_size", width)
    return {
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": width,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_attention_heads,
        "embedding_dim": 0 if embedding_width == width else embedding_width,  # 0: as wide as the encoder
        "token_types": getattr(config, "type_vocab_size", 0),
        "max_positions": config.max_position_embeddings - POSITION_OFFSET[family],
        "dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "layer_norm_eps": config.layer_norm_eps,
        "pooler_activation_fn": "gelu" if family == "electra" else "tanh",
        "relative_position_scheme": "t5" if family == "mpnet" else "none",
        "relative_position_buckets": MPNET_BUCKETS,
        "relative_position_max_distance": MPNET_MAX_DISTANCE,
    }


def modern_settings(config: "PretrainedConfig") -> dict[str, object]:
    """Return the settings of ModernBERT's encoder under the names of our flags.

    The configuration has passed the checks of an import: its layers are global at every n-th place.
    """
    thetas = {kind: rope["rope_theta"] for kind, rope in rope_parameters(config).items()}
    return {
        "encoder": MODERN,
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_attention_heads,
        "embedding_dim": 0,
        "token_types": 0,
        "max_positions": config.max_position_embeddings,
        "dropout": config.embedding_dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.mlp_dropout,
        "layer_norm_eps": config.norm_eps,
        "relative_position_scheme": "none",
        "global_attention_every": global_every(config),
        "local_attention": config.local_attention,
        "global_rope_theta": thetas[GLOBAL],
        "local_rope_theta": thetas[LOCAL],
    }


def global_every(config: "PretrainedConfig") -> int | None:
    """Return n if just the layers 1, 1 + n, 1 + 2 n, ... of a ModernBERT attend to all tokens; None without such an n."""
    types = getattr(config, "layer_types", None)
    if types is None:  # transformers 4
        return config.global_attn_every_n_layers
    layers = len(types)
    found = [i for i in range(1, layers) if types[i] == GLOBAL]
    every = found[0] if found else max(layers, getattr(config, "global_attn_every_n_layers", 1))
    return every if types == [LOCAL if i % every else GLOBAL for i in range(layers)] else None


def rope_parameters(config: "PretrainedConfig") -> dict[str, dict[str, Any]]:
    """Return the settings of the rotary positions of a ModernBERT for both kinds of layers."""
    parameters = getattr(config, "rope_parameters", None)
    if parameters is None:  # transformers 4
        thetas = {GLOBAL: config.global_rope_theta, LOCAL: config.local_rope_theta}
        parameters = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    local = dict(parameters[LOCAL])
    if local.get("rope_theta") is None:  # null: as in global layers
        local["rope_theta"] = parameters[GLOBAL].get("rope_theta")
    return parameters | {LOCAL: local}
