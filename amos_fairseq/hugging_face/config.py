"""Settings of an encoder, ours | Hugging Face's, in both directions, and which family of classes can compute which encoder."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.weights import ENERGY, EXPORTED_TOKEN_TYPES, PRETRAINING, SEQUENCE_CLASSIFICATION
from amos_fairseq.modules.encoder import TransformerConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
# Constants in MPNet's code, whatever its configuration says.
MPNET_BUCKETS, MPNET_MAX_DISTANCE = 32, 128
# Number of first rows of the position table that belong to no position.
POSITION_OFFSET = {"mpnet": 2, "roberta": 2, "electra": 0, "bert": 0, "distilbert": 0}
# A constant in DistilBERT's code.
DISTILBERT_LAYER_NORM_EPS = 1e-12
# The positions of the released AMOS checkpoint: no Hugging Face class has them (see custom_code/).
CUSTOM = "custom"


def families_of(kind: str, shape: TransformerConfig, activation: str = "tanh") -> list[str]:
    """Return the families of classes that compute a part, the closest first: mpnet, electra, bert, roberta or ``CUSTOM``.

    Args:
        kind: the part, one of the constants in :mod:`amos_fairseq.hugging_face.weights`.
        shape: of its encoder.
        activation: of the classification heads of the objective, tanh (as in BERT and RoBERTa) or gelu (as in ELECTRA); or
            linear, a head without dense layer, which all of them can compute.

    Raises:
        UserError: no Hugging Face class computes this part.
    """
    projected = shape.embedding_width not in (0, shape.width)  # only ELECTRA projects its embeddings
    if shape.position_scheme == "amos":
        return [CUSTOM]
    if shape.position_scheme == "t5":
        check_mpnet(shape, projected)
        return ["mpnet"]
    if kind in (PRETRAINING, ENERGY):
        return ["electra"]
    if kind == SEQUENCE_CLASSIFICATION and activation == "tanh":
        if projected:
            raise UserError(
                "Hugging Face's ELECTRA has gelu in its classification head, this one tanh, and no other class has embeddings "
                "narrower than the encoder: export the encoder alone, with --part encoder"
            )
        return ["bert", "roberta"]
    if projected or (kind == SEQUENCE_CLASSIFICATION and activation == "gelu"):
        return ["electra"]
    return ["electra", "bert", "roberta"] if activation == "gelu" else ["bert", "electra", "roberta"]


def check_mpnet(shape: TransformerConfig, projected: bool) -> None:
    """Raise :class:`UserError` if MPNet does not compute an encoder with t5 positions."""
    if (shape.position_buckets, shape.position_max_distance) != (MPNET_BUCKETS, MPNET_MAX_DISTANCE):
        raise UserError(
            f"Hugging Face's MPNet has {MPNET_BUCKETS} buckets and a maximum distance of {MPNET_MAX_DISTANCE}, this "
            f"encoder {shape.position_buckets} and {shape.position_max_distance}: it cannot be exported"
        )
    if projected or shape.num_token_types:
        raise UserError(
            "Hugging Face's MPNet has neither token types nor embeddings of another width than the encoder's: an encoder "
            "with these and t5 positions cannot be exported"
        )


def config_class(family: str) -> type["PretrainedConfig"]:
    from transformers import BertConfig, DistilBertConfig, ElectraConfig, MPNetConfig, RobertaConfig

    classes = (MPNetConfig, ElectraConfig, BertConfig, RobertaConfig, DistilBertConfig)
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
        "hidden_act": "gelu",
        "hidden_dropout_prob": shape.dropout,
        "attention_probs_dropout_prob": shape.attention_dropout,
        "layer_norm_eps": shape.layer_norm_eps,
    }
    if family == "mpnet":
        settings["relative_attention_num_buckets"] = shape.position_buckets
    else:
        settings["type_vocab_size"] = shape.num_token_types or EXPORTED_TOKEN_TYPES
    if family == "electra":
        settings["embedding_size"] = shape.embedding_width or shape.width
    return config_class(family)(**settings, **others)


def encoder_settings(family: str, config: "PretrainedConfig") -> dict[str, object]:
    """Return the encoder's settings under the names of our flags: the inverse of :func:`hugging_face_config`."""
    if family == "distilbert":
        own = {"intermediate_size": config.hidden_dim, "hidden_dropout_prob": config.dropout}
        own |= {"attention_probs_dropout_prob": config.attention_dropout, "layer_norm_eps": DISTILBERT_LAYER_NORM_EPS}
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
        config = SimpleNamespace(**own, **{name: getattr(config, name) for name in names})
    settings: dict[str, object] = {
        "encoder_layers": config.num_hidden_layers,
        "encoder_embed_dim": config.hidden_size,
        "encoder_ffn_embed_dim": config.intermediate_size,
        "encoder_attention_heads": config.num_attention_heads,
        "embedding_dim": getattr(config, "embedding_size", config.hidden_size),
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
    if settings["embedding_dim"] == config.hidden_size:
        settings["embedding_dim"] = 0  # ours: as wide as the encoder
    return settings
