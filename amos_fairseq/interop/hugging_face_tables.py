"""Names of weights, ours | Hugging Face's, one table per family.

``N`` is the number of a layer, ``*`` stands for weight and bias. On the left everything has one flat name space:
``embed_tokens``, ``encoder.*`` (:class:`~amos_fairseq.modules.encoder.TransformerEncoder`), ``mlm_head.*``,
``detection_head.*``, ``classification_head.*``, ``span_head.*``. On the right names are those of the model class with the
head; a bare encoder (``MPNetModel``) has them without ``mpnet.``. Three cells are more than a name:

    q|k|v   three matrices, stacked by rows on our side (three names on theirs)
    +2      a table of positions whose first two rows belong to no position; ours counts from 0
    0,w     a classifier of two rows, 0 ("original") and w ("replaced"); ours holds w: softmax of (0, x) is sigmoid of x
"""

from typing import NamedTuple, Union

# Parts of a model. Each is one class of Hugging Face's per family, and the encoder comes with each.
ENCODER = "encoder"
MASKED_LM = "masked_lm"
DETECTION = "detection"  # AMOS: one linear layer, as token classification
PRETRAINING = "pretraining"  # ELECTRA: dense, gelu, linear
ENERGY = "energy"  # Electric: the same layers, another meaning
SEQUENCE_CLASSIFICATION = "sequence_classification"
QUESTION_ANSWERING = "question_answering"

Q_K_V, PLUS_2, ZERO_AND_W = "q|k|v", "+2", "0,w"


class Row(NamedTuple):
    """One line of a table; ``theirs`` has three names where the cell is ``q|k|v``."""

    ours: str
    theirs: Union[str, tuple[str, str, str]]
    cell: str = ""


class Family(NamedTuple):
    """``prefix`` of the encoder inside models with a head; ``classes``: part -> class; ``tied``: copies of other weights."""

    prefix: str
    classes: dict[str, str]
    encoder: tuple[Row, ...]
    heads: dict[str, tuple[Row, ...]]
    tied: dict[str, str]


def _classes(name: str) -> dict[str, str]:
    return {
        ENCODER: f"{name}Model",
        MASKED_LM: f"{name}ForMaskedLM",
        DETECTION: f"{name}ForTokenClassification",
        SEQUENCE_CLASSIFICATION: f"{name}ForSequenceClassification",
        QUESTION_ANSWERING: f"{name}ForQuestionAnswering",
    }


# fmt: off
_DENSE_DETECTION = (
    Row("detection_head.dense.*",                              "discriminator_predictions.dense.*"),
    Row("detection_head.output.*",                             "discriminator_predictions.dense_prediction.*"),
)
_DETECTION = (Row("detection_head.output.*",                   "classifier.*",                             ZERO_AND_W),)
_SPANS = (Row("span_head.output.*",                            "qa_outputs.*"),)
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


def _bert_like(prefix: str, positions: str) -> tuple[Row, ...]:
    """BERT's encoder, which ELECTRA and RoBERTa repeat under their own prefix."""
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
    }, tied={
        "cls.predictions.decoder.weight":                      "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias":                        "cls.predictions.bias",
    }),
    "roberta": Family("roberta", _classes("Roberta"), _bert_like("roberta", PLUS_2), {
        MASKED_LM: _LM_HEAD,
        DETECTION: _DETECTION,
        SEQUENCE_CLASSIFICATION: _TWO_LAYERS,
        QUESTION_ANSWERING: _SPANS,
    }, tied={
        "lm_head.decoder.weight":                              "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias":                                "lm_head.bias",
    }),
}
# fmt: on
