"""The part of a checkpoint that ``amos export`` writes: the encoder, or a network with its head."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.checkpoints.write import Weights
from amos_fairseq.downstream.classification.dataset import TASK_FILE, TASK_FOLDER
from amos_fairseq.downstream.parsing.model import TREES
from amos_fairseq.downstream.squad.model import IndependentSpanHead
from amos_fairseq.downstream.tagging.dataset import are_labels, read_labels
from amos_fairseq.downstream.tagging.model import column_of, word_head_name
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.families import (
    CUSTOM,
    DETECTION_LABELS,
    MPNET_BUCKETS,
    MPNET_MAX_DISTANCE,
    PartKind,
    class_name,
)
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.fine_tuning import TEXT_HEAD, FineTunedModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.teams import TeamsModel
from amos_fairseq.modules.bert_encoder import BertEncoderConfig
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder, with_layers
from amos_fairseq.modules.heads import DenseDetectionHead
from amos_fairseq.modules.modern_encoder import ModernBertEncoderConfig
from amos_fairseq.strangers import read_json


@dataclass(frozen=True)
class ExportedPart:
    """One model to export.

    Attributes:
        shape: of its encoder.
        weights: under our names of :mod:`.families`, the vocabulary in our rows.
        outputs: our own code, which the exported model is compared with: tokens [B,T] in our ids -> what the exported class
            returns: the states [B,T,D] of a bare encoder; logits [B,T,dictionary size] of the masked language model; [B,T]
            logits of "replaced"; [B, classes]; [B,T,2] start and end; [B,T,labels].
        settings: for its configuration: labels, kind of problem.
        limits: for the model card, instead of the text for its kind.
        family: of the exported class.
        token_types: those that a fine-tuned model derives from tokens [B,T], if its encoder has any.
    """

    kind: PartKind
    shape: TransformerConfig
    weights: Weights
    outputs: Callable[[Tensor], Tensor]
    description: str
    settings: dict[str, Any] = field(default_factory=dict)
    limits: str = ""
    family: str = ""
    token_types: Callable[[Tensor], Tensor | None] | None = None

    @property
    def class_name(self) -> str:
        return class_name(self.family, self.kind)

    @property
    def labels(self) -> list[str]:
        """Names of the classes in their order; none of a part without classes."""
        return list(self.settings.get("id2label", {}).values())


def choose_part(
    loaded: LoadedCheckpoint,
    name: str | None = None,
    depth: str | None = None,
    labels: Sequence[str] | None = None,
    family: str | None = None,
    head: str | None = None,
) -> ExportedPart:
    """Return the part called ``name``, or by default a fine-tuned checkpoint's head with its encoder (of several heads the one
    called ``head``, or the encoder alone), the network of MLM with its head, or the encoder of any other pretraining.

    For the arguments see :func:`.export.export`; the default family is the closest.

    Raises:
        UserError: the checkpoint has no such part, or no Hugging Face class (of the family) computes it.
    """
    model = loaded.model
    if depth is not None and name != "generator":
        raise UserError(f"--depth {depth} chooses a depth of the generator: give --part generator with it")
    is_fine_tuned, is_mlm = isinstance(model, FineTunedModel), isinstance(model, MlmModel)
    heads = [*getattr(model, "classification_heads", ()), *getattr(model, "word_heads", ())]
    known = heads_of_tasks(model)
    if head is not None and head not in known and (plain := column_of(word_head_name(head))) in known:
        head = plain  # of a column with other characters in its name
    if head is not None and name is not None:
        raise UserError(f"--head {head} and --part {name} name two parts: leave one of them out")
    if head is not None and head not in known:
        reason = f"it has {', '.join(known)}" if known else "it is not of several tasks"
        raise UserError(f"--head {head}: {loaded.file} has no head of this name: {reason}")
    if labels is not None and not (is_fine_tuned and name is None and (head is not None or len(heads) == 1)):
        raise UserError("--labels names the classes of a fine-tuned classification head, which is not exported here")
    if is_mlm and name in ("generator", "discriminator"):
        raise UserError(f"{loaded.file} is a masked language model and has no {name}: give --part mlm or encoder")
    if is_fine_tuned:
        part = fine_tuned_part(loaded, name, labels, head)
    elif name == "mlm" and not is_mlm:
        raise UserError(f"{loaded.file} is not an mlm: its masked language model is --part generator")
    elif name == "generator" or (is_mlm and name != "encoder"):
        part = generator_part(loaded, depth)
    elif name == "discriminator":
        part = discriminator_part(loaded)
    else:
        part = encoder_part(model)
    possible = families_of(part.kind, part.shape, str(model.cfg.pooler_activation_fn))
    if family is not None and family not in possible:
        raise UserError(
            f"--as {family}: {part.description} of this checkpoint can be exported as {' or '.join(possible)}"
            " (positions, width of the embeddings and activation of the head decide)"
        )
    token_types = model.token_types if is_fine_tuned else None
    return dataclasses.replace(part, family=family or possible[0], token_types=token_types)


def heads_of_tasks(model: nn.Module) -> list[str]:
    """Return the names of the heads of a model of several tasks, of labels of words those of the columns; none of another
    model."""
    texts, words = getattr(model, "classification_heads", ()), getattr(model, "word_heads", ())
    return [name for name in texts if name != TEXT_HEAD] + [column_of(name) for name in words if len(words) > 1]


def encoder_part(model: nn.Module) -> ExportedPart:
    """Return the encoder that fine-tuning would use, or has used."""
    weights, outputs, limits = encoder_weights(model.encoder_embedding, model.encoder), model.extract_features, ""
    if isinstance(model, FineTunedModel) and model.layer_mixture is not None:

        def outputs(tokens: Tensor) -> Tensor:
            return model.all_states(tokens)[-1]

        limits = (
            "It was fine-tuned with a head that read a learned mixture of all layers, which is not in this folder: its output "
            "is the last layer alone."
        )
    return ExportedPart(PartKind.ENCODER, model.encoder.shape, weights, outputs, "the encoder", limits=limits)


def generator_part(loaded: LoadedCheckpoint, depth: str | None) -> ExportedPart:
    """Return the network of MLM, or a generator up to ``depth`` (by default the deepest), with its MLM head.

    Raises :class:`UserError` if no class computes it.
    """
    model, limits = loaded.model, ""
    if depth is not None and depth not in model.depth_names:
        raise UserError(f"--depth {depth} is not a depth of this generator: it has {', '.join(model.depth_names)}")
    name = depth or model.depth_names[-1]
    description = f"the generator at depth {name}"
    if isinstance(model, MlmModel):
        encoder, head, num_layers = model.transformer, model.mlm_head, len(model.transformer.layers)
        description = "the masked language model"
        limits = (
            "It predicts masked words. Its encoder can be fine-tuned: AutoModel and its variants load this folder too."
        )
    elif isinstance(model, AmosModel):
        index = model.depth_names.index(name)
        encoder = model.generators[index if model.cfg.separate_generators else 0]
        head, num_layers = model.head_of_depth[index], model.depths[index]
    elif isinstance(getattr(model, "generator", None), TransformerEncoder):  # of ELECTRA and TEAMS; not two towers
        encoder, head, num_layers = model.generator, model.mlm_head, len(model.generator.layers)
    else:
        raise UserError(f"{loaded.file} has no generator that a masked language model of Hugging Face can represent")
    embedding, num_tokens = model.generator_embedding, len(loaded.dictionary)

    def outputs(tokens: Tensor) -> Tensor:
        states = encoder(embedding(tokens), tokens.eq(model.vocabulary.pad))[num_layers - 1]
        return linear(head(states), embedding.weight, head.bias)[..., :num_tokens]

    return ExportedPart(
        PartKind.MASKED_LM,
        dataclasses.replace(encoder.shape, num_layers=num_layers),
        encoder_weights(embedding, encoder, num_layers) | state_of("mlm_head.", head),
        outputs,
        description,
        limits=limits,
    )


def discriminator_part(loaded: LoadedCheckpoint) -> ExportedPart:
    """Return the discriminator with its detection head, or Electric's with the head of its energies.

    TEAMS detects in its own branch, whichever fine-tuning would use. Raises :class:`UserError` if there is no such head, or no
    Hugging Face class computes it.
    """
    model = loaded.model
    head = getattr(model, "detection_head", None)
    if head is None or (isinstance(model, TeamsModel) and model.rtd_ffn is not None):
        reason = (
            "has no detection head" if head is None else "detects by a network on top of its encoder (--task-heads ffn)"
        )
        raise UserError(f"{loaded.file} {reason}: export the encoder alone, with --part encoder")
    encoder = model.encoder
    if isinstance(model, TeamsModel):
        own_layer = getattr(model, "rtd_layer", None)
        encoder = model.discriminator
        if own_layer is not None:
            encoder = with_layers(encoder, [*encoder.layers[:-1], own_layer])
    kind, settings, description = PartKind.DETECTION, {}, "the discriminator"
    if isinstance(model, ElectricModel) and model.variant == "electric":
        kind, description = PartKind.ENERGY, "the energies of tokens"
    if isinstance(head, DenseDetectionHead):
        if encoder.shape.has_learned_bias:
            raise UserError(
                "no Hugging Face class has a detection head of two layers on relative positions: export the encoder alone, "
                "with --part encoder"
            )
        kind = kind if kind == PartKind.ENERGY else PartKind.PRETRAINING
    elif kind == PartKind.DETECTION:  # the others have one logit, and a random classifier must not get these names
        settings = {"id2label": DETECTION_LABELS, "label2id": {label: i for i, label in DETECTION_LABELS.items()}}
    return ExportedPart(
        kind,
        encoder.shape,
        encoder_weights(model.encoder_embedding, encoder) | state_of("detection_head.", head),
        lambda tokens: head(encoder(model.encoder_embedding(tokens), tokens.eq(model.vocabulary.pad))[-1]),
        description,
        settings,
    )


def fine_tuned_part(
    loaded: LoadedCheckpoint, name: str | None, labels: Sequence[str] | None, head_name: str | None = None
) -> ExportedPart:
    """Return the encoder with its head, or alone if ``name`` says so or there are several; arguments and errors as for
    :func:`choose_part`."""
    model: FineTunedModel = loaded.model
    is_modern = isinstance(model.encoder.shape, ModernBertEncoderConfig)
    heads, words = getattr(model, "classification_heads", {}), getattr(model, "word_heads", {})
    span_head = getattr(model, "span_head", None)
    if name not in (None, "encoder"):
        raise UserError(f"{loaded.file} was fine-tuned and has no {name} any more: give the pretraining checkpoint")
    if name == "encoder" or not (heads or span_head or words):
        return encoder_part(model)
    if TREES in words:
        raise UserError(
            f"{loaded.file} predicts dependency trees, which no Hugging Face class does: export the encoder alone, with --part "
            "encoder, or load it with amos_fairseq.load"
        )
    if span_head is not None:
        kind, prefix, head, description = (
            PartKind.QUESTION_ANSWERING,
            "span_head.",
            span_head,
            "its head for answers",
        )
        if not isinstance(head, IndependentSpanHead):
            raise UserError(
                f"{loaded.file} marks answers with a joint head, which no Hugging Face question answering class for "
                "these encoders has: fine-tune with the independent head, or export the encoder alone with --part encoder"
            )
    elif len(heads) + len(words) > 1 and head_name is None:
        limits = (
            f"It was fine-tuned on several tasks ({', '.join(heads_of_tasks(model))}), whose heads are not in this folder: "
            "`amos export --head TASK` writes one of them with the encoder."
        )
        return dataclasses.replace(encoder_part(model), limits=limits)
    elif words:
        (only,) = words if head_name is None else [word_head_name(head_name)]
        kind, prefix, head = PartKind.TOKEN_CLASSIFICATION, "tagging_head.", words[only]
        description = "its head for labels of words" if head_name is None else f"the head of {head_name}"
    else:
        (head_name,) = [head_name] if head_name else heads
        head = heads[head_name]
        kind, prefix, description = PartKind.SEQUENCE_CLASSIFICATION, "classification_head.", "its classification head"
        description = description if head_name == TEXT_HEAD else f"the head of {head_name}"
        if head.pooling == "mean" and not is_modern:
            raise UserError(
                f"{loaded.file} classifies by the mean of all states (--pooling mean), which no Hugging Face class for these "
                "encoders does: fine-tune with --pooling first, or export the encoder alone, with --part encoder"
            )
    if model.layer_mixture is not None:
        raise UserError(
            f"the head of {loaded.file} reads a mixture of all layers (--layers mix), which no Hugging Face class for these "
            "encoders does: fine-tune with --layers K or last, or export the encoder alone, with --part encoder"
        )

    def outputs(tokens: Tensor) -> Tensor:
        states = model.extract_features(tokens)
        if kind == PartKind.QUESTION_ANSWERING:  # without the mask of answers
            return head.logits(states)
        return head(states, tokens.eq(model.vocabulary.pad)) if head in heads.values() else head(states)

    settings = {}
    if kind != PartKind.QUESTION_ANSWERING:
        settings = label_settings(loaded, kind, head.output.out_features, labels, head_name)
    if kind == PartKind.SEQUENCE_CLASSIFICATION and is_modern:
        settings["classifier_pooling"] = "mean" if head.pooling == "mean" else "cls"
    return ExportedPart(
        kind,
        model.encoder.shape,
        encoder_weights(model.encoder_embedding, model.encoder) | without_scale(prefix, state_of(prefix, head)),
        outputs,
        f"the encoder with {description}",
        settings,
    )


def families_of(kind: PartKind, shape: TransformerConfig, activation: str = "tanh") -> list[str]:
    """Return the families of classes that compute a part, the closest first: modernbert, mpnet, electra, bert, roberta or
    ``CUSTOM``.

    Args:
        kind: of the part.
        shape: of its encoder.
        activation: of the classification heads of the objective, tanh (as in BERT and RoBERTa) or gelu (as in ELECTRA); or
            linear, a head without dense layer, which all of them can compute.

    Raises:
        UserError: no Hugging Face class computes this part.
    """
    projected = shape.is_projected  # only ELECTRA projects its embeddings
    if isinstance(shape, ModernBertEncoderConfig):
        _check_modern(kind, projected)
        return ["modernbert"]
    if shape.position_scheme == "amos":
        return [CUSTOM]
    if shape.position_scheme == "t5":
        _check_mpnet(shape, projected)
        return ["mpnet"]
    if kind in (PartKind.PRETRAINING, PartKind.ENERGY):
        return ["electra"]
    if kind == PartKind.SEQUENCE_CLASSIFICATION and activation == "tanh":
        if projected:
            raise UserError(
                "Hugging Face's ELECTRA has gelu in its classification head, this one tanh, and no other class has embeddings "
                "narrower than the encoder: export the encoder alone, with --part encoder"
            )
        return ["bert", "roberta"]
    if projected or (kind == PartKind.SEQUENCE_CLASSIFICATION and activation == "gelu"):
        return ["electra"]
    return ["electra", "bert", "roberta"] if activation == "gelu" else ["bert", "electra", "roberta"]


def _check_modern(kind: PartKind, projected: bool) -> None:
    """Raise :class:`UserError` if ModernBERT has no class for a part on its encoder."""
    if projected:
        raise UserError(
            "Hugging Face's ModernBERT needs embeddings as wide as the encoder, and this generator is narrower than its "
            "discriminator: export the discriminator or the encoder"
        )
    if kind == PartKind.ENERGY:
        raise UserError(
            "Hugging Face has no class for energies of tokens on ModernBERT: export the encoder alone, with --part encoder"
        )


def _check_mpnet(shape: BertEncoderConfig, projected: bool) -> None:
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


def label_settings(
    loaded: LoadedCheckpoint, kind: PartKind, num_classes: int, labels: Sequence[str] | None, task: str | None = None
) -> dict[str, Any]:
    """Return settings of the exported configuration: names of the classes, and for whole texts the kind of problem.

    The names are ``labels``, else those in ``labels.txt`` beside the checkpoint (for labels of words), or in ``task.json``
    beside the checkpoint or in the task's data, if there are as many as the head has, else ``LABEL_0``, ``LABEL_1``, ... The
    head of one of several tasks has its own ``task.json``.

    Raises:
        UserError: there are more or fewer labels than classes, or two are equal.
    """
    kind_of_label = None
    if kind == PartKind.TOKEN_CLASSIFICATION:
        names = read_labels(loaded.file.parent / TASK_FOLDER / word_head_name(task) if task else loaded.file.parent)
    else:
        hint = "it does not name the labels of the task, give them with --labels A,B,..."
        beside, data = loaded.file.parent, str(loaded.task.get("data", "")).split(os.pathsep)
        files = [folder / TASK_FILE for folder in (beside / TASK_FOLDER / str(task), beside, *map(Path, data))]
        records = ((file, read_json(file, hint, optional=True) or {}) for file in files)
        found = ((file, own) for file, own in records if own and (len(data) == 1 or own.get("task") == task))
        file, record = next(found, (files[0], {}))
        names, kind_of_label = record.get("labels") or [], record.get("kind")
        if names and not are_labels(names):
            raise UserError(f"{file} has no list of different labels: {hint}")
    if labels:
        names = list(labels)
    if not labels and len(names) != num_classes:
        names = [f"LABEL_{number}" for number in range(num_classes)]
    if len(names) != num_classes or len(set(names)) != num_classes:
        raise UserError(
            f"--labels needs {num_classes} different names, one per class in their order; got {', '.join(names)}"
        )
    label2id = {name: number for number, name in enumerate(names)}
    settings = {"num_labels": num_classes, "id2label": dict(enumerate(names)), "label2id": label2id}
    if kind == PartKind.SEQUENCE_CLASSIFICATION:
        regression = bool(loaded.task.get("regression_target")) or (num_classes == 1 and kind_of_label != "labels")
        several = "multi_label_classification" if kind_of_label == "labels" else "single_label_classification"
        settings["problem_type"] = "regression" if regression else several
    return settings


def encoder_weights(embedding: nn.Module, encoder: TransformerEncoder, num_layers: int | None = None) -> Weights:
    """Return token embeddings and the encoder with its first ``num_layers`` layers, by default all."""
    layers = range(num_layers or len(encoder.layers))
    weights = {
        name: tensor
        for name, tensor in state_of("encoder.", encoder).items()
        if not name.startswith("encoder.layers.") or int(name.split(".")[2]) in layers
    }
    return {"embed_tokens.weight": embedding.weight.detach()} | weights


def state_of(prefix: str, module: nn.Module) -> Weights:
    """Return the state of ``module``, floating point numbers in float32, each name with ``prefix``."""
    return {
        prefix + name: tensor.detach().to(torch.float32) if tensor.is_floating_point() else tensor
        for name, tensor in module.state_dict().items()
    }


def without_scale(prefix: str, head: Weights) -> Weights:
    """Return the weights of a head whose output layer has the mean and deviation of a regression's values in its weights."""
    bits = head.pop(f"{prefix}scale_bits", None)
    if bits is not None:
        mean, deviation = bits.view(torch.float64).tolist()
        weight, bias = head[f"{prefix}output.weight"], head[f"{prefix}output.bias"]
        head |= {f"{prefix}output.weight": weight * deviation, f"{prefix}output.bias": bias * deviation + mean}
    return head
