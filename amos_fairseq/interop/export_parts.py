"""What is exported of a checkpoint: its encoder alone, or with a fine-tuned head.

Each part knows its weights under the names of :mod:`amos_fairseq.interop.hugging_face_tables` and what our own code makes of
tokens, which is what the exported model is compared with.
"""

from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.interop.export_labels import label_settings
from amos_fairseq.interop.hugging_face import Weights
from amos_fairseq.interop.hugging_face_tables import ENCODER, QUESTION_ANSWERING, SEQUENCE_CLASSIFICATION
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder
from amos_fairseq.modules.span_heads import IndependentSpanHead


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
    shape: TransformerConfig
    weights: Weights
    outputs: Callable[[Tensor], Tensor]
    description: str
    settings: dict[str, Any] = field(default_factory=dict)
    activation: str = "tanh"
    limits: str = ""


def encoder_part(model: nn.Module) -> Part:
    """The encoder that is kept."""
    return Part(
        ENCODER, model.encoder.shape, encoder_weights(model.embed_tokens, model.encoder), model.extract_features, "the encoder",
        activation=str(model.cfg.pooler_activation_fn),
    )  # fmt: skip


def fine_tuned_part(
    pretrained: Pretrained, model: FineTunedModel, name: Optional[str], labels: Optional[Sequence[str]]
) -> Part:
    """The encoder with its head, or, by ``name``, alone; arguments and errors of :func:`.export_choice.choose_part`."""
    if name not in (None, "encoder"):
        raise UserError(f"{pretrained.file} was fine-tuned and has no {name} any more: give the pretraining checkpoint")
    if name == "encoder" or not (model.classification_heads or model.span_head):
        return encoder_part(model)
    if model.span_head is not None:
        return _span_part(pretrained, model)
    if len(model.classification_heads) > 1:
        raise UserError(
            f"{pretrained.file} has several heads ({', '.join(model.classification_heads)}), a class of Hugging Face's one: "
            "export the encoder alone, with --part encoder"
        )
    (head_name, head) = next(iter(model.classification_heads.items()))
    weights = encoder_weights(model.embed_tokens, model.encoder) | named("classification_head.", head)
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
    weights = encoder_weights(model.embed_tokens, model.encoder) | named("span_head.", model.span_head)
    return Part(
        QUESTION_ANSWERING,
        model.encoder.shape,
        weights,
        lambda tokens: model.span_head.output(model.extract_features(tokens)),
        "the encoder with its head for answers",
        activation=str(model.cfg.pooler_activation_fn),
    )


def encoder_weights(embedding: nn.Embedding, encoder: TransformerEncoder, num_layers: Optional[int] = None) -> Weights:
    """Token embeddings and the encoder's first ``num_layers`` layers."""
    kept = range(num_layers or len(encoder.layers))
    weights = {
        name: tensor
        for name, tensor in named("encoder.", encoder).items()
        if not name.startswith("encoder.layers.") or int(name.split(".")[2]) in kept
    }
    return {"embed_tokens.weight": embedding.weight.detach()} | weights


def named(prefix: str, module: nn.Module) -> Weights:
    """The state of ``module`` in float32, each name behind ``prefix``."""
    return {prefix + name: tensor.detach().to(torch.float32) for name, tensor in module.state_dict().items()}
