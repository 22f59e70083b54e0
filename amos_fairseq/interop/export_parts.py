"""What of a checkpoint is exported: the encoder, a masked language model (the generator up to a depth, or MLM's only
network), the discriminator, or a fine-tuned head.

Each part knows its weights under the names of :mod:`amos_fairseq.interop.hugging_face_tables` and what our own code makes of
tokens, which is what the exported model is compared with.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.errors import UserError
from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.interop.export_labels import label_settings
from amos_fairseq.interop.hugging_face import Weights
from amos_fairseq.interop.hugging_face_tables import (
    DETECTION,
    ENCODER,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFICATION,
)
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electra import ElectraModel
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.modules.encoder import EncoderShape, TransformerEncoder
from amos_fairseq.modules.heads import DenseDetectionHead, MlmHead
from amos_fairseq.modules.span_heads import IndependentSpanHead

# What --part names.
PARTS = ("encoder", "generator", "discriminator", "mlm")


@dataclass(frozen=True)
class Part:
    """One model to export.

    Attributes:
        kind: a part of the tables, which decides the class.
        shape: of its encoder.
        weights: ours, the vocabulary in our rows.
        outputs: tokens [B,T] in our ids -> what the exported class returns: states [B,T,D]; logits [B,T,dictionary size] of
            the masked language model; [B,T] "replaced"; [B, classes]; [B,T,2] start and end.
        description: in words.
        settings: of its configuration: labels, kind of problem.
        activation: of the objective's classification heads, tanh or gelu, by which a family is chosen.
        limits: what the model card says of it where that of its kind does not hold.
    """

    kind: str
    shape: EncoderShape
    weights: Weights
    outputs: Callable[[Tensor], Tensor]
    description: str
    settings: dict[str, Any] = field(default_factory=dict)
    activation: str = "tanh"
    limits: str = ""


def choose_part(
    pretrained: Pretrained,
    name: Optional[str] = None,
    depth: Optional[str] = None,
    labels: Optional[Sequence[str]] = None,
) -> Part:
    """The part that ``name`` says; without it a fine-tuned checkpoint's head, MLM's network with its head, or the encoder of
    any other pretraining.

    Args:
        pretrained: a checkpoint of ours.
        name: one of ``PARTS``.
        depth: of the generator, as the log keys name it; the deepest without it.
        labels: names of the classes of a fine-tuned head, in their order.

    Raises:
        UserError: the checkpoint has no such part, or no class of Hugging Face's computes it.
    """
    model = pretrained.model
    if depth is not None and name != "generator":
        raise UserError(f"--depth {depth} chooses a depth of the generator: give --part generator with it")
    has_classes = isinstance(model, FineTunedModel) and len(model.classification_heads) and name is None
    if labels is not None and not has_classes:
        raise UserError("--labels names the classes of a fine-tuned classification head, which is not exported here")
    if isinstance(model, FineTunedModel):
        return _fine_tuned_part(pretrained, model, name, labels)
    check_has_part(pretrained, name)
    if name == "mlm" or (name is None and isinstance(model, MlmModel)):
        return _mlm_part(pretrained, model)
    if name == "generator":
        return _generator_part(pretrained, depth)
    if name == "discriminator":
        return _discriminator_part(model)
    return _encoder_part(model)


def check_has_part(pretrained: Pretrained, name: Optional[str]) -> None:
    """:class:`UserError` where the objective of a pretrained model has no such part."""
    is_mlm = isinstance(pretrained.model, MlmModel)
    if is_mlm and name in ("generator", "discriminator"):
        raise UserError(f"{pretrained.file} is a masked language model and has no {name}: give --part mlm or encoder")
    if name == "mlm" and not is_mlm:
        raise UserError(f"{pretrained.file} is no mlm: its masked language model is --part generator")


def _encoder_part(model: nn.Module) -> Part:
    return Part(
        ENCODER, model.encoder.shape, _encoder_weights(model, model.encoder), model.extract_features, "the encoder",
        activation=str(model.cfg.pooler_activation_fn),
    )  # fmt: skip


def _generator_part(pretrained: Pretrained, depth: Optional[str]) -> Part:
    model = pretrained.model
    if not isinstance(model, (AmosModel, ElectraModel)):
        raise UserError(f"{pretrained.file} has no generator that a masked language model of Hugging Face's could be")
    if depth is not None and depth not in model.depth_names:
        raise UserError(f"--depth {depth} is no depth of this generator: it has {', '.join(model.depth_names)}")
    name = depth or model.depth_names[-1]
    encoder, head, num_layers = _generator_at(model, model.depth_names.index(name))
    return _masked_lm(pretrained, encoder, head, num_layers, f"the generator at depth {name}")


def _mlm_part(pretrained: Pretrained, model: MlmModel) -> Part:
    num_layers = len(model.transformer.layers)
    limits = "It guesses masked words. Its encoder can be fine-tuned: AutoModel and its relatives read this folder too."
    return _masked_lm(pretrained, model.transformer, model.mlm_head, num_layers, "the masked language model", limits)


def _masked_lm(
    pretrained: Pretrained,
    encoder: TransformerEncoder,
    head: MlmHead,
    num_layers: int,
    description: str,
    limits: str = "",
) -> Part:
    """The first ``num_layers`` layers under an MLM head."""
    model: PretrainingModel = pretrained.model
    num_tokens = len(pretrained.dictionary)

    def outputs(tokens: Tensor) -> Tensor:
        states = encoder(model.embed_tokens(tokens), tokens.eq(model.rows.pad))[num_layers - 1]
        return linear(head(states), model.embed_tokens.weight, head.bias)[..., :num_tokens]

    weights = _encoder_weights(model, encoder, num_layers) | _named("mlm_head.", head)
    shape = dataclasses.replace(encoder.shape, num_layers=num_layers)
    activation = str(model.cfg.pooler_activation_fn)
    return Part(MASKED_LM, shape, weights, outputs, description, activation=activation, limits=limits)


def _generator_at(model: AmosModel | ElectraModel, index: int) -> tuple[TransformerEncoder, MlmHead, int]:
    if isinstance(model, ElectraModel):
        return model.generator, model.mlm_head, len(model.generator.layers)
    encoder = model.generators[index] if model.cfg.separate_generators else model.generators[0]
    return encoder, model.head_of_depth[index], model.depths[index]


def _discriminator_part(model: nn.Module) -> Part:
    dense = isinstance(model.detection_head, DenseDetectionHead)
    if dense and model.encoder.relative_position is not None:
        raise UserError(
            "no class of Hugging Face's has a detection head of two layers on relative positions: export the encoder alone, "
            "with --part encoder"
        )
    weights = _encoder_weights(model, model.encoder) | _named("detection_head.", model.detection_head)
    return Part(
        PRETRAINING if dense else DETECTION,
        model.encoder.shape,
        weights,
        lambda tokens: model.detection_head(model.extract_features(tokens)),
        "the discriminator",
        {"id2label": {0: "original", 1: "replaced"}, "label2id": {"original": 0, "replaced": 1}},
        str(model.cfg.pooler_activation_fn),
    )


def _fine_tuned_part(
    pretrained: Pretrained, model: FineTunedModel, name: Optional[str], labels: Optional[Sequence[str]]
) -> Part:
    if name not in (None, "encoder"):
        raise UserError(f"{pretrained.file} was fine-tuned and has no {name} any more: give the pretraining checkpoint")
    if name == "encoder" or not (model.classification_heads or model.span_head):
        return _encoder_part(model)
    if model.span_head is not None:
        return _span_part(pretrained, model)
    if len(model.classification_heads) > 1:
        raise UserError(
            f"{pretrained.file} has several heads ({', '.join(model.classification_heads)}), a class of Hugging Face's one: "
            "export the encoder alone, with --part encoder"
        )
    (head_name, head) = next(iter(model.classification_heads.items()))
    weights = _encoder_weights(model, model.encoder) | _named("classification_head.", head)
    return Part(
        SEQUENCE_CLASSIFICATION,
        model.encoder.shape,
        weights,
        lambda tokens: model(tokens, classification_head_name=head_name)[0],
        "the encoder with its classification head",
        label_settings(pretrained, head.output.out_features, labels),
        str(model.cfg.pooler_activation_fn),
    )


def _span_part(pretrained: Pretrained, model: FineTunedModel) -> Part:
    if not isinstance(model.span_head, IndependentSpanHead):
        raise UserError(
            f"{pretrained.file} marks answers with a joint head, which no question answering class of Hugging Face's for "
            "these encoders has: fine-tune with the independent head, or export the encoder alone with --part encoder"
        )
    weights = _encoder_weights(model, model.encoder) | _named("span_head.", model.span_head)
    return Part(
        QUESTION_ANSWERING,
        model.encoder.shape,
        weights,
        lambda tokens: model.span_head.output(model.extract_features(tokens)),
        "the encoder with its head for answers",
        activation=str(model.cfg.pooler_activation_fn),
    )


def _encoder_weights(model: nn.Module, encoder: TransformerEncoder, num_layers: Optional[int] = None) -> Weights:
    """Token embeddings and the encoder's first ``num_layers`` layers."""
    kept = range(num_layers or len(encoder.layers))
    weights = {
        name: tensor
        for name, tensor in _named("encoder.", encoder).items()
        if not name.startswith("encoder.layers.") or int(name.split(".")[2]) in kept
    }
    return {"embed_tokens.weight": model.embed_tokens.weight.detach()} | weights


def _named(prefix: str, module: nn.Module) -> Weights:
    return {prefix + name: tensor.detach().to(torch.float32) for name, tensor in module.state_dict().items()}
