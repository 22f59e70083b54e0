"""The part of a checkpoint that ``amos export`` writes: the encoder, or a network with its head."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from textwrap import shorten
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.downstream.labeled_task import (
    TASK_FILE,
    TASK_FOLDER,
    are_labels,
    are_trained_labels,
    check_labels,
    fingerprint_of_labels,
)
from amos_fairseq.downstream.model import TEXT_HEAD, FineTunedModel, scale_of
from amos_fairseq.downstream.spans.task import IndependentSpanHead, SpanModel
from amos_fairseq.downstream.words.dataset import LABELS_FILE, OF_WORDS, column_of, read_labels, word_head_name
from amos_fairseq.downstream.words.model import WordModel
from amos_fairseq.downstream.words.parsing_model import ParsingModel
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face.config import DETECTION_LABELS, MPNET_BUCKETS, MPNET_MAX_DISTANCE
from amos_fairseq.hugging_face.weights import CUSTOM, Head, Weights, class_name
from amos_fairseq.inputs.labels import KINDS
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import BROUGHT_ALONG, SENTENCE_FILES
from amos_fairseq.models.teams import TeamsModel
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder, with_layers
from amos_fairseq.modules.heads import DenseDetectionHead
from amos_fairseq.modules.modern_encoder import ModernBertEncoderConfig
from amos_fairseq.output.terminal import say
from amos_fairseq.strangers import read_json

_CONSTANT = 1e-3  # relative to the largest state; the states of random weights differ by about 1
_SENTENCE_LIMITS = (
    "sentence-transformers pools its states as those of the model that was imported. Further pretraining changes what "
    "similarities mean: measure them before use."
)


@dataclass(frozen=True)
class Part:
    """One model to export: token embeddings, an encoder, and a head or none.

    Attributes:
        module: of the head.
        settings: for its configuration: labels, type of problem.
        limits: for the model card, instead of the text for its head.
        family: of the exported class.
        pooler, sentence_files: what an imported model brought along for this class, see
            :class:`~amos_fairseq.models.pretraining.PretrainingModel`.
        token_types: those that a fine-tuned model derives from tokens [B,T], if its encoder has any.
    """

    head: Head
    description: str
    embedding: nn.Embedding
    encoder: TransformerEncoder
    pad: int
    module: nn.Module | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    limits: str = ""
    family: str = ""
    pooler: Weights = field(default_factory=dict)
    sentence_files: Tensor | None = None
    token_types: Callable[[Tensor], Tensor | None] = lambda tokens: None

    @property
    def shape(self) -> TransformerConfig:
        return self.encoder.shape

    @property
    def class_name(self) -> str:
        return class_name(self.family, self.head)

    @property
    def labels(self) -> list[str]:
        """Names of the classes in their order; none of a part without classes."""
        return list(self.settings.get("id2label", {}).values())

    @cached_property
    def weights(self) -> Weights:
        """All weights, under our names of :mod:`.weights`, the vocabulary in our rows."""
        weights = (
            {"embed_tokens.weight": self.embedding.weight.detach()} | _state("encoder.", self.encoder) | self.pooler
        )
        return weights if self.module is None else weights | _state(self.head.prefix, self.module)

    def outputs(self, tokens: Tensor) -> Tensor:
        """Compute with our own code what the exported class returns for tokens [B,T] in our ids: the states [B,T,D] of a bare
        encoder; logits [B,T,rows] of the masked language model; [B,T] of "replaced"; [B,classes]; [B,T,2] of start and end;
        [B,T,labels]."""
        padding_mask = tokens.eq(self.pad)
        states = self.encoder(self.embedding(tokens), padding_mask, token_types=self.token_types(tokens))[-1]
        if self.module is None:
            return states
        if self.head == Head.MASKED_LM:
            return linear(self.module(states), self.embedding.weight, self.module.bias)
        if self.head == Head.QUESTION_ANSWERING:  # without the mask of answers
            return self.module.logits(states)
        of_text = self.head in (Head.SEQUENCE_CLASSIFICATION, Head.POOLED_CLASSIFICATION)
        return self.module(states, padding_mask) if of_text else self.module(states)


@dataclass(frozen=True)
class Choice:
    """What to export of a checkpoint.

    Attributes:
        part: encoder, generator, discriminator or mlm; None: a fine-tuned checkpoint's head with its encoder (of several heads
            ``head``, or the encoder alone), the network of MLM with its head, or the encoder of any other pretraining.
        depth: of the generator; the default is the deepest.
        family: mpnet, electra, bert or roberta, if several can represent the part; the default is the closest.
        labels: names of the classes of a fine-tuned head.
        head: name of one of several heads; ALL writes a folder for each.
    """

    part: str | None = None
    depth: str | None = None
    family: str | None = None
    labels: Sequence[str] | None = None
    head: str | None = None


def choose_part(loaded: LoadedCheckpoint, choice: Choice) -> Part:
    model, name, head, family = loaded.model, choice.part, choice.head, choice.family
    is_fine_tuned, is_mlm = isinstance(model, FineTunedModel), isinstance(model, MlmModel)
    names = ["encoder"]
    if not is_fine_tuned:
        names += ["mlm"] if is_mlm else ["generator", "discriminator"]
    if name not in (None, *names):
        raise UserError(f"--part {name}: {loaded.file} has none: it has {', '.join(names)}")
    if choice.depth is not None and name != "generator":
        raise UserError(f"--depth {choice.depth} chooses a depth of the generator: give --part generator with it")
    if head is not None or (is_fine_tuned and name is None):
        part = fine_tuned_part(loaded, choice.labels, head)
    elif name in ("generator", "mlm") or (is_mlm and name is None and "mlm_head" not in loaded.is_new):
        part = generator_part(loaded, choice.depth)
    elif name == "discriminator":
        part = discriminator_part(loaded)
    else:
        of_head = "It was fine-tuned with a head that is not in this folder."
        part = encoder_part(model, of_head if is_fine_tuned and model.layer_mixture is None else "")
    if choice.labels is not None and not part.labels:
        raise UserError("--labels names the classes of a fine-tuned head, which is not exported here")
    possible = families_of(part.head, part.shape, str(model.cfg.pooler_activation_fn))
    if family not in (None, *possible):
        raise UserError(f"--as {family}: {part.description} of this checkpoint can be {' or '.join(possible)}")
    part = dataclasses.replace(part, family=family or possible[0])
    if part.encoder is not model.encoder or part.head not in (Head.NONE, Head.MASKED_LM):
        return part
    brought = {name: tensor for name, tensor in model.named_buffers() if name in BROUGHT_ALONG}
    files = brought.pop(SENTENCE_FILES, None)
    limits = part.limits if files is None else _SENTENCE_LIMITS
    return dataclasses.replace(
        part, pooler=brought if part.family == "bert" else {}, sentence_files=files, limits=limits
    )


def heads_of_tasks(model: nn.Module) -> list[str]:
    """Return the names of the heads of a model of several tasks; a head for words has the name of its column."""
    texts, words = getattr(model, "classification_heads", ()), getattr(model, "word_heads", ())
    return [name for name in texts if name != TEXT_HEAD] + [column_of(name) for name in words if len(words) > 1]


def refuse(loaded: LoadedCheckpoint, what: str) -> NoReturn:
    raise UserError(f"{loaded.file} {what}: no Hugging Face class computes that, export the encoder (--part encoder)")


def refuse_random(loaded: LoadedCheckpoint, *heads: str) -> None:
    if new := loaded.is_new.intersection(heads):
        raise UserError(
            f"{loaded.file} was imported without {min(new)}, which is random: train the model first, or export the encoder "
            "(--part encoder)"
        )


def encoder_part(model: nn.Module, limits: str = "") -> Part:
    """Return the encoder that fine-tuning would use, or has used."""
    part = Part(Head.NONE, "the encoder", model.encoder_embedding, model.encoder, model.vocabulary.pad, limits=limits)
    if not isinstance(model, FineTunedModel):
        return part
    if model.layer_mixture is not None and not limits:
        limits = (
            "It was fine-tuned with a head that read a learned mixture of all layers, which is not in this folder: its output "
            "is the last layer alone."
        )
    return dataclasses.replace(part, token_types=model.token_types, limits=limits)


def generator_part(loaded: LoadedCheckpoint, depth: str | None) -> Part:
    """Return the network of MLM, or a generator up to ``depth`` (by default the deepest), with its MLM head."""
    model = loaded.model
    refuse_random(loaded, "mlm_head", "mlm_heads")
    if file := getattr(model.cfg, "generator_checkpoint", ""):
        raise UserError(f"the generator of {loaded.file} was not trained with it: export {file}")
    if depth not in (None, *model.depth_names):
        raise UserError(f"--depth {depth} is not a depth of this generator: it has {', '.join(model.depth_names)}")
    name = depth or model.depth_names[-1]
    if isinstance(model, AmosModel):
        index = model.depth_names.index(name)
        encoder, module = model.generators[index if model.cfg.separate_generators else 0], model.head_of_depth[index]
        encoder = with_layers(encoder, encoder.layers[: model.depths[index]])
    elif (encoder := getattr(model, "mlm_encoder", None)) is not None:
        module = model.mlm_head
    else:  # two towers, or a generator without input
        raise UserError(f"{loaded.file} has no generator with a network that a masked language model can represent")
    description, limits = f"the generator at depth {name}", ""
    if isinstance(model, MlmModel):
        description = "the masked language model"
        limits = "It predicts masked words. Its encoder can be fine-tuned: AutoModel loads it from this folder, too."
    embedding, pad = model.generator_embedding, model.vocabulary.pad
    return Part(Head.MASKED_LM, description, embedding, encoder, pad, module, limits=limits)


def discriminator_part(loaded: LoadedCheckpoint) -> Part:
    """Return the discriminator with its detection head, or Electric's with the head of its energies."""
    model = loaded.model
    refuse_random(loaded, "detection_head")
    module = getattr(model, "detection_head", None)
    if module is None:
        raise UserError(f"{loaded.file} has no detection head: export the encoder (--part encoder)")
    encoder = model.encoder
    if isinstance(model, TeamsModel):
        if model.rtd_ffn is not None:
            refuse(loaded, "detects by a network on top of its encoder (--task-heads ffn)")
        encoder = model.detection_encoder
    head, settings, description = Head.PRETRAINING, {}, "the discriminator"
    if not isinstance(module, DenseDetectionHead):
        # Names for this head alone: of the others, which have one logit, a pipeline would build a random classifier.
        head, settings = Head.DETECTION, _named_classes(DETECTION_LABELS)
    elif encoder.shape.has_learned_bias:
        refuse(loaded, "has a detection head of two layers on relative positions")
    if isinstance(model, ElectricModel) and model.variant == "electric":
        head, settings, description = Head.ENERGY, {}, "the energies of tokens"
    return Part(head, description, model.encoder_embedding, encoder, model.vocabulary.pad, module, settings)


def fine_tuned_part(loaded: LoadedCheckpoint, labels: Sequence[str] | None, task: str | None) -> Part:
    """Return the encoder with its only head or that of ``task``; without a head if there is none, or no ``task`` of several."""
    model, tasks = loaded.model, heads_of_tasks(loaded.model)
    if task is not None and task not in tasks and (plain := column_of(word_head_name(task))) in tasks:
        task = plain  # of a column with other characters in its name
    if task not in (None, *tasks):
        reason = f"it has {', '.join(tasks)}" if tasks else "it is not of several tasks"
        raise UserError(f"--head {task}: {loaded.file} has no head of this name: {reason}")
    heads = model.heads
    if isinstance(model, ParsingModel):
        refuse(loaded, "predicts dependency trees")
    if task is None and len(heads) != 1 and not isinstance(model, SpanModel):
        limits = (
            f"It was fine-tuned on several tasks ({', '.join(tasks)}), whose heads are not in this folder: `amos export "
            "--head TASK` writes one of them with the encoder."
        )
        return encoder_part(model, limits if tasks else "")
    if model.layer_mixture is not None:
        refuse(loaded, "has a head that reads a mixture of all layers (--layers mix)")
    settings: dict[str, Any] = {}
    if isinstance(model, SpanModel):
        head, module, description = Head.QUESTION_ANSWERING, model.span_head, "its head for answers"
        if not isinstance(module, IndependentSpanHead):
            refuse(loaded, "marks answers with a joint head")
    elif isinstance(model, WordModel):
        name = word_head_name(task) if task else next(iter(heads))
        head, module = Head.TOKEN_CLASSIFICATION, heads[name]
        description = f"the head of {task}" if task else "its head for labels of words"
    else:
        name = task = task or next(iter(heads))
        head, module = Head.SEQUENCE_CLASSIFICATION, heads[name]
        description = "its classification head" if task == TEXT_HEAD else f"the head of {task}"
        if isinstance(model.encoder.shape, ModernBertEncoderConfig):
            settings = {"classifier_pooling": "mean" if module.pooling == "mean" else "cls"}
        elif module.pooling == "mean":
            head, description = Head.POOLED_CLASSIFICATION, f"{description} on the mean of all states"
    if head != Head.QUESTION_ANSWERING:
        settings |= label_settings(loaded, head, name, labels, task)
    description = f"the encoder with {description}"
    return dataclasses.replace(
        encoder_part(model), head=head, module=module, description=description, settings=settings
    )


def families_of(head: Head, shape: TransformerConfig, activation: str = "tanh") -> list[str]:
    """Return the families of classes that compute a head on an encoder, the closest first.

    ``activation``: of the classification heads of the objective, tanh (as in BERT and RoBERTa) or gelu (as in ELECTRA); or
    linear, a head without dense layer, which all of them can compute.
    """
    projected = shape.is_projected  # only ELECTRA projects its embeddings
    if isinstance(shape, ModernBertEncoderConfig):
        if projected or head == Head.ENERGY:
            raise UserError("Hugging Face's ModernBERT has no energies of tokens, and no narrower embeddings")
        return ["modernbert"]
    if shape.position_scheme == "amos":
        return [CUSTOM]
    if shape.position_scheme == "t5":
        here = (shape.position_buckets, shape.position_max_distance, shape.num_token_types, projected)
        if here != (MPNET_BUCKETS, MPNET_MAX_DISTANCE, 0, False):
            raise UserError(
                f"an encoder with these t5 positions cannot be exported: Hugging Face's MPNet has {MPNET_BUCKETS} buckets, a "
                f"maximum distance of {MPNET_MAX_DISTANCE}, no token types, and embeddings as wide as the encoder"
            )
        return ["mpnet"]
    if head == Head.SEQUENCE_CLASSIFICATION and activation == "tanh":
        if projected:
            raise UserError("no Hugging Face class has tanh in its classification head and narrower embeddings")
        return ["bert", "roberta"]
    is_gelu_classifier = head == Head.SEQUENCE_CLASSIFICATION and activation == "gelu"
    if projected or is_gelu_classifier or head in (Head.PRETRAINING, Head.ENERGY):
        return ["electra"]
    return ["electra", "bert", "roberta"] if activation == "gelu" else ["bert", "electra", "roberta"]


def label_settings(
    loaded: LoadedCheckpoint, head: Head, name: str, labels: Sequence[str] | None, task: str | None
) -> dict[str, Any]:
    """Return settings of the exported configuration: names of the classes, and for whole texts the type of problem.

    The names are ``labels``, else those in ``labels.txt`` (of words) or ``task.json`` beside the checkpoint or in the task's
    data, else ``LABEL_0``, ``LABEL_1``, ...
    """
    problem, kind, num_classes = {}, OF_WORDS, loaded.model.heads[name].num_outputs
    if head == Head.TOKEN_CLASSIFICATION:
        folder = loaded.file.parent / TASK_FOLDER / name if task else loaded.file.parent
        recorded = read_labels(folder)
        if recorded and not labels:
            check_labels(loaded, name, OF_WORDS, recorded, folder / LABELS_FILE)
    else:
        record = _task_record(loaded, name, task, has_names=bool(labels))
        recorded, kind = record.get("labels"), record.get("kind") or kind_of_training(loaded, name, labels or [])
        has_labels = kind == "labels"
        regression = bool(loaded.task.get("regression_target")) or (num_classes == 1 and not has_labels)
        classification = "multi_label_classification" if has_labels else "single_label_classification"
        problem = {"problem_type": "regression" if regression else classification}
    names = list(labels or recorded or [f"LABEL_{number}" for number in range(num_classes)])
    reordered = labels and are_labels(recorded) and names != recorded and sorted(names) == sorted(recorded)
    if reordered and are_trained_labels(loaded, name, kind, recorded):
        raise UserError(
            f"--labels has the names of the training in another order than the head: {shorten(', '.join(recorded), 300)}: "
            "leave it out"
        )
    if len(names) != num_classes or len(set(names)) != num_classes:
        raise UserError(
            f"--labels needs {num_classes} different names, one per class in their order: {', '.join(names)}"
        )
    return {"num_labels": num_classes} | _named_classes(names) | problem


def kind_of_training(loaded: LoadedCheckpoint, head: str, labels: Sequence[str]) -> str:
    """Return the kind of a head's labels where no ``task.json`` says it, by the fingerprint of kind and names."""
    if fingerprint_of_labels(loaded, head) is None:  # trained by a task of fairseq
        return "classes"
    for kind in KINDS:
        if are_trained_labels(loaded, head, kind, [] if kind == "number" else labels):
            return kind
    unknown = (
        f"{loaded.file}: {TASK_FILE}, which says whether its outputs are classes or several labels, is not beside it"
    )
    if not labels:
        raise UserError(
            f"{unknown}: copy it there, or give the labels of the training, in their order, as --labels A,B,..."
        )
    say(f"WARNING: {unknown}, and --labels are not the names of the training: taken as classes", "export")
    return "classes"


def _named_classes(names: Sequence[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}


def _task_record(loaded: LoadedCheckpoint, head: str, task: str | None, has_names: bool) -> dict[str, Any]:
    """Return the first ``task.json`` about the task of a head; empty without one. Its names are compared with the labels of the
    training unless the user gives others."""
    hint = "it does not name the labels of the task, remove it and give them with --labels A,B,..."
    beside, data = loaded.file.parent, str(loaded.task.get("data", "")).split(os.pathsep)
    for folder in (beside / TASK_FOLDER / str(task), beside, *map(Path, data)):
        record = read_json(folder / TASK_FILE, hint, optional=True)
        if record and (len(data) == 1 or record.get("task") == task):
            if has_names:
                return record
            if (names := record.get("labels")) and not are_labels(names):
                raise UserError(f"{folder / TASK_FILE} has no list of different labels: {hint}")
            if names or "kind" in record:
                check_labels(loaded, head, record.get("kind", "classes"), names or [], folder / TASK_FILE)
            return record
    return {}


@torch.no_grad()
def is_constant(part: Part, loaded: LoadedCheckpoint) -> bool:
    """Return whether the encoder gives two texts without a common token the same states, as after a collapse."""
    pieces = loaded.tokenizer.ids_of(loaded.tokenizer.dictionary_symbols[:20])
    length = min(len(pieces) // 2, loaded.model.max_positions() - 2)
    begin, end = loaded.dictionary.bos(), loaded.dictionary.eos()
    texts = (pieces[:length], pieces[length : 2 * length])
    tokens = torch.tensor([[begin, *text, end] for text in texts])
    one, other = dataclasses.replace(part, module=None).outputs(tokens)[:, 1:-1]
    return bool((one - other).abs().max() <= _CONSTANT * one.abs().max())


def _state(prefix: str, module: nn.Module) -> Weights:
    """Return the state of ``module``, floating point numbers in float32, each name with ``prefix``.

    The output layer of a head for a regression gets the mean and deviation of its values into its weights.
    """
    state = {name: each.float() if each.is_floating_point() else each for name, each in module.state_dict().items()}
    if (bits := state.pop("scale_bits", None)) is not None:
        mean, deviation = scale_of(bits)
        state["output.bias"] = state["output.bias"] * deviation + mean
        state["output.weight"] = state["output.weight"] * deviation
    return {prefix + name: tensor for name, tensor in state.items()}
