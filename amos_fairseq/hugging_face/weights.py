"""Names of weights, ours | Hugging Face's, one table per family of classes, and conversion in both directions.

On the left is one flat name space: ``embed_tokens``, ``encoder.*`` (:class:`~amos_fairseq.modules.encoder.TransformerEncoder`),
``mlm_head.*``, ``detection_head.*``, ``classification_head.*``, ``span_head.*``, ``tagging_head.*``. On the right are the names
of the class with the head; a bare encoder (``MPNetModel``) has them without ``mpnet.``. ``N`` is the number of a layer, ``*``
means ``weight`` and ``bias``. Rows of the vocabulary keep their order. Three conversions change more than the name:

    q|k|v   three matrices, concatenated by rows on our side (three names on theirs)
    +2      a position table whose first two rows belong to no position; ours counts from 0
    0,w     a classifier with two rows, 0 ("original") and w ("replaced"); ours has only w: softmax of (0, x) is sigmoid of x
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from amos_fairseq.checkpoints.weight_names import Row, Weights, count_layers, expand_rows
from amos_fairseq.errors import UserError
from amos_fairseq.tokenization.fast_tokenizer import ABSENT

# Parts of a model. Each is one Hugging Face class per family and includes the encoder.
ENCODER = "encoder"
MASKED_LM = "masked_lm"
DETECTION = "detection"  # AMOS: one linear layer, as token classification
PRETRAINING = "pretraining"  # ELECTRA: dense, gelu, linear
ENERGY = "energy"  # Electric: the same layers with another meaning
SEQUENCE_CLASSIFICATION = "sequence_classification"
QUESTION_ANSWERING = "question_answering"
TOKEN_CLASSIFICATION = "token_classification"

Q_K_V, PLUS_2, ZERO_AND_W = "q|k|v", "+2", "0,w"
DETECTION_LABELS = {0: "original", 1: "replaced"}

TOKEN_TYPES = "encoder.embed_token_types.weight"
PROJECTION = "encoder.embedding_projection."
# A linear classification head in classes that have a dense layer: this layer multiplies states by the first number, the
# activation is there nearly linear with the second as its slope, and the output layer divides by both. A state x is changed
# by the factor 1 - (2^-12 x)^2 / 3 (tanh) or 1 + 0.8 * 2^-24 x (gelu): less than float32 rounding of its sums.
LINEAR_HEAD_SCALES = {"tanh": (2.0**-12, 1.0), "gelu": (2.0**-24, 0.5)}
# Token types of an exported BERT where our encoder has none: tokenizers send types 0 and 1 for pairs.
EXPORTED_TOKEN_TYPES = 2
# Names of LayerNorm weights in the first BERTs.
_FORMER_NAMES = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))


class Family(NamedTuple):
    """One family of classes.

    Attributes:
        prefix: of the encoder inside models with a head.
        classes: part -> class; a family without them can only be imported.
        encoder: names of the encoder's weights.
        heads: part -> names of the weights of its head.
        tied: name of a weight -> name of the weight that it is a copy of.
        layers: what precedes the number of a layer, after the prefix.
    """

    prefix: str
    classes: dict[str, str]
    encoder: tuple[Row, ...]
    heads: dict[str, tuple[Row, ...]]
    tied: dict[str, str]
    layers: str = "encoder.layer."


def _classes(name: str) -> dict[str, str]:
    return {
        ENCODER: f"{name}Model",
        MASKED_LM: f"{name}ForMaskedLM",
        DETECTION: f"{name}ForTokenClassification",
        SEQUENCE_CLASSIFICATION: f"{name}ForSequenceClassification",
        QUESTION_ANSWERING: f"{name}ForQuestionAnswering",
        TOKEN_CLASSIFICATION: f"{name}ForTokenClassification",
    }


# fmt: off
_DENSE_DETECTION = (
    Row("detection_head.dense.*",                              "discriminator_predictions.dense.*"),
    Row("detection_head.output.*",                             "discriminator_predictions.dense_prediction.*"),
)
_DETECTION = (Row("detection_head.output.*",                   "classifier.*",                             ZERO_AND_W),)
_SPANS = (Row("span_head.output.*",                            "qa_outputs.*"),)
_LABELS = (Row("tagging_head.output.*",                         "classifier.*"),)
_TWO_LAYERS = (  # MPNet, RoBERTa (tanh between) and ELECTRA (gelu)
    Row("classification_head.dense.*",                         "classifier.dense.*"),
    Row("classification_head.output.*",                        "classifier.out_proj.*"),
)
_LM_HEAD = (  # MPNet and RoBERTa
    Row("mlm_head.dense.*",                                    "lm_head.dense.*"),
    Row("mlm_head.norm.*",                                     "lm_head.layer_norm.*"),
    Row("mlm_head.bias",                                       "lm_head.bias"),
)
_MPNET = (
    Row("embed_tokens.weight",                                 "mpnet.embeddings.word_embeddings.weight"),
    Row("encoder.embed_positions.weight",                      "mpnet.embeddings.position_embeddings.weight", PLUS_2),
    Row("encoder.embedding_norm.*",                            "mpnet.embeddings.LayerNorm.*"),
    Row("encoder.relative_position.table.weight",              "mpnet.encoder.relative_attention_bias.weight"),
    Row("encoder.layers.N.attention.query_key_value.*",       ("mpnet.encoder.layer.N.attention.attn.q.*",
                                                               "mpnet.encoder.layer.N.attention.attn.k.*",
                                                               "mpnet.encoder.layer.N.attention.attn.v.*"), Q_K_V),
    Row("encoder.layers.N.attention.output.*",                 "mpnet.encoder.layer.N.attention.attn.o.*"),
    Row("encoder.layers.N.attention_norm.*",                   "mpnet.encoder.layer.N.attention.LayerNorm.*"),
    Row("encoder.layers.N.ffn_in.*",                           "mpnet.encoder.layer.N.intermediate.dense.*"),
    Row("encoder.layers.N.ffn_out.*",                          "mpnet.encoder.layer.N.output.dense.*"),
    Row("encoder.layers.N.ffn_norm.*",                         "mpnet.encoder.layer.N.output.LayerNorm.*"),
)


_DISTILBERT = (
    Row("embed_tokens.weight",                                 "distilbert.embeddings.word_embeddings.weight"),
    Row("encoder.embed_positions.weight",                      "distilbert.embeddings.position_embeddings.weight"),
    Row("encoder.embedding_norm.*",                            "distilbert.embeddings.LayerNorm.*"),
    Row("encoder.layers.N.attention.query_key_value.*",       ("distilbert.transformer.layer.N.attention.q_lin.*",
                                                               "distilbert.transformer.layer.N.attention.k_lin.*",
                                                               "distilbert.transformer.layer.N.attention.v_lin.*"), Q_K_V),
    Row("encoder.layers.N.attention.output.*",                 "distilbert.transformer.layer.N.attention.out_lin.*"),
    Row("encoder.layers.N.attention_norm.*",                   "distilbert.transformer.layer.N.sa_layer_norm.*"),
    Row("encoder.layers.N.ffn_in.*",                           "distilbert.transformer.layer.N.ffn.lin1.*"),
    Row("encoder.layers.N.ffn_out.*",                          "distilbert.transformer.layer.N.ffn.lin2.*"),
    Row("encoder.layers.N.ffn_norm.*",                         "distilbert.transformer.layer.N.output_layer_norm.*"),
)


def _bert_like(prefix: str, positions: str) -> tuple[Row, ...]:
    """BERT's encoder; ELECTRA and RoBERTa use the same names under their own prefix."""
    return (
        Row("embed_tokens.weight",                             f"{prefix}.embeddings.word_embeddings.weight"),
        Row("encoder.embed_positions.weight",                  f"{prefix}.embeddings.position_embeddings.weight", positions),
        Row("encoder.embed_token_types.weight",                f"{prefix}.embeddings.token_type_embeddings.weight"),
        Row("encoder.embedding_norm.*",                        f"{prefix}.embeddings.LayerNorm.*"),
        Row("encoder.layers.N.attention.query_key_value.*",   (f"{prefix}.encoder.layer.N.attention.self.query.*",
                                                               f"{prefix}.encoder.layer.N.attention.self.key.*",
                                                               f"{prefix}.encoder.layer.N.attention.self.value.*"), Q_K_V),
        Row("encoder.layers.N.attention.output.*",             f"{prefix}.encoder.layer.N.attention.output.dense.*"),
        Row("encoder.layers.N.attention_norm.*",               f"{prefix}.encoder.layer.N.attention.output.LayerNorm.*"),
        Row("encoder.layers.N.ffn_in.*",                       f"{prefix}.encoder.layer.N.intermediate.dense.*"),
        Row("encoder.layers.N.ffn_out.*",                      f"{prefix}.encoder.layer.N.output.dense.*"),
        Row("encoder.layers.N.ffn_norm.*",                     f"{prefix}.encoder.layer.N.output.LayerNorm.*"),
    )


FAMILIES: dict[str, Family] = {
    "mpnet": Family("mpnet", _classes("MPNet"), _MPNET, {
        MASKED_LM: _LM_HEAD,
        DETECTION: _DETECTION,
        SEQUENCE_CLASSIFICATION: _TWO_LAYERS,
        QUESTION_ANSWERING: _SPANS,
        TOKEN_CLASSIFICATION: _LABELS,
    }, tied={
        "lm_head.decoder.weight":                              "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias":                                "lm_head.bias",
    }),
    "electra": Family("electra", _classes("Electra") | dict.fromkeys((PRETRAINING, ENERGY), "ElectraForPreTraining"), (
        *_bert_like("electra", ""),
        Row("encoder.embedding_projection.*",                  "electra.embeddings_project.*"),
    ), {
        MASKED_LM: (
            Row("mlm_head.dense.*",                            "generator_predictions.dense.*"),
            Row("mlm_head.norm.*",                             "generator_predictions.LayerNorm.*"),
            Row("mlm_head.bias",                               "generator_lm_head.bias"),
        ),
        PRETRAINING: _DENSE_DETECTION,
        ENERGY: _DENSE_DETECTION,
        DETECTION: _DETECTION,
        SEQUENCE_CLASSIFICATION: _TWO_LAYERS,
        QUESTION_ANSWERING: _SPANS,
        TOKEN_CLASSIFICATION: _LABELS,
    }, tied={
        "generator_lm_head.weight":                            "electra.embeddings.word_embeddings.weight",
    }),
    "bert": Family("bert", _classes("Bert"), _bert_like("bert", ""), {
        MASKED_LM: (
            Row("mlm_head.dense.*",                            "cls.predictions.transform.dense.*"),
            Row("mlm_head.norm.*",                             "cls.predictions.transform.LayerNorm.*"),
            Row("mlm_head.bias",                               "cls.predictions.bias"),
        ),
        DETECTION: _DETECTION,
        SEQUENCE_CLASSIFICATION: (
            Row("classification_head.dense.*",                 "bert.pooler.dense.*"),
            Row("classification_head.output.*",                "classifier.*"),
        ),
        QUESTION_ANSWERING: _SPANS,
        TOKEN_CLASSIFICATION: _LABELS,
    }, tied={
        "cls.predictions.decoder.weight":                      "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias":                        "cls.predictions.bias",
    }),
    "roberta": Family("roberta", _classes("Roberta"), _bert_like("roberta", PLUS_2), {
        MASKED_LM: _LM_HEAD,
        DETECTION: _DETECTION,
        SEQUENCE_CLASSIFICATION: _TWO_LAYERS,
        QUESTION_ANSWERING: _SPANS,
        TOKEN_CLASSIFICATION: _LABELS,
    }, tied={
        "lm_head.decoder.weight":                              "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias":                                "lm_head.bias",
    }),
    "distilbert": Family("distilbert", {}, _DISTILBERT, {
        MASKED_LM: (
            Row("mlm_head.dense.*",                            "vocab_transform.*"),
            Row("mlm_head.norm.*",                             "vocab_layer_norm.*"),
            Row("mlm_head.bias",                               "vocab_projector.bias"),
        ),
        DETECTION: _DETECTION,
    }, tied={
        "vocab_projector.weight":                              "distilbert.embeddings.word_embeddings.weight",
    }, layers="transformer.layer."),
}
# fmt: on
# Other names of model_type: the same classes with another vocabulary.
SAME_AS = {"xlm-roberta": "roberta"}

# The first class that a user would load a folder with; verification loads it with the same class.
AUTO_CLASSES = {
    ENCODER: "AutoModel",
    MASKED_LM: "AutoModelForMaskedLM",
    DETECTION: "AutoModelForTokenClassification",
    PRETRAINING: "AutoModelForPreTraining",
    ENERGY: "AutoModelForPreTraining",
    SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
    TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
}


def to_hugging_face(family: str, part: str, weights: Weights) -> Weights:
    """Return the state of the class ``FAMILIES[family].classes[part]``, complete for ``load_state_dict(strict=True)``.

    A bare encoder is the class without a pooling layer. Tensors are copies, except the tied ones. Rows of a position table
    that belong to no position (the first two of MPNet and RoBERTa) are zeros, as are token types that our encoder lacks.

    Args:
        family: mpnet, electra, bert or roberta.
        part: one of the parts that the family has (the constants above).
        weights: ours, flat, with at least the encoder and the head of ``part``; others are ignored.

    Raises:
        KeyError: a weight of the encoder or of the head is missing, or the family has no such part.
    """
    table = FAMILIES[family]
    rows = table.encoder + (table.heads[part] if part != ENCODER else ())
    ours_by_name = _with_token_types(weights)
    if part == SEQUENCE_CLASSIFICATION:
        ours_by_name = _with_dense_layer(ours_by_name, "gelu" if family == "electra" else "tanh")
    converted: Weights = {}
    for ours, theirs, conversion in expand_rows(rows, count_layers(weights, "encoder.layers.")):
        if ours.startswith(PROJECTION) and ours not in ours_by_name:
            continue  # embeddings as wide as the encoder
        converted.update(zip(theirs, _convert_to_theirs(ours_by_name[ours], conversion), strict=True))
    if part == MASKED_LM:
        converted.update({copy: converted[source] for copy, source in table.tied.items()})
    if part == ENCODER:
        return {name.removeprefix(f"{table.prefix}."): tensor for name, tensor in converted.items()}
    return converted


class Converted(NamedTuple):
    """Weights under our names, and the names, as the file spells them, of weights that have no counterpart here."""

    weights: Weights
    unexpected_keys: list[str]


def from_hugging_face(family: str, weights: Weights, parts: Collection[str] = ()) -> Converted:
    """Return the encoder of a Hugging Face state, and the heads of ``parts``, under our names.

    Values are bit for bit those of the state, except for a detection classifier whose first row is not 0: the difference of
    its rows computes the same function.

    Args:
        family: mpnet, electra, bert, roberta or distilbert.
        weights: a state with or without a head; names with or without the prefix of the encoder.
        parts: heads that must be present.

    Raises:
        UserError: a weight is missing, or the output layer of a requested masked language model is not tied.
    """
    table = FAMILIES[family]
    names = {_current_name(name, table, weights): name for name in weights}
    rows = table.encoder + tuple(row for part in parts for row in table.heads[part])
    converted: Weights = {}
    used: set[str] = set()
    for ours, theirs, conversion in expand_rows(rows, count_layers(names, f"{table.prefix}.{table.layers}")):
        absent = [name for name in theirs if name not in names]
        if absent and ours.startswith(PROJECTION):
            continue
        if absent:
            raise UserError(
                f"the weight {absent[0]} is missing: these are not the whole weights of a {family} model"
                + "".join(f" with the head {part}" for part in parts)
            )
        converted[ours] = _convert_to_ours(theirs, [weights[names[name]] for name in theirs], conversion)
        used.update(theirs)
    for copy, source in table.tied.items():
        if copy not in names or source not in used:
            continue
        if torch.equal(weights[names[copy]], weights[names[source]]):
            used.add(copy)
        elif MASKED_LM in parts:
            raise UserError(
                f"{names[copy]} differs from {names[source]}: the output layer of a masked language model is tied to "
                "the token embeddings here, so this one cannot be imported; import the encoder alone (--arch amos_base, no "
                "--generator)"
            )
    return Converted(converted, sorted(original for current, original in names.items() if current not in used))


def to_hugging_face_rows(ours: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """Return ``ours`` [our rows, ...] in the order of Hugging Face's ids: [num_rows, ...], zeros where an id has no token.

    ``ids``: [dictionary size] int64, the Hugging Face id of each of our rows, -1 where there is none.
    """
    theirs = ours.new_zeros(num_rows, *ours.shape[1:])
    known = (ids != ABSENT).nonzero().squeeze(1)
    theirs[ids[known]] = ours[known]
    return theirs


def _convert_to_theirs(tensor: Tensor, conversion: str) -> list[Tensor]:
    if conversion == Q_K_V:
        return [part.clone() for part in tensor.chunk(3)]
    if conversion == PLUS_2:
        return [torch.cat([tensor.new_zeros(2, tensor.size(1)), tensor])]
    if conversion == ZERO_AND_W:
        return [torch.cat([torch.zeros_like(tensor), tensor])]
    return [tensor.clone()]


def _convert_to_ours(names: list[str], tensors: list[Tensor], conversion: str) -> Tensor:
    shapes = [list(tensor.shape) for tensor in tensors]
    if [] in shapes or shapes.count(shapes[0]) < len(shapes):
        raise UserError(f"{' and '.join(names)} have the shapes {shapes}: these are not the weights of a model")
    if conversion == Q_K_V:
        return torch.cat(tensors)
    (tensor,) = tensors
    if conversion == PLUS_2:
        return tensor[2:].clone()
    if conversion == ZERO_AND_W:
        if len(tensor) != 2:
            raise UserError(f"a detection head has 2 labels, original and replaced; this classifier has {len(tensor)}")
        return tensor[1:] - tensor[:1]
    return tensor.clone()


def _with_token_types(weights: Weights) -> Weights:
    if TOKEN_TYPES in weights:
        return weights
    width = weights["encoder.embed_positions.weight"].size(1)
    return {**weights, TOKEN_TYPES: weights["encoder.embed_positions.weight"].new_zeros(EXPORTED_TOKEN_TYPES, width)}


def _with_dense_layer(weights: Weights, activation: str) -> Weights:
    """Return the weights with a classification head that has a dense layer; a linear head computes the same as before."""
    if "classification_head.dense.weight" in weights:
        return weights
    scale, slope = LINEAR_HEAD_SCALES[activation]
    output = weights["classification_head.output.weight"]
    return {
        **weights,
        "classification_head.dense.weight": torch.eye(output.size(1)) * scale,
        "classification_head.dense.bias": torch.zeros(output.size(1)),
        "classification_head.output.weight": output / (scale * slope),
    }


def _current_name(name: str, table: Family, weights: Weights) -> str:
    """Return ``name`` as the table spells it: current LayerNorm names, with the prefix of the encoder."""
    for former, current in _FORMER_NAMES:
        name = name.replace(former, current)
    bare = not any(other.startswith(f"{table.prefix}.") for other in weights)
    return f"{table.prefix}.{name}" if bare else name
