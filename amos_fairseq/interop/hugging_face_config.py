"""Settings of an encoder, ours | Hugging Face's, and which family can hold which encoder."""

from typing import TYPE_CHECKING, Any

from amos_fairseq.errors import UserError
from amos_fairseq.interop.hugging_face import EXPORTED_TOKEN_TYPES
from amos_fairseq.modules.encoder import TransformerConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# MPNet's code has them as constants, whatever its configuration says.
MPNET_BUCKETS, MPNET_MAX_DISTANCE = 32, 128
# The first rows of these families' position tables belong to no position.
POSITION_OFFSET = {"mpnet": 2, "roberta": 2, "electra": 0, "bert": 0}
# The released AMOS checkpoint's positions: no class of Hugging Face's has them.
CUSTOM = "custom"


def family_of(shape: TransformerConfig, pooler_activation: str = "tanh") -> str:
    """mpnet, electra, bert, or ``CUSTOM`` where the encoder needs code of its own.

    Without relative positions both ELECTRA and BERT fit; ELECTRA alone projects its embeddings and has gelu in the
    classification head, BERT tanh.

    Raises:
        UserError: no class of Hugging Face's computes this encoder.
    """
    projected = shape.embedding_width not in (0, shape.width)
    if shape.position_scheme == "none":
        return "electra" if projected or pooler_activation == "gelu" else "bert"
    if shape.position_scheme == "amos":
        return CUSTOM
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
    return "mpnet"


def hugging_face_config(family: str, shape: TransformerConfig, num_rows: int, **others: Any) -> "PretrainedConfig":
    """The configuration of ``family`` for an encoder of ``shape`` with ``num_rows`` rows of vocabulary.

    ``others``: ``pad_token_id``, ``bos_token_id``, ``eos_token_id``, labels, ``classifier_dropout``, ``architectures``.
    """
    from transformers import BertConfig, ElectraConfig, MPNetConfig, RobertaConfig

    classes = {"mpnet": MPNetConfig, "electra": ElectraConfig, "bert": BertConfig, "roberta": RobertaConfig}
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
    return classes[family](**settings, **others)
