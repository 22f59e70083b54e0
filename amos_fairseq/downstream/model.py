"""The encoder of any pretraining model with a head: what every architecture builds for a task other than pretraining.

The heads for texts are here, because fairseq's own ``sentence_prediction`` asks for them; other heads are in the folders of
their tasks.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import EncoderConfig, PaddedVocabulary, embedding_width, make_transform
from amos_fairseq.models.pretraining import (
    CLASSIFICATION,
    EMBEDDING,
    ENCODER,
    POOLER,
    PretrainedEncoder,
    describe_mismatch,
    reads_heads,
    same_shape,
)
from amos_fairseq.modules.deberta_encoder import DebertaEncoderConfig
from amos_fairseq.modules.encoder import initialize, mark_layer_depths, mark_lr_scale, mark_undecayed
from amos_fairseq.modules.heads import ClassificationHead
from amos_fairseq.modules.modern_encoder import ModernBertEncoderConfig
from amos_fairseq.setting_checks import check_ranges

logger = logging.getLogger(__name__)

# Name of the head for texts, fairseq's own in ``sentence_prediction``.
TEXT_HEAD = "sentence_classification_head"


@dataclass(frozen=True)
class ExportedHead:
    """A head that a class of Hugging Face computes.

    Attributes:
        kind: sequence_classification, token_classification or question_answering: a label of
            ``amos_fairseq.hugging_face.weights.Head``, which has the names of its weights.
        module: whose weights these are.
        outputs: from the last states [B,T,D] and a mask of padding [B,T] to what the class returns.
        description: for messages and the model card.
        settings: for the configuration of the class, besides the names of labels.
        reads_mean: the head is on the mean of the states, for which the folder gets a class of its own.
    """

    kind: str
    module: nn.Module
    outputs: Callable[[Tensor, Tensor], Tensor]
    description: str
    settings: dict[str, Any] = field(default_factory=dict)
    reads_mean: bool = False


class FineTunedModel(BaseFairseqModel):
    """Token embeddings and encoder. A subclass adds the heads of its tasks, and ``forward`` with what they predict.

    It loads the encoder of a pretraining checkpoint. It also loads a fine-tuned checkpoint, with its heads if they have the
    shape of this task's heads.

    ``--freeze-encoder`` trains the heads alone: the encoder has no dropout and no gradients.

    Raises:
        UserError: a setting is out of range.
    """

    def __init__(
        self, cfg: EncoderConfig, vocabulary: PaddedVocabulary, pretrained: type[PretrainedEncoder] = PretrainedEncoder
    ):
        super().__init__()
        check_ranges(cfg, EncoderConfig)
        self.cfg = cfg
        self.vocabulary = vocabulary
        self.pretrained = pretrained(cfg)
        self.embed_tokens = vocabulary.embedding(embedding_width(cfg))
        self.encoder = self.pretrained.config().build()
        self.newly_initialized: list[str] = []  # weights of heads that the loaded checkpoint does not have
        self.initialize(self)
        for module in self.frozen_modules:
            module.requires_grad_(False)

    @property
    def frozen_modules(self) -> tuple[nn.Module, ...]:
        return (self.embed_tokens, self.encoder) if self.cfg.freeze_encoder else ()

    def train(self, mode: bool = True) -> "FineTunedModel":
        super().train(mode)
        for module in self.frozen_modules:
            module.eval()
        return self

    @property
    def heads(self) -> Mapping[str, nn.Module]:
        """Heads by name, those that predict labels; each has the number ``num_outputs`` of its labels."""
        return {}

    def exported_head(self, name: str | None) -> ExportedHead | None:
        """Return how Hugging Face has the head ``name``, or the only one for None; None for a model without such a head.

        Raises:
            ValueError: no class computes it; the message says what it computes.
        """

    @property
    def encoder_embedding(self) -> nn.Embedding:
        return self.embed_tokens

    def initialize(self, module: nn.Module) -> None:
        """Set the initial values of the model or of a head that was added to it, and the parameter groups."""
        initialize(module, self.cfg.init_std, self.cfg.linear_init_std)
        mark_undecayed(module, also=("relative_position",))
        mark_layer_depths(self)
        if self.cfg.encoder_lr_scale != 1:
            mark_lr_scale([*self.embed_tokens.parameters(), *self.encoder.parameters()], self.cfg.encoder_lr_scale)

    def register_heads_of(self, state_dict: dict[str, Tensor]) -> None:
        """Add the heads of a fine-tuned checkpoint."""

    def refuse_pooling(self, what: str) -> None:
        if self.cfg.pooling != "first":
            raise UserError(f"--pooling {self.cfg.pooling} has no effect on a head for {what}: leave it out")

    def extract_features(self, tokens: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Compute the states of the last layer, which the heads read: [B,T] int64 -> [B,T,D].

        Args:
            lengths: number of tokens of each sequence. The encoder then computes nothing at padding.
        """
        padding_mask = self.padding_mask(tokens) if lengths is None else None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.cfg.freeze_encoder):
            embeddings, types = self.embed_tokens(tokens), self.token_types(tokens)
            return self.encoder(embeddings, padding_mask, token_types=types, lengths=lengths)[-1]

    def padding_mask(self, tokens: Tensor) -> Tensor:
        return tokens.eq(self.vocabulary.pad)

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
        """Turn the weights of a checkpoint, in place, into those of this model; refuse an encoder of another shape."""
        self.pretrained.take(state_dict)
        here = self.state_dict()
        self.take_heads(state_dict, here)
        for key in sorted(here.keys() | state_dict.keys()):
            if not is_of_head(key) and not same_shape(key, state_dict, here):
                raise UserError(
                    "the checkpoint holds another encoder than the flags describe: "
                    f"{describe_mismatch(key, state_dict, here)}; give its --arch, sizes, --max-positions and "
                    "--relative-position-scheme, and data that were binarized with its tokenizer (SAVE_DIR/tokenizer)"
                )
        unused = [key for key in state_dict if is_of_head(key) and not same_shape(key, state_dict, here)]
        for key in unused:
            del state_dict[key]
        self.newly_initialized = [key for key in here if is_of_head(key) and key not in state_dict]
        state_dict.update({key: here[key] for key in self.newly_initialized})
        if unused:
            logger.info(f"the checkpoint's heads that do not fit this task are not used: {', '.join(unused)}")
        if new := ", ".join(self.newly_initialized):
            logger.info(f"the checkpoint has no head for this task; these weights are newly initialized: {new}")

    def take_heads(self, state_dict: dict[str, Tensor], here: dict[str, Tensor]) -> None:
        """Change the heads of a checkpoint, in place, before those that fit are loaded; ``here``: weights of this model."""


@reads_heads(CLASSIFICATION)
class TextModel(FineTunedModel):
    """Heads by name, each for a class, several labels, or a number for a text or a pair of texts.

    Attributes:
        head_of_task: task of a checkpoint of several tasks -> the head here that takes the head of that task.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.classification_heads = nn.ModuleDict()
        self.head_of_task: dict[str, str] = {}

    @property
    def heads(self) -> nn.ModuleDict:
        return self.classification_heads

    def exported_head(self, name: str | None) -> ExportedHead | None:
        if name is None:
            return None
        head, settings = self.classification_heads[name], {}
        reads_mean, shape = head.pooling == "mean", self.encoder.shape
        description = f"its classification head{' on the mean of all states' if reads_mean else ''}"
        if isinstance(shape, ModernBertEncoderConfig):  # the only class that can read the mean
            reads_mean, settings = False, {"classifier_pooling": "mean" if reads_mean else "cls"}
        elif isinstance(shape, DebertaEncoderConfig) and head.dense is not None:
            settings = {"pooler_hidden_act": str(self.cfg.pooler_activation_fn)}
        return ExportedHead("sequence_classification", head, head, description, settings, reads_mean)

    def register_classification_head(
        self, name: str, num_classes: int, scale: tuple[float, float] | None = None
    ) -> None:
        """Add a head for ``num_classes`` classes, or for regression (1). fairseq's ``sentence_prediction`` calls this.

        ``scale``: (mean, standard deviation) or (minimum, range) of the values of a regression. The head multiplies the output
        of its layer by the second number and adds the first.
        """
        cfg = self.cfg
        self.classification_heads[name] = ClassificationHead(
            cfg.encoder_embed_dim,
            num_classes,
            str(cfg.pooler_activation_fn),
            cfg.pooler_dropout,
            str(cfg.pooling),
            scale,
            make_transform(cfg),
        )
        self.initialize(self.classification_heads[name])

    def register_heads_of(self, state_dict: dict[str, Tensor]) -> None:
        for key, value in state_dict.items():
            if match := re.fullmatch(rf"{re.escape(CLASSIFICATION)}(.+)\.output\.weight", key):
                bits = state_dict.get(f"{CLASSIFICATION}{match.group(1)}.scale_bits")
                scale = None if bits is None else scale_of(bits)
                self.register_classification_head(match.group(1), value.size(0), scale)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        features_only: bool = True,
        classification_head_name: str | None = None,
        lengths: Sequence[int] | None = None,
    ) -> tuple[Tensor, None]:
        """Return the logits [B, classes] of a head, or without a name the states [B,T,D], and None, as fairseq's encoders do.

        Args:
            src_tokens: [B,T] int64.
            lengths: see ``extract_features``.
            src_lengths: an argument of fairseq's own encoders, without effect.
            features_only: another one.
        """
        states = self.extract_features(src_tokens, lengths)
        if classification_head_name is None:
            return states, None
        return self.classification_heads[classification_head_name](states, self.padding_mask(src_tokens)), None

    def take_heads(self, state_dict: dict[str, Tensor], here: dict[str, Tensor]) -> None:
        """Start from BERT's pooler where a head has its function; rename the heads that ``head_of_task`` names, and convert
        those of regressions to the scale of the values here."""
        self._start_from_pooler(state_dict)
        for task, name in self.head_of_task.items():
            before, now = f"{CLASSIFICATION}{task}.", f"{CLASSIFICATION}{name}."
            if f"{before}output.weight" not in state_dict:
                continue
            for key in [key for key in state_dict if key.startswith(before)]:
                state_dict[now + key.removeprefix(before)] = state_dict.pop(key)
            if now != before:
                logger.info(f"the head of {task} is that of the checkpoint, which was fine-tuned on several tasks")
            mean, scale = scale_of(state_dict.get(f"{now}scale_bits"))
            mean_here, scale_here = scale_of(here.get(f"{now}scale_bits"))
            if (mean, scale) != (mean_here, scale_here):
                weight, bias = f"{now}output.weight", f"{now}output.bias"
                state_dict[weight] = state_dict[weight] * (scale / scale_here)
                state_dict[bias] = (state_dict[bias] * scale + mean - mean_here) / scale_here
        # The values of this task may have another unit than those of the task before.
        state_dict.update({key: value for key, value in here.items() if key.endswith(".scale_bits")})

    def _start_from_pooler(self, state_dict: dict[str, Tensor]) -> None:
        """Make BERT's pooler, tanh(W h + b) of the last state of the first token, the dense layer of every head, in place."""
        cfg = self.cfg
        if not (POOLER.keys() <= state_dict.keys() and cfg.pooling == "first" and cfg.pooler_activation_fn == "tanh"):
            return
        pooler = {end: state_dict.pop(key) for key, end in POOLER.items()}
        for name in self.classification_heads:
            state_dict.update({f"{CLASSIFICATION}{name}.dense.{end}": value for end, value in pooler.items()})
        logger.info("the dense layer of the classification head starts from the pooler of the imported model")


def is_of_head(key: str) -> bool:
    """Return whether a weight of a fine-tuned model belongs to a head, not to the encoder."""
    return not key.startswith((ENCODER, EMBEDDING))


def scale_of(bits: Tensor | None) -> tuple[float, float]:
    """Return the mean and deviation that a head stores, 0 and 1 if it stores none; raise ``ValueError`` for invalid ones."""
    if bits is None:
        return 0.0, 1.0
    is_pair = bits.dtype == torch.int64 and bits.shape == (2,)
    mean, deviation = bits.view(torch.float64).tolist() if is_pair else (0.0, 0.0)
    if not (math.isfinite(mean) and 0 < deviation < math.inf):
        raise ValueError("the scale of a head is no finite mean with a deviation above 0")
    return mean, deviation
