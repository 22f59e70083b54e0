"""Hugging Face's families of classes: which computes which part of a model, and the names of its weights, ours | theirs.

On the left is one flat name space: ``embed_tokens``, ``encoder.*`` (:class:`~amos_fairseq.modules.bert_encoder.BertEncoder`, or
:class:`~amos_fairseq.modules.modern_encoder.ModernBertEncoder` for the family modernbert),
``mlm_head.*``, ``detection_head.*``, ``classification_head.*``, ``span_head.*``, ``tagging_head.*``. On the right are the names
of the class with the head; a bare encoder (``MPNetModel``) has them without ``mpnet.``. ``N`` is the number of a layer, ``*``
means ``weight`` and ``bias``. Rows of the vocabulary keep their order. :mod:`.convert` uses these tables in both directions.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from amos_fairseq.checkpoints.write import Renaming
from amos_fairseq.errors import UserError


class PartKind(Enum):
    """A kind of part of a model. Each is one Hugging Face class per family and includes the encoder.

    Attributes:
        label: in messages.
        ending: what follows "MPNet" in the name of a class.
    """

    ENCODER = "encoder", ""
    MASKED_LM = "masked_lm", "ForMaskedLM"
    # Of AMOS, and of all objectives on ModernBERT: the head is that of token classification.
    DETECTION = "detection", "ForTokenClassification"
    PRETRAINING = "pretraining", "ForPreTraining"  # ELECTRA: dense, gelu, linear
    ENERGY = "energy", "ForPreTraining"  # Electric: the same layers with another meaning
    SEQUENCE_CLASSIFICATION = "sequence_classification", "ForSequenceClassification"
    QUESTION_ANSWERING = "question_answering", "ForQuestionAnswering"
    TOKEN_CLASSIFICATION = "token_classification", "ForTokenClassification"

    def __init__(self, label: str, ending: str) -> None:
        self.label, self.ending = label, ending

    @property
    def auto_class(self) -> str:
        """The first class that a user would load a folder with; verification loads it with the same class."""
        return f"AutoModel{self.ending}"


DETECTION_LABELS = {0: "original", 1: "replaced"}

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
# MPNet with the positions of the released AMOS checkpoint: no class of Hugging Face has them (see custom_code/).
CUSTOM = "custom"
# Constants in MPNet's code, whatever its configuration says.
MPNET_BUCKETS, MPNET_MAX_DISTANCE = 32, 128
# Number of first rows of the position table that belong to no position.
POSITION_OFFSET = {"mpnet": 2, "roberta": 2, "electra": 0, "bert": 0, "distilbert": 0, "modernbert": 0, CUSTOM: 2}
# Other names of model_type: the same classes with another vocabulary.
SAME_AS = {"xlm-roberta": "roberta"}


class Conversion(NamedTuple):
    """What changes beside the name: a copy of our tensor as theirs, one for each of their names, and of theirs as ours."""

    to_theirs: Callable[[Tensor], list[Tensor]]
    to_ours: Callable[..., Tensor]


def _difference_of_rows(classifier: Tensor) -> Tensor:
    if len(classifier) != 2:
        raise UserError(f"a detection head has 2 labels, original and replaced; this classifier has {len(classifier)}")
    return classifier[1:] - classifier[:1]


RENAMED_ONLY = Conversion(lambda ours: [ours.clone()], lambda theirs: theirs.clone())
# Three matrices, concatenated by rows on our side.
Q_K_V = Conversion(lambda ours: [part.clone() for part in ours.chunk(3)], lambda *theirs: torch.cat(theirs))
# A position table whose first two rows belong to no position; ours counts from 0.
PLUS_2 = Conversion(
    lambda ours: [torch.cat([ours.new_zeros(2, ours.size(1)), ours])], lambda theirs: theirs[2:].clone()
)
# A classifier with two rows, 0 ("original") and w ("replaced"); ours has only w: softmax of (0, x) is sigmoid of x.
ZERO_AND_W = Conversion(lambda ours: [torch.cat([torch.zeros_like(ours), ours])], _difference_of_rows)


class Family(NamedTuple):
    """One family of classes.

    Attributes:
        name: how the names of its classes begin; empty for a family that can only be imported.
        prefix: of the encoder inside models with a head.
        encoder: names of the encoder's weights.
        heads: kind of part -> names of the weights of its head.
        tied: name of a weight -> name of the weight that it is a copy of.
        layers: what precedes the number of a layer, after the prefix.
    """

    name: str
    prefix: str
    encoder: tuple[Renaming, ...]
    heads: dict[PartKind, tuple[Renaming, ...]]
    tied: dict[str, str]
    layers: str = "encoder.layer."

    @property
    def kinds(self) -> list[PartKind]:
        """The kinds of parts that a class of this family computes."""
        return [PartKind.ENCODER, *self.heads] if self.name else []


# fmt: off
# In a layer: ours | BERT, ELECTRA and RoBERTa | MPNet | DistilBERT.
_LAYER = (
    ("attention.query_key_value", "attention.self.query",        "attention.attn.q",      "attention.q_lin"),
    ("",                          "attention.self.key",          "attention.attn.k",      "attention.k_lin"),
    ("",                          "attention.self.value",        "attention.attn.v",      "attention.v_lin"),
    ("attention.output",          "attention.output.dense",      "attention.attn.o",      "attention.out_lin"),
    ("attention_norm",            "attention.output.LayerNorm",  "attention.LayerNorm",   "sa_layer_norm"),
    ("ffn_in",                    "intermediate.dense",          "intermediate.dense",    "ffn.lin1"),
    ("ffn_out",                   "output.dense",                "output.dense",          "ffn.lin2"),
    ("ffn_norm",                  "output.LayerNorm",            "output.LayerNorm",      "output_layer_norm"),
)
_BERT_LAYER, _MPNET_LAYER, _DISTILBERT_LAYER = 1, 2, 3


def _encoder(
    prefix: str, column: int, positions: str = "", layers: str = "encoder.layer.", more: tuple[Renaming, ...] = ()
) -> tuple[Renaming, ...]:
    """``more``: weights that follow the sums of the embeddings; ``column``: of the table above."""
    q, k, v, *others = (f"{prefix}.{layers}N.{names[column]}.*" for names in _LAYER)
    ours = [f"encoder.layers.N.{names[0]}.*" for names in _LAYER if names[0]]
    return (
        Renaming("embed_tokens.weight",            f"{prefix}.embeddings.word_embeddings.weight"),
        Renaming("encoder.embed_positions.weight", f"{prefix}.embeddings.position_embeddings.weight", positions),
        *more,
        Renaming(ours[0], (q, k, v), Q_K_V),
        *(Renaming(*names) for names in zip(ours[1:], others, strict=True)),
    )


def _norm(prefix: str) -> Renaming:
    return Renaming("encoder.embedding_norm.*",    f"{prefix}.embeddings.LayerNorm.*")


def _bert_like(prefix: str, positions: str = "") -> tuple[Renaming, ...]:
    """BERT's encoder; ELECTRA and RoBERTa use the same names under their own prefix."""
    types = Renaming("encoder.embed_token_types.weight", f"{prefix}.embeddings.token_type_embeddings.weight")
    return _encoder(prefix, _BERT_LAYER, positions, more=(types, _norm(prefix)))


def _mlm_head(dense: str, norm: str, bias: str) -> tuple[Renaming, ...]:
    return (Renaming("mlm_head.dense.*", dense), Renaming("mlm_head.norm.*", norm), Renaming("mlm_head.bias", bias))


_MPNET = _encoder("mpnet", _MPNET_LAYER, PLUS_2, more=(
    _norm("mpnet"),
    Renaming("encoder.relative_position.table.weight", "mpnet.encoder.relative_attention_bias.weight"),
))
_DISTILBERT = _encoder("distilbert", _DISTILBERT_LAYER, layers="transformer.layer.", more=(_norm("distilbert"),))
_LM_HEAD = _mlm_head("lm_head.dense.*", "lm_head.layer_norm.*", "lm_head.bias")  # MPNet and RoBERTa
_DETECTION = (Renaming("detection_head.output.*", "classifier.*", ZERO_AND_W),)
_DENSE_DETECTION = (
    Renaming("detection_head.dense.*",             "discriminator_predictions.dense.*"),
    Renaming("detection_head.output.*",            "discriminator_predictions.dense_prediction.*"),
)
_TWO_LAYERS = (  # MPNet, RoBERTa (tanh between) and ELECTRA (gelu)
    Renaming("classification_head.dense.*",        "classifier.dense.*"),
    Renaming("classification_head.output.*",       "classifier.out_proj.*"),
)
_COMMON_HEADS = {
    PartKind.DETECTION: _DETECTION,
    PartKind.SEQUENCE_CLASSIFICATION: _TWO_LAYERS,
    PartKind.QUESTION_ANSWERING: (Renaming("span_head.output.*", "qa_outputs.*"),),
    PartKind.TOKEN_CLASSIFICATION: (Renaming("tagging_head.output.*", "classifier.*"),),
}


_MODERN = (
    Renaming("embed_tokens.weight",                             "model.embeddings.tok_embeddings.weight"),
    Renaming("encoder.embedding_norm.weight",                   "model.embeddings.norm.weight"),
    Renaming("encoder.layers.N.attention_norm.weight",          "model.layers.N.attn_norm.weight", first_layer=1),
    Renaming("encoder.layers.N.attention.query_key_value.weight", "model.layers.N.attn.Wqkv.weight"),
    Renaming("encoder.layers.N.attention.output.weight",        "model.layers.N.attn.Wo.weight"),
    Renaming("encoder.layers.N.ffn_norm.weight",                "model.layers.N.mlp_norm.weight"),
    Renaming("encoder.layers.N.ffn_in.weight",                  "model.layers.N.mlp.Wi.weight"),
    Renaming("encoder.layers.N.ffn_out.weight",                 "model.layers.N.mlp.Wo.weight"),
    Renaming("encoder.final_norm.weight",                       "model.final_norm.weight"),
)


def _modern_head(ours: str, output: str, conversion: Conversion | None = None) -> tuple[Renaming, ...]:
    """``ours``: the prefix of the dense layer and LayerNorm with which all heads of ModernBERT begin."""
    return (
        Renaming(f"{ours}dense.weight", "head.dense.weight"),
        Renaming(f"{ours}norm.weight", "head.norm.weight"),
        Renaming(output, "decoder.bias" if output == "mlm_head.bias" else "classifier.*", conversion),
    )


def _tied(decoder: str, prefix: str, bias: str = "") -> dict[str, str]:
    copies = {f"{decoder}weight": f"{prefix}.embeddings.word_embeddings.weight"}
    return copies | ({f"{decoder}bias": bias} if bias else {})


FAMILIES: dict[str, Family] = {
    "mpnet": Family(
        "MPNet", "mpnet", _MPNET, {PartKind.MASKED_LM: _LM_HEAD} | _COMMON_HEADS,
        _tied("lm_head.decoder.", "mpnet", "lm_head.bias"),
    ),
    "electra": Family(
        "Electra", "electra",
        (*_bert_like("electra"), Renaming("encoder.embedding_projection.*", "electra.embeddings_project.*")),
        {
            PartKind.MASKED_LM: _mlm_head(
                "generator_predictions.dense.*", "generator_predictions.LayerNorm.*", "generator_lm_head.bias"
            ),
            PartKind.PRETRAINING: _DENSE_DETECTION, PartKind.ENERGY: _DENSE_DETECTION,
        } | _COMMON_HEADS,
        _tied("generator_lm_head.", "electra"),
    ),
    "bert": Family(
        "Bert", "bert", _bert_like("bert"),
        {
            PartKind.MASKED_LM: _mlm_head(
                "cls.predictions.transform.dense.*", "cls.predictions.transform.LayerNorm.*", "cls.predictions.bias"
            ),
        } | _COMMON_HEADS | {
            PartKind.SEQUENCE_CLASSIFICATION: (
                Renaming("classification_head.dense.*",  "bert.pooler.dense.*"),
                Renaming("classification_head.output.*", "classifier.*"),
            ),
        },
        _tied("cls.predictions.decoder.", "bert", "cls.predictions.bias"),
    ),
    "roberta": Family(
        "Roberta", "roberta", _bert_like("roberta", PLUS_2), {PartKind.MASKED_LM: _LM_HEAD} | _COMMON_HEADS,
        _tied("lm_head.decoder.", "roberta", "lm_head.bias"),
    ),
    "distilbert": Family(
        "", "distilbert", _DISTILBERT,
        {
            PartKind.MASKED_LM: _mlm_head("vocab_transform.*", "vocab_layer_norm.*", "vocab_projector.bias"),
            PartKind.DETECTION: _DETECTION,
        },
        _tied("vocab_projector.", "distilbert"), layers="transformer.layer.",
    ),
}
FAMILIES["modernbert"] = Family(
    "ModernBert", "model", _MODERN,
    {
        PartKind.MASKED_LM: _modern_head("mlm_head.", "mlm_head.bias"),
        PartKind.DETECTION: _modern_head("detection_head.transform.", "detection_head.output.*", ZERO_AND_W),
    } | {
        kind: _modern_head(f"{head}.transform.", f"{head}.output.*")
        for kind, head in (
            (PartKind.SEQUENCE_CLASSIFICATION, "classification_head"),
            (PartKind.QUESTION_ANSWERING, "span_head"),
            (PartKind.TOKEN_CLASSIFICATION, "tagging_head"),
        )
    },
    {"decoder.weight": "model.embeddings.tok_embeddings.weight"}, layers="layers.",
)
FAMILIES[CUSTOM] = FAMILIES["mpnet"]._replace(name="Amos")
# fmt: on


def class_name(family: str, kind: PartKind) -> str:
    """Return the name of the class, such as ``MPNetForMaskedLM``; AutoModel adds a pooling layer to a bare ``MPNetModel``."""
    return FAMILIES[family].name + (kind.ending or "Model")
