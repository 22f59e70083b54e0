"""The part of a checkpoint that ``amos export`` writes: the encoder, or a network with its head.

A :class:`Part` has its weights under the names of :mod:`amos_fairseq.hugging_face.weights`, and a function that computes its
outputs with our own code, which the exported model is compared with.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.checkpoints.weight_names import Weights
from amos_fairseq.data.tagging import are_labels, read_labels
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.weights import (
    DETECTION,
    DETECTION_LABELS,
    ENCODER,
    ENERGY,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
)
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.models.teams import TeamsModel
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder, with_last_layer
from amos_fairseq.modules.heads import DenseDetectionHead, MlmHead
from amos_fairseq.modules.span_heads import IndependentSpanHead
from amos_fairseq.strangers import read_json

TASK_FILE = "task.json"  # written by preprocess/glue


@dataclass(frozen=True)
class Part:
    """One model to export.

    Attributes:
        kind: one of the parts in :mod:`amos_fairseq.hugging_face.weights`; it determines the class.
        shape: of its encoder.
        weights: ours, the vocabulary in our rows.
        outputs: tokens [B,T] in our ids -> what the exported class returns: states [B,T,D]; logits [B,T,dictionary size] of
            the masked language model; [B,T] logits of "replaced"; [B, classes]; [B,T,2] start and end; [B,T,labels].
        settings: for its configuration: labels, kind of problem.
        limits: for the model card, instead of the text for its kind.
    """

    kind: str
    shape: TransformerConfig
    weights: Weights
    outputs: Callable[[Tensor], Tensor]
    description: str
    settings: dict[str, Any] = field(default_factory=dict)
    limits: str = ""


def choose_part(
    loaded: LoadedCheckpoint, name: str | None = None, depth: str | None = None, labels: Sequence[str] | None = None
) -> Part:
    """Return the part called ``name``, or by default a fine-tuned checkpoint's head with its encoder, the network of MLM with
    its head, or the encoder of any other pretraining.

    Args:
        name: encoder, generator, discriminator or mlm.
        depth: of the generator, as in the log keys; the default is the deepest.
        labels: names of the classes of a fine-tuned head, in their order.

    Raises:
        UserError: the checkpoint has no such part, or no Hugging Face class computes it.
    """
    model = loaded.model
    if depth is not None and name != "generator":
        raise UserError(f"--depth {depth} chooses a depth of the generator: give --part generator with it")
    is_fine_tuned = isinstance(model, FineTunedModel)
    has_classes = is_fine_tuned and name is None and (len(model.classification_heads) or model.tagging_head)
    if labels is not None and not has_classes:
        raise UserError("--labels names the classes of a fine-tuned classification head, which is not exported here")
    if is_fine_tuned:
        return fine_tuned_part(loaded, model, name, labels)
    is_mlm = isinstance(model, MlmModel)
    if is_mlm and name in ("generator", "discriminator"):
        raise UserError(f"{loaded.file} is a masked language model and has no {name}: give --part mlm or encoder")
    if name == "mlm" and not is_mlm:
        raise UserError(f"{loaded.file} is not an mlm: its masked language model is --part generator")
    if name == "mlm" or (name is None and is_mlm):
        return mlm_part(loaded, model)
    if name == "generator":
        return generator_part(loaded, depth)
    if name == "discriminator":
        return discriminator_part(loaded)
    return encoder_part(model)


def encoder_part(model: nn.Module) -> Part:
    """Return the encoder that fine-tuning would use."""
    weights = encoder_weights(model.embed_tokens, model.encoder)
    return Part(ENCODER, model.encoder.shape, weights, model.extract_features, "the encoder")


def mlm_part(loaded: LoadedCheckpoint, model: MlmModel) -> Part:
    """Return the single network of MLM with its head."""
    num_layers = len(model.transformer.layers)
    limits = "It predicts masked words. Its encoder can be fine-tuned: AutoModel and its variants load this folder too."
    return _masked_lm(loaded, model.transformer, model.mlm_head, num_layers, "the masked language model", limits)


def generator_part(loaded: LoadedCheckpoint, depth: str | None) -> Part:
    """Return the generator up to ``depth``, by default the deepest; raise :class:`UserError` if no class computes it."""
    model = loaded.model
    if depth is not None and depth not in model.depth_names:
        raise UserError(f"--depth {depth} is not a depth of this generator: it has {', '.join(model.depth_names)}")
    name = depth or model.depth_names[-1]
    if isinstance(model, AmosModel):
        index = model.depth_names.index(name)
        encoder = model.generators[index] if model.cfg.separate_generators else model.generators[0]
        head, num_layers = model.head_of_depth[index], model.depths[index]
    elif isinstance(getattr(model, "generator", None), TransformerEncoder):  # of ELECTRA and TEAMS; not two towers
        encoder, head, num_layers = model.generator, model.mlm_head, len(model.generator.layers)
    else:
        raise UserError(f"{loaded.file} has no generator that a masked language model of Hugging Face can represent")
    return _masked_lm(loaded, encoder, head, num_layers, f"the generator at depth {name}")


def _masked_lm(
    loaded: LoadedCheckpoint,
    encoder: TransformerEncoder,
    head: MlmHead,
    num_layers: int,
    description: str,
    limits: str = "",
) -> Part:
    """Return the first ``num_layers`` layers with an MLM head."""
    model: PretrainingModel = loaded.model
    embedding = model.generator_embedding
    num_tokens = len(loaded.dictionary)

    def outputs(tokens: Tensor) -> Tensor:
        states = encoder(embedding(tokens), tokens.eq(model.vocabulary.pad))[num_layers - 1]
        return linear(head(states), embedding.weight, head.bias)[..., :num_tokens]

    weights = encoder_weights(embedding, encoder, num_layers) | state_of("mlm_head.", head)
    shape = dataclasses.replace(encoder.shape, num_layers=num_layers)
    return Part(MASKED_LM, shape, weights, outputs, description, limits=limits)


def discriminator_part(loaded: LoadedCheckpoint) -> Part:
    """Return the discriminator with its detection head, or Electric's with the head of its energies.

    Raises :class:`UserError` if there is none, or no Hugging Face class computes it.
    """
    model = loaded.model
    head = getattr(model, "detection_head", None)
    if head is None or (isinstance(model, TeamsModel) and model.rtd_ffn is not None):
        reason = (
            "has no detection head" if head is None else "detects by a network on top of its encoder (--task-heads ffn)"
        )
        raise UserError(f"{loaded.file} {reason}: export the encoder alone, with --part encoder")
    encoder = detection_encoder(model)
    dense = isinstance(head, DenseDetectionHead)
    if dense and encoder.relative_position is not None:
        raise UserError(
            "no Hugging Face class has a detection head of two layers on relative positions: export the encoder alone, "
            "with --part encoder"
        )
    is_energy = isinstance(model, ElectricModel) and model.variant == "electric"
    kind = ENERGY if is_energy else PRETRAINING if dense else DETECTION
    settings: dict[str, Any] = {}
    if kind == DETECTION:  # the others have one logit, and a random classifier must not get these names
        settings = {"id2label": DETECTION_LABELS, "label2id": {label: i for i, label in DETECTION_LABELS.items()}}
    return Part(
        kind, encoder.shape, encoder_weights(model.embed_tokens, encoder) | state_of("detection_head.", head),
        lambda tokens: head(encoder(model.embed_tokens(tokens), tokens.eq(model.vocabulary.pad))[-1]),
        "the energies of tokens" if is_energy else "the discriminator", settings,
    )  # fmt: skip


def detection_encoder(model: nn.Module) -> TransformerEncoder:
    """Return the encoder below the detection head; for TEAMS the branch of that task, whichever fine-tuning would use."""
    if not isinstance(model, TeamsModel):
        return model.encoder
    own_layer = getattr(model, "rtd_layer", None)
    return model.discriminator if own_layer is None else with_last_layer(model.discriminator, own_layer)


def fine_tuned_part(
    loaded: LoadedCheckpoint, model: FineTunedModel, name: str | None, labels: Sequence[str] | None
) -> Part:
    """Return the encoder with its head, or alone if ``name`` says so; arguments and errors as for :func:`choose_part`."""
    if name not in (None, "encoder"):
        raise UserError(f"{loaded.file} was fine-tuned and has no {name} any more: give the pretraining checkpoint")
    if name == "encoder" or not (model.classification_heads or model.span_head or model.tagging_head):
        return encoder_part(model)
    if model.span_head is not None:
        return _span_part(loaded, model)
    if model.tagging_head is not None:
        return _tagging_part(loaded, model, labels)
    if len(model.classification_heads) > 1:
        raise UserError(
            f"{loaded.file} has several heads ({', '.join(model.classification_heads)}), a Hugging Face class has one: "
            "export the encoder alone, with --part encoder"
        )
    (head_name, head) = next(iter(model.classification_heads.items()))
    weights = encoder_weights(model.embed_tokens, model.encoder) | state_of("classification_head.", head)
    return Part(
        SEQUENCE_CLASSIFICATION, model.encoder.shape, weights,
        lambda tokens: model(tokens, classification_head_name=head_name)[0], "the encoder with its classification head",
        label_settings(loaded, head.output.out_features, labels),
    )  # fmt: skip


def _span_part(loaded: LoadedCheckpoint, model: FineTunedModel) -> Part:
    if not isinstance(model.span_head, IndependentSpanHead):
        raise UserError(
            f"{loaded.file} marks answers with a joint head, which no Hugging Face question answering class for "
            "these encoders has: fine-tune with the independent head, or export the encoder alone with --part encoder"
        )
    weights = encoder_weights(model.embed_tokens, model.encoder) | state_of("span_head.", model.span_head)
    return Part(
        QUESTION_ANSWERING, model.encoder.shape, weights,
        lambda tokens: model.span_head.output(model.extract_features(tokens)), "the encoder with its head for answers",
    )  # fmt: skip


def _tagging_part(loaded: LoadedCheckpoint, model: FineTunedModel, labels: Sequence[str] | None) -> Part:
    weights = encoder_weights(model.embed_tokens, model.encoder) | state_of("tagging_head.", model.tagging_head)
    settings = label_settings(loaded, model.tagging_head.output.out_features, labels)
    del settings["problem_type"]  # of sequence classification
    return Part(
        TOKEN_CLASSIFICATION, model.encoder.shape, weights,
        lambda tokens: model.tagging_head(model.extract_features(tokens)), "the encoder with its head for labels of words",
        settings,
    )  # fmt: skip


def label_settings(loaded: LoadedCheckpoint, num_classes: int, labels: Sequence[str] | None) -> dict[str, Any]:
    """Return settings of the exported configuration: names of the classes, and the kind of problem.

    The names are ``labels``, else those in the data of the task if it is still there, else ``LABEL_0``, ``LABEL_1``, ...

    Raises:
        UserError: there are more or fewer labels than classes, or two are equal.
    """
    names = list(labels or labels_of_task(loaded, num_classes))
    if len(names) != num_classes or len(set(names)) != num_classes:
        raise UserError(
            f"--labels needs {num_classes} different names, one per class in their order; got {', '.join(names)}"
        )
    regression = bool(loaded.task.get("regression_target")) or num_classes == 1
    return {
        "num_labels": num_classes,
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "regression" if regression else "single_label_classification",
    }


def labels_of_task(loaded: LoadedCheckpoint, num_classes: int) -> list[str]:
    """Return the labels in the ``task.json`` of the task's data, or for labels of words in ``labels.txt`` beside the
    checkpoint, if the file exists and has as many as the head, else numbers."""
    numbered = [f"LABEL_{number}" for number in range(num_classes)]
    if loaded.model.tagging_head is not None:
        labels = read_labels(loaded.file.parent)
        return labels if len(labels) == num_classes else numbered
    path = Path(str(loaded.task.get("data", ""))) / TASK_FILE
    hint = "it does not name the labels of the task, give them with --labels A,B,..."
    labels = (read_json(path, hint, optional=True) or {}).get("labels") or []
    if labels and not are_labels(labels):
        raise UserError(f"{path} has no list of different labels: {hint}")
    return labels if len(labels) == num_classes else numbered


def encoder_weights(embedding: nn.Embedding, encoder: TransformerEncoder, num_layers: int | None = None) -> Weights:
    """Return token embeddings and the encoder with its first ``num_layers`` layers, by default all."""
    layers = range(num_layers or len(encoder.layers))
    weights = {
        name: tensor
        for name, tensor in state_of("encoder.", encoder).items()
        if not name.startswith("encoder.layers.") or int(name.split(".")[2]) in layers
    }
    return {"embed_tokens.weight": embedding.weight.detach()} | weights


def state_of(prefix: str, module: nn.Module) -> Weights:
    """Return the state of ``module`` in float32, each name with ``prefix``."""
    return {prefix + name: tensor.detach().to(torch.float32) for name, tensor in module.state_dict().items()}
