"""Weights of Hugging Face's models: one table of names, ours | theirs, used in both directions.

Our names form one flat name space: ``embed_tokens``, ``encoder.*`` (``amos_fairseq.modules.bert_encoder.BertEncoder``, or
``amos_fairseq.modules.modern_encoder.ModernBertEncoder`` for the family modernbert), ``mlm_head.*``,
``detection_head.*``, ``classification_head.*``, ``span_head.*``, ``tagging_head.*``. Theirs are the names of the class with the
head; a bare encoder (``MPNetModel``) has them without ``mpnet.``. Rows of the vocabulary keep their order;
``in_their_rows`` changes it.
"""

import re
from collections.abc import Callable, Collection, Iterator
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT

Weights = dict[str, Tensor]
# An output bias: exp(-10,000) is 0 in every precision, and float16 can represent it.
NEVER_PREDICTED = -1e4


class Head(Enum):
    """The head of a Hugging Face class: its name in messages, what follows "MPNet" in the name of the class, how the names of
    its weights begin here, and its pipeline on the Hub."""

    NONE = "encoder", "", "", "feature-extraction"
    MASKED_LM = "masked_lm", "ForMaskedLM", "mlm_head.", "fill-mask"
    # Of AMOS, and of all objectives on ModernBERT: the head is that of token classification.
    DETECTION = "detection", "ForTokenClassification", "detection_head.", "token-classification"
    # Of DeBERTaV3, in folders of its authors alone: transformers has no class with this head.
    PRETRAINING = "pretraining", "ForPreTraining", "detection_head.", None  # ELECTRA: dense, gelu, linear
    ENERGY = "energy", "ForPreTraining", "detection_head.", None  # Electric: the same layers with another meaning
    SEQUENCE_CLASSIFICATION = (
        "sequence_classification",
        "ForSequenceClassification",
        "classification_head.",
        "text-classification",
    )
    QUESTION_ANSWERING = "question_answering", "ForQuestionAnswering", "span_head.", "question-answering"
    TOKEN_CLASSIFICATION = "token_classification", "ForTokenClassification", "tagging_head.", "token-classification"

    def __init__(self, label: str, ending: str, prefix: str, pipeline: str | None) -> None:
        self.label, self.ending, self.prefix, self.pipeline = label, ending, prefix, pipeline

    @property
    def auto_class(self) -> str:
        """The first class that a user would load a folder with; verification loads it with the same class."""
        return f"AutoModel{self.ending}"

    @property
    def has_class(self) -> bool:
        """Whether the class includes the head; otherwise it is that of the bare encoder."""
        return bool(self.ending)


# MPNet with the positions of the released AMOS checkpoint: no class of Hugging Face has them (see custom_code/).
CUSTOM = "custom"
DEBERTA_V2 = "deberta-v2"  # the type of DeBERTaV3's models as well
_TOKEN_TYPES, _PROJECTION = "encoder.embed_token_types.weight", "encoder.embedding_projection."
_POOLER = "pooler_"  # of BERT: below, a classification head has it as its dense layer
# How a linear classification head is exported to a class that has a dense layer before it: the dense layer multiplies states by
# the first number, where the activation is nearly linear and the second number is its slope, and the output layer divides by
# both. A state x is changed by the factor 1 - (2^-12 x)^2 / 3 (tanh) or 1 + 0.8 * 2^-24 x (gelu): less than float32 rounding of
# its sums.
_LINEAR_HEAD_SCALES = {"tanh": (2.0**-12, 1.0), "gelu": (2.0**-24, 0.5)}


class Conversion(NamedTuple):
    """How tensors change besides their names: ``to_ours`` makes one tensor of ours from all of theirs, ``to_theirs`` makes one
    for each of their names from ours."""

    to_ours: Callable[..., Tensor]
    to_theirs: Callable[[Tensor], list[Tensor]] | None = None


def _difference_of_rows(classifier: Tensor) -> Tensor:
    if len(classifier) != 2:
        raise UserError(f"a detection head has 2 labels, original and replaced; this classifier has {len(classifier)}")
    return classifier[1:] - classifier[:1]


RENAMED_ONLY = Conversion(torch.clone, lambda ours: [ours.clone()])
# Three matrices, concatenated by rows on our side.
Q_K_V = Conversion(lambda *theirs: torch.cat(theirs), lambda ours: [matrix.clone() for matrix in ours.chunk(3)])
# A position table whose first two rows belong to no position; ours counts from 0.
PLUS_2 = Conversion(
    lambda theirs: theirs[2:].clone(), lambda ours: [torch.cat([ours.new_zeros(2, ours.size(1)), ours])]
)
# A classifier with two rows, 0 ("original") and w ("replaced"); ours has only w: softmax of (0, x) is sigmoid of x.
ZERO_AND_W = Conversion(_difference_of_rows, lambda ours: [torch.cat([torch.zeros_like(ours), ours])])

# Ours -> theirs, and how they are converted if not only renamed. N is the number of a layer, * is weight and bias; {a,b,c} are
# several tensors that are one of ours.
Names = dict[str, str | tuple[str, Conversion]]


class Family(NamedTuple):
    """One family of classes.

    Attributes:
        name: how the names of its classes begin.
        prefix: of the encoder inside models with a head.
        encoder: names of the encoder's weights.
        heads: head -> names of its weights.
        tied: name of a weight -> name of the weight that it is a copy of.
        optional: prefix of our names that an encoder may lack; empty if none may be missing.
    """

    name: str
    prefix: str
    encoder: Names
    heads: dict[Head, Names]
    tied: dict[str, str]
    optional: str = ""

    @property
    def layers(self) -> str:
        """What precedes the number of a layer in names."""
        return next(str(line).partition("N.")[0] for ours, line in self.encoder.items() if ".ffn_in." in ours)


_BERT: Names = {
    "embed_tokens.weight": "embeddings.word_embeddings.weight",
    "encoder.embed_positions.weight": "embeddings.position_embeddings.weight",
    "encoder.embed_token_types.weight": "embeddings.token_type_embeddings.weight",
    "encoder.embedding_norm.*": "embeddings.LayerNorm.*",
    "encoder.layers.N.attention.query_key_value.*": ("encoder.layer.N.attention.self.{query,key,value}.*", Q_K_V),
    "encoder.layers.N.attention.output.*": "encoder.layer.N.attention.output.dense.*",
    "encoder.layers.N.attention_norm.*": "encoder.layer.N.attention.output.LayerNorm.*",
    "encoder.layers.N.ffn_in.*": "encoder.layer.N.intermediate.dense.*",
    "encoder.layers.N.ffn_out.*": "encoder.layer.N.output.dense.*",
    "encoder.layers.N.ffn_norm.*": "encoder.layer.N.output.LayerNorm.*",
}
_MPNET: Names = {name: theirs for name, theirs in _BERT.items() if name != _TOKEN_TYPES} | {
    "encoder.embed_positions.weight": ("embeddings.position_embeddings.weight", PLUS_2),
    "encoder.relative_position.table.weight": "encoder.relative_attention_bias.weight",
    "encoder.layers.N.attention.query_key_value.*": ("encoder.layer.N.attention.attn.{q,k,v}.*", Q_K_V),
    "encoder.layers.N.attention.output.*": "encoder.layer.N.attention.attn.o.*",
    "encoder.layers.N.attention_norm.*": "encoder.layer.N.attention.LayerNorm.*",
}
_DISTILBERT: Names = {
    "embed_tokens.weight": "embeddings.word_embeddings.weight",
    "encoder.embed_positions.weight": "embeddings.position_embeddings.weight",
    "encoder.embedding_norm.*": "embeddings.LayerNorm.*",
    "encoder.layers.N.attention.query_key_value.*": ("transformer.layer.N.attention.{q,k,v}_lin.*", Q_K_V),
    "encoder.layers.N.attention.output.*": "transformer.layer.N.attention.out_lin.*",
    "encoder.layers.N.attention_norm.*": "transformer.layer.N.sa_layer_norm.*",
    "encoder.layers.N.ffn_in.*": "transformer.layer.N.ffn.lin1.*",
    "encoder.layers.N.ffn_out.*": "transformer.layer.N.ffn.lin2.*",
    "encoder.layers.N.ffn_norm.*": "transformer.layer.N.output_layer_norm.*",
}
_MODERN: Names = {
    "embed_tokens.weight": "embeddings.tok_embeddings.weight",
    "encoder.embedding_norm.weight": "embeddings.norm.weight",
    "encoder.layers.N.attention_norm.weight": "layers.N.attn_norm.weight",
    "encoder.layers.N.attention.query_key_value.weight": "layers.N.attn.Wqkv.weight",
    "encoder.layers.N.attention.output.weight": "layers.N.attn.Wo.weight",
    "encoder.layers.N.ffn_norm.weight": "layers.N.mlp_norm.weight",
    "encoder.layers.N.ffn_in.weight": "layers.N.mlp.Wi.weight",
    "encoder.layers.N.ffn_out.weight": "layers.N.mlp.Wo.weight",
    "encoder.final_norm.weight": "final_norm.weight",
}


_POSITIONS = "encoder.embed_positions.weight"
_DEBERTA: Names = {name: theirs for name, theirs in _BERT.items() if name not in (_TOKEN_TYPES, _POSITIONS)} | {
    "encoder.relative_table.weight": "encoder.rel_embeddings.weight",
    "encoder.relative_norm.*": "encoder.LayerNorm.*",
    "encoder.layers.N.attention.query_key_value.*": ("encoder.layer.N.attention.self.{query,key,value}_proj.*", Q_K_V),
}


def _under(prefix: str, names: Names) -> Names:
    return {
        ours: f"{prefix}.{line}" if isinstance(line, str) else (f"{prefix}.{line[0]}", line[1])
        for ours, line in names.items()
    }


def _mlm_head(dense: str, norm: str, bias: str) -> Names:
    return {"mlm_head.dense.*": dense, "mlm_head.norm.*": norm, "mlm_head.bias": bias}


def _modern_head(ours: str, output: Names) -> Names:
    """``ours``: what precedes the dense layer and LayerNorm with which all heads of ModernBERT begin."""
    return {f"{ours}dense.weight": "head.dense.weight", f"{ours}norm.weight": "head.norm.weight"} | output


_POSITIONS_PLUS_2: Names = {"encoder.embed_positions.weight": ("embeddings.position_embeddings.weight", PLUS_2)}
_LM_HEAD = _mlm_head("lm_head.dense.*", "lm_head.layer_norm.*", "lm_head.bias")  # MPNet and RoBERTa
_DETECTION: Names = {"detection_head.output.*": ("classifier.*", ZERO_AND_W)}
_DENSE_DETECTION: Names = {
    "detection_head.dense.*": "discriminator_predictions.dense.*",
    "detection_head.output.*": "discriminator_predictions.dense_prediction.*",
}
_COMMON_HEADS: dict[Head, Names] = {
    Head.DETECTION: _DETECTION,
    Head.SEQUENCE_CLASSIFICATION: {  # MPNet, RoBERTa (tanh between) and ELECTRA (gelu)
        "classification_head.dense.*": "classifier.dense.*",
        "classification_head.output.*": "classifier.out_proj.*",
    },
    Head.QUESTION_ANSWERING: {"span_head.output.*": "qa_outputs.*"},
    Head.TOKEN_CLASSIFICATION: {"tagging_head.output.*": "classifier.*"},
}
_POOLED = {"classification_head.dense.*": "bert.pooler.dense.*", "classification_head.output.*": "classifier.*"}

# fmt: off
FAMILIES: dict[str, Family] = {
    "mpnet": Family(
        "MPNet", "mpnet", _under("mpnet", _MPNET), {Head.MASKED_LM: _LM_HEAD} | _COMMON_HEADS,
        {"lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"},
    ),
    "electra": Family(
        "Electra", "electra", _under("electra", _BERT | {f"{_PROJECTION}*": "embeddings_project.*"}),
        _COMMON_HEADS | {
            Head.MASKED_LM: _mlm_head(
                "generator_predictions.dense.*", "generator_predictions.LayerNorm.*", "generator_lm_head.bias"
            ),
            Head.PRETRAINING: _DENSE_DETECTION, Head.ENERGY: _DENSE_DETECTION,
        },
        {"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
        optional=_PROJECTION,  # embeddings as wide as the encoder
    ),
    "bert": Family(
        "Bert", "bert", _under("bert", _BERT | {f"{_POOLER}*": "pooler.dense.*"}),
        _COMMON_HEADS | {
            Head.SEQUENCE_CLASSIFICATION: _POOLED,
            Head.MASKED_LM: _mlm_head(
                "cls.predictions.transform.dense.*", "cls.predictions.transform.LayerNorm.*", "cls.predictions.bias"
            ),
        },
        {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        optional=_POOLER,  # absent in a folder of BertForMaskedLM
    ),
    "roberta": Family(
        "Roberta", "roberta", _under("roberta", _BERT | _POSITIONS_PLUS_2), {Head.MASKED_LM: _LM_HEAD} | _COMMON_HEADS,
        {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"},
    ),
    "distilbert": Family(
        "DistilBert", "distilbert", _under("distilbert", _DISTILBERT),
        {
            Head.MASKED_LM: _mlm_head("vocab_transform.*", "vocab_layer_norm.*", "vocab_projector.bias"),
            Head.DETECTION: _DETECTION,
        },
        {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    ),
    "modernbert": Family(
        "ModernBert", "model", _under("model", _MODERN),
        {
            Head.MASKED_LM: _modern_head("mlm_head.", {"mlm_head.bias": "decoder.bias"}),
            Head.DETECTION: _modern_head("detection_head.transform.", _DETECTION),
            **{
                head: _modern_head(f"{head.prefix}transform.", {f"{head.prefix}output.*": "classifier.*"})
                for head in (Head.SEQUENCE_CLASSIFICATION, Head.QUESTION_ANSWERING, Head.TOKEN_CLASSIFICATION)
            },
        },
        {"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        optional="encoder.layers.0.attention_norm.",
    ),
    DEBERTA_V2: Family(
        "DebertaV2", "deberta", _under("deberta", _DEBERTA),
        _COMMON_HEADS | {
            # Of the generator and of the discriminator in a folder of the authors.
            Head.MASKED_LM: _mlm_head(
                "lm_predictions.lm_head.dense.*", "lm_predictions.lm_head.LayerNorm.*", "lm_predictions.lm_head.bias"
            ) | {"encoder.decoder_positions.weight": "deberta.embeddings.position_embeddings.weight"},
            Head.PRETRAINING: {
                "detection_head.dense.*": "mask_predictions.dense.*",
                "detection_head.norm.*": "mask_predictions.LayerNorm.*",
                "detection_head.output.*": "mask_predictions.classifier.*",
            },
            Head.SEQUENCE_CLASSIFICATION: {
                "classification_head.dense.*": "pooler.dense.*", "classification_head.output.*": "classifier.*",
            },
        },
        {},
    ),
}
FAMILIES[CUSTOM] = FAMILIES["mpnet"]._replace(name="Amos")
# fmt: on


def class_name(family: str, head: Head) -> str:
    """Return the name of the class, such as ``MPNetForMaskedLM``; AutoModel adds a pooling layer to a bare ``MPNetModel``."""
    return FAMILIES[family].name + (head.ending or "Model")


def expand_names(names: Names, num_layers: int) -> Iterator[tuple[str, list[str], Conversion]]:
    """Yield each line once per layer and once for weight and bias: our name, their names, conversion."""
    for ours, line in names.items():
        theirs, conversion = line if isinstance(line, tuple) else (line, RENAMED_ONLY)
        start, _, rest = theirs.partition("{")
        several, _, end = rest.partition("}")
        all_theirs = [f"{start}{each}{end}" for each in several.split(",")]
        for layer in range(num_layers) if ".N." in ours else (0,):
            for last in ("weight", "bias") if ours.endswith("*") else ("",):
                here, *there = (name.replace(".N.", f".{layer}.").replace("*", last) for name in (ours, *all_theirs))
                yield here, there, conversion


def count_layers(names: Collection[str], prefix: str) -> int:
    """Return one more than the highest number that follows ``prefix`` in ``names``."""
    numbers = [int(match.group(1)) for name in names if (match := re.match(rf"{re.escape(prefix)}(\d+)\.", name))]
    return max(numbers, default=-1) + 1


def exported_token_types(family: str, number: int) -> int:
    """Return how many token types a folder has: two or more, because tokenizers send 0 and 1 for pairs. RoBERTa's do not."""
    return max(number, 1 if family == "roberta" else 2)


def to_hugging_face(family: str, head: Head, weights: Weights) -> Weights:
    """Return the state of the class of this family, complete for ``load_state_dict(strict=True)``.

    A bare encoder is the class without a pooling layer. Tensors are copies, except the tied ones. Rows of a position table
    that belong to no position (the first two of MPNet and RoBERTa) are zeros, as are token types of an encoder that has none;
    of one type, both rows are equal. ``weights`` are ours, flat, with at least the encoder and the head.
    """
    table = FAMILIES[family]
    ours_by_name = dict(weights)
    names = table.encoder | (table.heads[head] if head.has_class else {})
    if _TOKEN_TYPES in names:
        types = weights.get(_TOKEN_TYPES, torch.zeros_like(weights["encoder.embed_positions.weight"][:1]))
        ours_by_name[_TOKEN_TYPES] = types.expand(exported_token_types(family, len(types)), -1)
    if "classification_head.dense.*" in names and "classification_head.dense.weight" not in weights:
        # A dense layer after which the linear head computes the same as before.
        scale, slope = _LINEAR_HEAD_SCALES["gelu" if family in ("electra", DEBERTA_V2) else "tanh"]
        output = weights["classification_head.output.weight"]
        ours_by_name |= {
            "classification_head.dense.weight": torch.eye(output.size(1)) * scale,
            "classification_head.dense.bias": torch.zeros(output.size(1)),
            "classification_head.output.weight": output / (scale * slope),
        }
    converted: Weights = {}
    for ours, theirs, conversion in expand_names(names, count_layers(weights, "encoder.layers.")):
        if ours in ours_by_name or not (table.optional and ours.startswith(table.optional)):
            converted.update(zip(theirs, conversion.to_theirs(ours_by_name[ours]), strict=True))
    if head == Head.MASKED_LM:
        converted.update({copy: converted[source] for copy, source in table.tied.items()})
    if not head.has_class:
        return {name.removeprefix(f"{table.prefix}."): tensor for name, tensor in converted.items()}
    return converted


def from_hugging_face(family: str, weights: Weights, heads: Collection[Head] = ()) -> tuple[Weights, list[str]]:
    """Return the encoder of a Hugging Face state, and some of its heads, which must be present, under our names; and the names
    of weights that have no counterpart here.

    Values are bit for bit those of the state, except for a detection classifier whose first row is not 0: the difference of
    its rows computes the same function. Names may lack the prefix of the encoder.
    """
    table = FAMILIES[family]
    names = _current_names(table, weights)
    theirs = {current: weights[name] for current, name in names.items()}
    expected = table.encoder.copy()
    for head in heads:
        expected |= table.heads[head]
    whose = f"a {family} model" + "".join(f" with the head {head.label}" for head in heads)
    converted, used = to_our_names(expected, count_layers(names, table.layers), theirs, whose, table.optional)
    for copy, source in table.tied.items():
        if copy not in names or source not in used:
            continue
        if torch.equal(theirs[copy], theirs[source]):
            used.add(copy)
        elif Head.MASKED_LM in heads:
            raise UserError(
                f"{names[copy]} differs from {names[source]}, to which it is tied here: import the encoder alone (--arch "
                "amos_base, no --generator)"
            )
    return converted, sorted(name for current, name in names.items() if current not in used)


def to_our_names(
    expected: Names, num_layers: int, theirs: Weights, whose: str, optional: str = ""
) -> tuple[Weights, set[str]]:
    """Return the weights of all lines of a table under our names, and the names of theirs that were used."""
    converted: Weights = {}
    used: set[str] = set()
    for ours, names, conversion in expand_names(expected, num_layers):
        absent = [name for name in names if name not in theirs]
        if absent and optional and ours.startswith(optional):
            continue
        if absent:
            raise UserError(f"the weight {absent[0]} is missing: these are not the whole weights of {whose}")
        shapes = [list(theirs[name].shape) for name in names]
        if [] in shapes or shapes.count(shapes[0]) < len(shapes):
            raise UserError(f"{' and '.join(names)} have the shapes {shapes}: these are not the weights of a model")
        for name in names:
            if not (theirs[name].is_floating_point() and theirs[name].isfinite().all()):
                what = "numbers that are not finite" if theirs[name].is_floating_point() else "integers"
                raise UserError(f"the weight {name} has {what}: give the weights of {whose} again")
        converted[ours] = conversion.to_ours(*(theirs[name] for name in names))
        used.update(names)
    return converted, used


def _current_names(table: Family, weights: Weights) -> dict[str, str]:
    """Return each name as the table spells it (current LayerNorm names, with the prefix of the encoder) -> the file's name."""
    prefix = "" if any(name.startswith(f"{table.prefix}.") for name in weights) else f"{table.prefix}."
    names = {}
    for name in weights:
        current = name.replace(".LayerNorm.gamma", ".LayerNorm.weight").replace(".LayerNorm.beta", ".LayerNorm.bias")
        names[prefix + current] = name  # the first BERTs have gamma and beta
    return names


def in_their_rows(weights: Weights, ids: Tensor, num_rows: int) -> Weights:
    """Return ``weights`` with the vocabulary in the order of Hugging Face's ``ids`` of our rows, [num_rows, ...].

    Ids without a token, in the gaps of a foreign vocabulary, have zeros, and an MLM head never predicts them.
    """
    known = (ids != ABSENT).nonzero().squeeze(1)
    result = dict(weights)
    for name, value_without_token in (("embed_tokens.weight", 0.0), ("mlm_head.bias", NEVER_PREDICTED)):
        if name in weights:
            ours = weights[name]
            result[name] = ours.new_full((num_rows, *ours.shape[1:]), value_without_token)
            result[name][ids[known]] = ours[known]
    return result
