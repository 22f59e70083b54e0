"""The part of a checkpoint that ``amos export`` writes: the encoder, or a network with its head."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.config import DETECTION_LABELS, MPNET_BUCKETS, MPNET_MAX_DISTANCE
from amos_fairseq.hugging_face.weights import CUSTOM, DEBERTA_V2, Head, Weights, class_name
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import POOLER, PretrainingModel
from amos_fairseq.models.teams import TeamsModel
from amos_fairseq.modules.deberta_encoder import DebertaEncoderConfig
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder
from amos_fairseq.modules.heads import DenseDetectionHead
from amos_fairseq.modules.modern_encoder import ModernBertEncoderConfig
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer

PAIR = "pair"  # generator and discriminator of DeBERTaV3, in the form of its authors
# Of a head for texts, by the kind of its outputs.
_PROBLEM_TYPES = {
    "classes": "single_label_classification",
    "labels": "multi_label_classification",
    "number": "regression",
}


@dataclass(frozen=True)
class Part:
    """One model to export: token embeddings, an encoder, and a head or none.

    Attributes:
        module: of the head.
        logits: of the head, from the states [B,T,D] and a mask of padding [B,T]; None for the states themselves.
        settings: for its configuration: labels, type of problem.
        family: of the exported class.
        reads_mean: whether its head is on the mean of the states, which no class of transformers but ModernBERT's has.
        pooler: of an imported BERT, for this class.
        token_types: those that a fine-tuned model derives from tokens [B,T], if its encoder has any.
    """

    head: Head
    description: str
    embedding: nn.Embedding
    encoder: TransformerEncoder
    pad: int
    module: nn.Module | None = None
    logits: Callable[[Tensor, Tensor], Tensor] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    family: str = ""
    reads_mean: bool = False
    pooler: Weights = field(default_factory=dict)
    token_types: Callable[[Tensor], Tensor | None] = lambda tokens: None

    @property
    def shape(self) -> TransformerConfig:
        return self.encoder.shape

    @property
    def class_name(self) -> str:
        return ("Mean" if self.reads_mean else "") + class_name(self.family, self.head)

    @property
    def code(self) -> str:
        """The module of :mod:`.custom_code` with its class; empty for a class of transformers."""
        return "modeling_amos" if self.family == CUSTOM else "modeling_mean" if self.reads_mean else ""

    @property
    def model_class(self) -> Any:
        module = f"{custom_code.__name__}.{self.code}" if self.code else "transformers"
        return getattr(import_module(module), self.class_name)

    @property
    def labels(self) -> list[str]:
        """Names of the classes in their order; none of a part without classes."""
        return list(self.settings.get("id2label", {}).values())

    @cached_property
    def weights(self) -> Weights:
        """All weights, under our names of :mod:`.weights`, the vocabulary in our rows."""
        weights = (
            {"embed_tokens.weight": self.embedding.weight.detach()} | state_of("encoder.", self.encoder) | self.pooler
        )
        return weights if self.module is None else weights | state_of(self.head.prefix, self.module)

    def outputs(self, tokens: Tensor) -> Tensor:
        """Compute with our own code what the exported class returns for tokens [B,T] in our ids: the states [B,T,D] of a bare
        encoder; logits [B,T,rows] of the masked language model; [B,T] of "replaced"; [B,classes]; [B,T,2] of start and end;
        [B,T,labels]."""
        padding_mask = tokens.eq(self.pad)
        states = self.encoder(self.embedding(tokens), padding_mask, token_types=self.token_types(tokens))[-1]
        return states if self.logits is None else self.logits(states, padding_mask)


def parts_of(model: nn.Module) -> list[str]:
    if not isinstance(model, PretrainingModel):
        return ["encoder"]
    if isinstance(model, MlmModel):
        return ["encoder", "mlm"]
    return ["encoder", "generator", "discriminator", *[PAIR] * is_pair(model)]


def is_pair(model: nn.Module) -> bool:
    """Return whether the model is DeBERTaV3's: a generator with a mask decoder, and the discriminator's own difference."""
    generator = getattr(model, "generator", None)
    return getattr(generator, "decoder_positions", None) is not None and model.disentangled_embedding is not None


def choose_part(loaded: LoadedCheckpoint, name: str | None = None, head: str | None = None) -> Part:
    """Return a part of a checkpoint, in the family of classes that is closest to it.

    Args:
        name: encoder, generator, discriminator or mlm; None: a fine-tuned checkpoint's head with its encoder (of several heads
            ``head``, or the encoder alone), the network of MLM with its head, or the encoder of any other pretraining.
        head: name of a task or column.
    """
    model, parts = loaded.model, parts_of(loaded.model)
    if name not in (None, *parts):
        raise UserError(f"--part {name}: {loaded.file} has the parts {', '.join(parts)}")
    if head is not None or (name is None and not isinstance(model, PretrainingModel)):
        part = fine_tuned_part(loaded, head)
    elif name in ("generator", "mlm") or (name is None and "mlm" in parts and "mlm_head" not in loaded.is_new):
        part = generator_part(loaded)
    elif name == "discriminator":
        part = discriminator_part(loaded)
    else:
        part = encoder_part(model)
    part = dataclasses.replace(part, family=family_of(loaded, part))
    if part.family == "bert" and part.encoder is model.encoder and part.head in (Head.NONE, Head.MASKED_LM):
        return dataclasses.replace(part, pooler={name: b for name, b in model.named_buffers() if name in POOLER})
    return part


def refuse(loaded: LoadedCheckpoint, what: str) -> NoReturn:
    raise UserError(f"{loaded.file} {what}: export the encoder (--part encoder)")


def refuse_random(loaded: LoadedCheckpoint, *heads: str) -> None:
    if new := loaded.is_new.intersection(heads):
        refuse(loaded, f"was imported without {min(new)}, which is random until the model is trained")


def encoder_part(model: nn.Module) -> Part:
    """Return the encoder that fine-tuning would use, or has used."""
    part = Part(Head.NONE, "the encoder", model.encoder_embedding, model.encoder, model.vocabulary.pad)
    return part if isinstance(model, PretrainingModel) else dataclasses.replace(part, token_types=model.token_types)


def generator_part(loaded: LoadedCheckpoint) -> Part:
    """Return the network of MLM, or the deepest generator, with its MLM head."""
    model = loaded.model
    refuse_random(loaded, "mlm_head", "mlm_heads")
    if file := getattr(model.cfg, "generator_checkpoint", ""):
        refuse(loaded, f"was not trained together with its generator, which is {file}")
    if isinstance(model, AmosModel):
        encoder, module = model.generators[-1], model.head_of_depth[-1]
    elif (encoder := getattr(model, "mlm_encoder", None)) is not None:
        module = model.mlm_head
    else:  # two towers, or a generator without input
        refuse(loaded, "has no generator with a network that a masked language model can represent")
    is_generator, embedding = not isinstance(model, MlmModel), model.generator_embedding

    def logits(states: Tensor, padding_mask: Tensor) -> Tensor:
        return linear(module(states), embedding.weight, module.bias)

    description = f"the generator at depth {model.depth_names[-1]}" if is_generator else "the masked language model"
    return Part(Head.MASKED_LM, description, embedding, encoder, model.vocabulary.pad, module, logits)


def discriminator_part(loaded: LoadedCheckpoint) -> Part:
    """Return the discriminator with its detection head, or Electric's with the head of its energies."""
    model = loaded.model
    refuse_random(loaded, "detection_head")
    module = getattr(model, "detection_head", None)
    if module is None:
        refuse(loaded, "has no detection head")
    encoder = model.encoder
    if isinstance(model, TeamsModel):
        if model.rtd_ffn is not None:
            refuse(loaded, "detects by a network on top of its encoder (--task-heads ffn), which no class computes")
        encoder = model.detection_encoder
    head, settings, description = Head.PRETRAINING, {}, "the discriminator"
    if not isinstance(module, DenseDetectionHead):
        # Names for this head alone: of the others, which have one logit, a pipeline would build a random classifier.
        head, settings = Head.DETECTION, _named_classes(DETECTION_LABELS)
    elif encoder.shape.has_learned_bias:
        refuse(loaded, "has a detection head of two layers on relative positions, which no class computes")
    if isinstance(model, ElectricModel) and model.variant == "electric":
        head, settings, description = Head.ENERGY, {}, "the energies of tokens"
    embedding, pad = model.encoder_embedding, model.vocabulary.pad
    return Part(head, description, embedding, encoder, pad, module, lambda states, _: module(states), settings)


def fine_tuned_part(loaded: LoadedCheckpoint, task: str | None) -> Part:
    """Return the encoder with its only head or that of ``task``; without a head if there is none, or no choice of several."""
    model = loaded.model
    heads = {outputs.name or head: head for head, outputs in loaded.heads.items()}
    if task not in (None, *heads):
        raise UserError(f"--head {task}: {loaded.file} has no head of this name: it has {', '.join(heads) or 'none'}")
    if task is None and len(heads) > 1:
        return encoder_part(model)
    name = next(iter(heads.values()), None) if task is None else heads[task]
    try:
        exported = model.exported_head(name)
    except ValueError as error:
        refuse(loaded, f"was fine-tuned with {error}, which no Hugging Face class computes")
    if exported is None:
        return encoder_part(model)
    head, settings = Head[exported.kind.upper()], exported.settings
    if name is not None:
        number = model.heads[name].num_outputs
        outputs = loaded.heads[name]
        labels = outputs.labels or [f"LABEL_{index}" for index in range(number)]
        if outputs.kind == "number" and outputs.name:
            labels = [outputs.name]
        settings = settings | {"num_labels": number} | _named_classes(labels)
    if head == Head.SEQUENCE_CLASSIFICATION:
        settings["problem_type"] = _PROBLEM_TYPES[loaded.heads[name].kind]
    elif head == Head.TOKEN_CLASSIFICATION and isinstance(loaded.tokenizer, FastTokenizer):  # others have no offsets
        words = {"kind": outputs.kind, "raw_text": outputs.raw_text, "signs": outputs.signs}
        settings |= {"words": words | {"whole": sorted(outputs.whole)}, "custom_pipelines": custom_code.SPANS_PIPELINE}
    description = exported.description if task is None else f"the head of {task}"
    return dataclasses.replace(
        encoder_part(model),
        head=head,
        module=exported.module,
        logits=exported.outputs,
        description=f"the encoder with {description}",
        settings=settings,
        reads_mean=exported.reads_mean,
    )


def family_of(loaded: LoadedCheckpoint, part: Part) -> str:
    """Return the family of classes that computes a part, the closest of several."""
    head, shape, projected = part.head, part.shape, part.shape.is_projected  # only ELECTRA projects its embeddings
    activation = str(loaded.model.cfg.pooler_activation_fn)  # of classification heads; "linear": no dense layer
    if isinstance(shape, DebertaEncoderConfig):
        if head == Head.MASKED_LM:
            refuse(
                loaded, "predicts masked tokens on DeBERTaV3, for which transformers has no class with a mask decoder"
            )
        if head in (Head.PRETRAINING, Head.ENERGY):
            pair = f" but in the form of its authors (--part {PAIR})" if is_pair(loaded.model) else ""
            refuse(loaded, f"has a detection head on DeBERTaV3 that no class has{pair}")
        if projected or shape.position_max_distance < shape.max_positions:
            refuse(
                loaded,
                "has narrower embeddings, or distances beyond its maximum, which transformers computes otherwise",
            )
        return DEBERTA_V2
    if isinstance(shape, ModernBertEncoderConfig):
        if projected or head == Head.ENERGY:
            refuse(loaded, "has energies of tokens or narrower embeddings, which Hugging Face's ModernBERT has not")
        return "modernbert"
    if shape.position_scheme == "amos":
        return CUSTOM
    if shape.position_scheme == "t5":
        here = (shape.position_buckets, shape.position_max_distance, shape.num_token_types, projected)
        if here != (MPNET_BUCKETS, MPNET_MAX_DISTANCE, 0, False):
            sizes = f"{MPNET_BUCKETS} buckets and a maximum distance of {MPNET_MAX_DISTANCE}"
            refuse(
                loaded,
                f"has other t5 positions, token types or embeddings than Hugging Face's MPNet, which has {sizes}",
            )
        return "mpnet"
    if head == Head.SEQUENCE_CLASSIFICATION and activation == "tanh":
        if projected:
            refuse(loaded, "has tanh in its classification head and narrower embeddings, which no class has")
        return "bert"
    return "electra" if projected or activation == "gelu" or head in (Head.PRETRAINING, Head.ENERGY) else "bert"


def _named_classes(names: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def state_of(prefix: str, module: nn.Module) -> Weights:
    """Return the state of ``module``, floating point numbers in float32, each name with ``prefix``.

    The output layer of a head for a regression gets the mean and deviation of its values into its weights.
    """
    state = {name: each.float() if each.is_floating_point() else each for name, each in module.state_dict().items()}
    if (bits := state.pop("scale_bits", None)) is not None:
        mean, deviation = bits.view(torch.float64).tolist()
        state["output.bias"] = state["output.bias"] * deviation + mean
        state["output.weight"] = state["output.weight"] * deviation
    return {prefix + name: tensor for name, tensor in state.items()}
