"""The encoder of any pretraining model, with heads for labeled tasks."""

import dataclasses
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.functional.positions import gather_positions
from amos_fairseq.models.configuration import (
    EncoderConfig,
    PaddedVocabulary,
    check_new_top_layers,
    embedding_width,
    make_transform,
    parse_layers,
    transformer_config,
)
from amos_fairseq.modules.cross_views import (
    FULL,
    WORD_DROPOUT,
    CrossViews,
    WordPlaces,
    number_of_view_layers,
    remove_words,
)
from amos_fairseq.modules.encoder import LayerOutputs, TransformerConfig, one_sided
from amos_fairseq.modules.heads import ClassificationHead, LayerMixture, ParsingHead, TaggingHead, pool
from amos_fairseq.modules.initialization import initialize, mark_layer_depths, mark_undecayed
from amos_fairseq.modules.span_heads import SPAN_HEADS, SpanOutput, build_span_head
from amos_fairseq.setting_checks import check_ranges

logger = logging.getLogger(__name__)

# Prefixes of the final encoder in a pretraining checkpoint (a discriminator, or the only network of MLM), and here.
ENCODER_IN_PRETRAINING = ("discriminator.", "transformer.")
ENCODER = "encoder."
EMBEDDING = "embed_tokens."
# What the discriminator adds to the generator's embeddings, in a model with disentangled embeddings.
DELTA = "disentangled_embedding.delta.weight"
# Name of the head for texts, fairseq's own in ``sentence_prediction``.
TEXT_HEAD = "sentence_classification_head"
MIXTURE = "layer_mixture."
CLASSIFICATION = "classification_heads."
CROSS_VIEWS = "cross_views."
HEADS = (CLASSIFICATION, "span_head.", "word_heads.", CROSS_VIEWS, MIXTURE)
NEW_LAYERS = "new_layers"
LABELS = "_labels"
TREES = "dependency_trees"  # name of the head for them


class WordOutput(NamedTuple):
    """Predictions for the words of sentences, by head: [B,W,labels] float32, or [B,W,1+W,relations] of trees.

    ``fixed`` and ``views`` are those of unlabeled sentences, for cross-view training: of the head itself, without dropout and
    gradient, and of each view.
    """

    logits: dict[str, Tensor]
    fixed: dict[str, Tensor] | None = None
    views: dict[str, dict[str, Tensor]] | None = None


class FineTunedModel(BaseFairseqModel):
    """Token embeddings, encoder and a head: what every architecture builds for a task other than pretraining.

    It loads the encoder of a pretraining checkpoint. It also loads a fine-tuned checkpoint, with its head if that has the
    shape of this task's head.

    ``--layers K`` keeps the K lower layers alone; with ``mix`` the heads read a :class:`LayerMixture` of the input of the first
    layer and the outputs of all. ``--new-top-layers N`` leaves the N upper layers that are kept at their random initial
    values when a checkpoint is loaded that has no such new layers yet (Zhang et al. 2021, "Revisiting Few-sample BERT
    Fine-tuning", section 5).

    Raises:
        UserError: a setting is out of range.
        ValueError: ``--layers`` or ``--new-top-layers`` do not fit the encoder.
    """

    def __init__(self, cfg: EncoderConfig, vocabulary: PaddedVocabulary):
        super().__init__()
        check_ranges(cfg, EncoderConfig)
        self.cfg = cfg
        self.vocabulary = vocabulary
        self.embed_tokens = vocabulary.embedding(embedding_width(cfg))
        pretrained = self.final_encoder_config(cfg)
        num_layers, is_mixed = parse_layers(cfg.layers, pretrained.num_layers)
        check_new_top_layers(cfg.new_top_layers, num_layers)
        self.num_pretrained_layers = pretrained.num_layers
        self.encoder = dataclasses.replace(pretrained, num_layers=num_layers).build()
        self.layer_mixture = LayerMixture(num_layers + 1) if is_mixed else None
        # First and last new layer. In a checkpoint they say that these layers have been trained: loaded again, they stay.
        first_new = num_layers - cfg.new_top_layers + 1
        self.register_buffer(NEW_LAYERS, torch.tensor([first_new, num_layers]) if cfg.new_top_layers else None)
        self.classification_heads = nn.ModuleDict()
        self.head_of_task: dict[str, str] = {}  # which head takes that of a task from a checkpoint of several tasks
        self.span_head: nn.Module | None = None
        self.word_heads = nn.ModuleDict()
        self.cross_views: CrossViews | None = None
        self.newly_initialized: list[str] = []  # weights of heads that the loaded checkpoint does not have
        self._initialize(self)
        mark_layer_depths(self)

    @property
    def encoder_embedding(self) -> nn.Embedding:
        """The token embeddings of ``encoder``."""
        return self.embed_tokens

    @staticmethod
    def final_encoder_config(cfg: EncoderConfig) -> TransformerConfig:
        """Return the sizes of the encoder that pretraining produces."""
        return transformer_config(cfg)

    def _initialize(self, part: nn.Module) -> None:
        initialize(part, self.cfg.init_std, self.cfg.linear_init_std)
        mark_undecayed(part, also=("relative_position",))

    def register_classification_head(
        self, name: str, num_classes: int, scale: tuple[float, float] | None = None
    ) -> None:
        """Add a head for ``num_classes`` classes, or for regression (1). fairseq's ``sentence_prediction`` calls this.

        ``scale``: of the values of a regression, mean and standard deviation or minimum and range: what the head adds to the
        output of its layer, and multiplies it by.
        """
        cfg = self.cfg
        head = ClassificationHead(
            cfg.encoder_embed_dim,
            num_classes,
            str(cfg.pooler_activation_fn),
            cfg.pooler_dropout,
            str(cfg.pooling),
            scale,
            make_transform(cfg),
        )
        self._initialize(head)
        self.classification_heads[name] = head
        mark_layer_depths(self)

    def register_span_head(self, kind: str) -> None:
        """Add a head for answer spans: one of ``modules.span_heads.SPAN_HEADS``."""
        cfg = self.cfg
        self._refuse_pooling("answer spans")
        self.span_head = build_span_head(
            kind, cfg.encoder_embed_dim, cfg.pooler_dropout, cfg.layer_norm_eps, make_transform(cfg)
        )
        self._initialize(self.span_head)
        mark_layer_depths(self)

    def register_tagging_head(self, name: str, num_labels: int) -> None:
        """Add a head for labels of words; ``name``: of :func:`word_head_name`."""
        self._refuse_pooling("labels of words")
        cfg = self.cfg
        self._add_word_head(
            name, TaggingHead(cfg.encoder_embed_dim, num_labels, cfg.pooler_dropout, make_transform(cfg))
        )

    def register_parsing_head(self, num_relations: int) -> None:
        """Add a head for dependency trees."""
        self._refuse_pooling("dependency trees")
        cfg = self.cfg
        self._add_word_head(
            TREES, ParsingHead(cfg.encoder_embed_dim, num_relations, cfg.pooler_dropout, make_transform(cfg))
        )

    def _add_word_head(self, name: str, head: nn.Module) -> None:
        self._initialize(head)
        self.word_heads[name] = head
        mark_layer_depths(self)

    def register_cross_views(self, views: Sequence[str], view_layers: str, mask: int) -> None:
        """Add the auxiliary modules of all heads for words, for :meth:`predict_views`.

        Args:
            views: names, of :mod:`amos_fairseq.modules.cross_views`.
            view_layers: ``half`` or ``all`` of the layers give the states of one direction.
            mask: the token ``<mask>``.
        """
        num_layers = number_of_view_layers(view_layers, len(self.encoder.layers))
        self.cross_views = CrossViews(self.cfg.encoder_embed_dim, views, self.word_heads, num_layers, mask)
        self._initialize(self.cross_views)
        mark_layer_depths(self)

    def _refuse_pooling(self, what: str) -> None:
        if self.cfg.pooling != "first":
            raise UserError(f"--pooling {self.cfg.pooling} has no effect on a head for {what}: leave it out")

    @staticmethod
    def is_fine_tuned(state_dict: dict[str, Tensor]) -> bool:
        """Return whether these are the weights of a fine-tuned model, not of a pretraining model."""
        return any(key.startswith(ENCODER) for key in state_dict)

    def register_heads_of(self, state_dict: dict[str, Tensor]) -> None:
        """Add the heads of a fine-tuned checkpoint."""
        for key, value in state_dict.items():
            found = re.fullmatch(r"classification_heads\.(.+)\.output\.weight", key)
            if found:
                bits = state_dict.get(f"classification_heads.{found.group(1)}.scale_bits")
                scale = None if bits is None else scale_of(bits)
                self.register_classification_head(found.group(1), value.size(0), scale)
        if any(key.startswith("span_head.") for key in state_dict):
            independent, joint = SPAN_HEADS
            self.register_span_head(joint if "span_head.start.weight" in state_dict else independent)
        for key, value in state_dict.items():
            if found := re.fullmatch(r"word_heads\.(\w+)\.output\.weight", key):
                self.register_tagging_head(found.group(1), num_labels=value.size(0))
        if (weight := state_dict.get(f"word_heads.{TREES}.relations.weight")) is not None:
            self.register_parsing_head(num_relations=weight.size(0) // ParsingHead.HIDDEN)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        features_only: bool = True,
        classification_head_name: str | None = None,
        answer_mask: Tensor | None = None,
        span_targets: tuple[Tensor, Tensor] | None = None,
        word_positions: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        rows_of_heads: Mapping[str, Tensor] | None = None,
        unlabeled: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, None] | SpanOutput | WordOutput | dict[str, Tensor]:
        """Compute what a head predicts for texts, or the states that heads read.

        Args:
            src_tokens: [B,T] int64.
            classification_head_name: of the head whose logits are returned, [B, classes].
            answer_mask: [B,T] bool, True at tokens that an answer may consist of: the span head predicts.
            span_targets: for the span head in training.
            word_positions: [B,W] int64, the first piece of each word, 0 in padded slots: the heads for words predict.
            lengths: number of tokens of each text. The encoder then computes nothing at padding.
            rows_of_heads: for each head the rows of its task, [b] int64, maybe none: each head predicts for these rows alone.
            unlabeled: arguments of :meth:`predict_views`, whose results are returned too.
            src_lengths, features_only: arguments of fairseq's own encoders, without effect.

        Returns:
            Without a head the states [B,T,D] and None; of one classification head its logits and None; of several the logits by
            head; the output of the span head; or a :class:`WordOutput`.
        """
        states = self.extract_features(src_tokens, lengths)
        if word_positions is not None:
            logits = self.predict_words(states, word_positions, rows_of_heads)
            return WordOutput(logits, *(() if unlabeled is None else self.predict_views(**unlabeled)))
        if rows_of_heads is not None:
            pooled = pool(states, src_tokens.eq(self.vocabulary.pad), str(self.cfg.pooling))
            return {
                name: self.classification_heads[name].classify(pooled[rows]) for name, rows in rows_of_heads.items()
            }
        if answer_mask is not None:
            return self.span_head(states, answer_mask, span_targets)
        if classification_head_name is not None:
            padding_mask = src_tokens.eq(self.vocabulary.pad)
            return self.classification_heads[classification_head_name](states, padding_mask), None
        return states, None

    def predict_words(
        self, states: Tensor, word_positions: Tensor, rows_of_heads: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return the logits of each head for words, from the states [B,T,D] at their first pieces [B,W]; see
        :meth:`forward`."""
        words, is_padding = gather_positions(states, word_positions), word_positions.eq(0)
        if rows_of_heads is None:
            return {name: head(words, is_padding) for name, head in self.word_heads.items()}
        return {name: self.word_heads[name](words[rows], is_padding[rows]) for name, rows in rows_of_heads.items()}

    def predict_views(
        self,
        src_tokens: Tensor,
        lengths: Sequence[int],
        word_positions: Tensor,
        last_positions: Tensor,
        modules_alone: bool = False,
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Return what each head predicts for unlabeled sentences, fixed and without dropout, and what its views predict.

        Args:
            src_tokens: [B,T] int64.
            lengths: number of tokens of each sentence.
            word_positions, last_positions: [B,W] int64, first and last piece of each word, 0 in padded slots.
            modules_alone: only the auxiliary modules learn: the states get no gradient, and there is no word dropout.
        """
        if modules_alone and not self.cross_views.names:
            return {}, {name: {} for name in self.word_heads}
        words = WordPlaces(word_positions, last_positions)
        with torch.no_grad(), evaluating(self):
            fixed = self.predict_words(self.extract_features(src_tokens, lengths), word_positions)
        read = {FULL: self.extract_features(src_tokens, lengths)} if FULL in self.cross_views.names else {}
        read |= self.directed_states(src_tokens, lengths)
        if modules_alone:
            read = {name: states.detach() for name, states in read.items()}
        views = self.cross_views(self.cross_views.states(read, words), ~words.is_word)
        if (removed := self.cross_views.removed) is not None and not modules_alone:
            kept = self.extract_features(remove_words(src_tokens, words, removed), lengths)
            for name, logits in self.predict_words(kept, word_positions).items():
                views[name][WORD_DROPOUT] = logits
        return fixed, views

    def directed_states(self, tokens: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
        """Compute the states [B,T,D] of each direction of attention that the views read, from tokens [B,T] int64."""
        embeddings, types = self.embed_tokens(tokens), self.token_types(tokens)
        return {
            side: one_sided(self.encoder, side, self.cross_views.num_layers)(
                embeddings, token_types=types, lengths=lengths
            )[-1]
            for side in self.cross_views.directions
        }

    def extract_features(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Compute the states that the heads read, of the last layer or a mixture of all: [B,T] int64 -> [B,T,D]."""
        return self.read_layers(self.all_states(tokens, lengths))

    def all_states(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> LayerOutputs:
        """Compute the input of the first layer and the output of every layer: [B,T] int64 -> 1 + layers tensors [B,T,D]."""
        padding_mask = tokens.eq(self.vocabulary.pad) if lengths is None else None
        embeddings, types = self.embed_tokens(tokens), self.token_types(tokens)
        return self.encoder(embeddings, padding_mask, token_types=types, with_input=True, lengths=lengths)

    def read_layers(self, states: LayerOutputs) -> Tensor:
        """Return what the heads read of :meth:`all_states`."""
        return states[-1] if self.layer_mixture is None else states.mix(self.layer_mixture)

    def token_types(self, tokens: Tensor) -> Tensor | None:
        """Return 0 in the first text, its ``</s>`` included, and 1 in the rest, a second separator included: [B,T] int64.

        None if the encoder has no token types.
        """
        if self.cfg.token_types == 0:
            return None
        ends = tokens.eq(self.vocabulary.end).long()
        return (ends.cumsum(1) - ends).clamp(max=min(1, self.cfg.token_types - 1))

    def max_positions(self) -> int:
        return self.cfg.max_positions

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Turn the weights of a checkpoint, in place, into those of this model.

        Raises:
            UserError: the encoder of the checkpoint has another shape.
        """
        self.take_encoder(state_dict)
        here = self.state_dict()
        if self.cross_views is None:  # they only train
            for key in [key for key in state_dict if key.startswith(CROSS_VIEWS)]:
                del state_dict[key]
        self._choose_layers(state_dict, here)
        self._take_heads(state_dict, here)
        # The values of this task may have another unit than those of the task before.
        state_dict.update({key: value for key, value in here.items() if key.endswith(".scale_bits")})
        self._check_shapes(state_dict, here)
        unused = [key for key in state_dict if key.startswith(HEADS) and not same_shape(key, state_dict, here)]
        if MIXTURE + "scores" in unused:  # of another number of layers
            unused.append(MIXTURE + "scale")
        for key in unused:
            del state_dict[key]
        self.newly_initialized = [key for key in here if key.startswith(HEADS) and key not in state_dict]
        state_dict.update({key: here[key] for key in self.newly_initialized})
        if unused:
            logger.info(
                f"weights of the checkpoint's heads that do not fit this task are not used: {', '.join(unused)}"
            )
        if self.newly_initialized:
            logger.info(
                "the checkpoint has no head for this task; these weights are newly initialized: "
                + ", ".join(self.newly_initialized)
            )

    def take_encoder(self, state_dict: dict[str, Tensor]) -> None:
        """Rename the encoder of a pretraining model, in place, and remove its generator and heads."""
        if not any(key.startswith(ENCODER_IN_PRETRAINING) for key in state_dict):
            return
        if DELTA in state_dict:
            table = f"{EMBEDDING}weight"
            state_dict[table] = state_dict[table] + state_dict.pop(DELTA)
        dropped = set()
        for key in list(state_dict):
            if key.startswith(ENCODER_IN_PRETRAINING):
                state_dict[ENCODER + key.partition(".")[2]] = state_dict.pop(key)
            elif not key.startswith(EMBEDDING):
                dropped.add(key.partition(".")[0])
                del state_dict[key]
        logger.info(f"fine-tuning uses the encoder of a pretraining checkpoint; not used: {', '.join(sorted(dropped))}")

    def _choose_layers(self, state_dict: dict[str, Tensor], here: dict[str, Tensor]) -> None:
        """Leave out the layers above ``--layers``, and replace those of ``--new-top-layers``, in place."""
        kept, num_new, trained = len(self.encoder.layers), self.cfg.new_top_layers, state_dict.pop(NEW_LAYERS, None)
        if num_new:
            state_dict[NEW_LAYERS] = self.new_layers
            first, last = self.new_layers.tolist()
            which = f"the layer {last}" if first == last else f"the layers {first} to {last}"
            if trained is not None and trained.tolist() == [first, last]:
                logger.info(f"{which}: newly initialized in an earlier run and kept (--new-top-layers {num_new})")
                num_new = 0
            else:
                logger.info(f"new random weights in {which} (--new-top-layers {num_new})")
        for key in list(state_dict):
            found = re.match(rf"{re.escape(ENCODER)}layers\.(\d+)\.", key)
            number = int(found.group(1)) if found else -1
            if kept <= number < self.num_pretrained_layers:
                del state_dict[key]
            elif kept - num_new <= number < kept:
                state_dict[key] = here[key]

    def _take_heads(self, state_dict: dict[str, Tensor], here: dict[str, Tensor]) -> None:
        """Rename the head that a task had among several, in place; a regression gets the scale of its values here."""
        for task, name in self.head_of_task.items():
            before, now = f"{CLASSIFICATION}{task}.", f"{CLASSIFICATION}{name}."
            if f"{before}output.weight" not in state_dict:
                continue
            for key in [key for key in state_dict if key.startswith(before)]:
                state_dict[now + key.removeprefix(before)] = state_dict.pop(key)
            if now != before:
                logger.info(f"the head of {task} is that of the checkpoint, which was fine-tuned on several tasks")
            bits = [side.get(f"{now}scale_bits") for side in (state_dict, here)]
            (mean, scale), (mean_here, scale_here) = ((0.0, 1.0) if own is None else scale_of(own) for own in bits)
            if (mean, scale) != (mean_here, scale_here):
                weight, bias = f"{now}output.weight", f"{now}output.bias"
                state_dict[weight] = state_dict[weight] * (scale / scale_here)
                state_dict[bias] = (state_dict[bias] * scale + mean - mean_here) / scale_here

    @staticmethod
    def _check_shapes(state_dict: dict[str, Tensor], here: dict[str, Tensor]) -> None:
        for key in sorted(here.keys() | state_dict.keys()):
            if not key.startswith(HEADS) and not same_shape(key, state_dict, here):
                raise UserError(
                    "the checkpoint holds another encoder than the flags describe: "
                    f"{describe_mismatch(key, state_dict, here)}; {_advice(key, state_dict, here)}"
                )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn off dropout, and on again where it was on."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def parse_views(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the views in ``a,b,...``, in the order of ``known``, which is that of their parameters in the optimizer; raise
    :class:`UserError` unless each is known and there once."""
    views = tuple(part.strip() for part in text.split(",")) if text.strip() else ()
    allowed = (*known, WORD_DROPOUT)
    for view in views:
        if view not in allowed or views.count(view) > 1:
            what = "is there twice" if view in allowed else "is no view"
            raise UserError(f"--views {text}: {view!r} {what}: give some of {','.join(allowed)}")
    return tuple(view for view in allowed if view in views)


def word_head_name(column: str) -> str:
    """Return the name of the head for a column of labels. A key of ``nn.ModuleDict`` may not contain a dot or be the name of an
    attribute."""
    return re.sub(r"\W", "_", column) + LABELS


def column_of(head: str) -> str:
    """Return the column of a head of :func:`word_head_name`; characters other than letters and digits are ``_``."""
    return head.removesuffix(LABELS)


def scale_of(bits: Tensor) -> tuple[float, float]:
    """Return the mean and deviation of a head; raise ``ValueError`` for what this package does not write."""
    if bits.dtype != torch.int64 or bits.shape != (2,):
        raise ValueError("the scale of a head is no pair of numbers")
    mean, deviation = bits.view(torch.float64).tolist()
    if not (math.isfinite(mean) and 0 < deviation < math.inf):
        raise ValueError(f"the scale of a head has mean {mean} and deviation {deviation}")
    return mean, deviation


def same_shape(key: str, *sides: dict[str, Tensor]) -> bool:
    """Return whether all sides hold a tensor of this name and of one shape."""
    return all(key in side for side in sides) and len({side[key].shape for side in sides}) == 1


def describe_mismatch(key: str, checkpoint: dict[str, Tensor], here: dict[str, Tensor]) -> str:
    """Return a text that names the shape of a tensor on both sides."""
    there, wanted = (tuple(side[key].shape) if key in side else "absent" for side in (checkpoint, here))
    return f"{key} is {there} in the checkpoint, {wanted} here"


def _advice(key: str, checkpoint: dict[str, Tensor], here: dict[str, Tensor]) -> str:
    if key in checkpoint and key in here and checkpoint[key].size(-1) == here[key].size(-1):
        if "embed_positions" in key:
            return "give the checkpoint's --max-positions"
        if key.startswith(EMBEDDING):
            return "binarize the task with the tokenizer of the checkpoint (SAVE_DIR/tokenizer)"
    if key in here and key not in checkpoint and key.startswith(f"{ENCODER}layers."):
        return "give the --layers with which the checkpoint was fine-tuned, or its --arch and sizes"
    if "relative_position" in key:
        return "give the checkpoint's --relative-position-scheme and its sizes"
    return "give the checkpoint's --arch and sizes"
