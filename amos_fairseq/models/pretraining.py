"""Base classes of the pretraining models: construction, vocabulary, output layer, and the encoder used after pretraining.

Shapes: B sequences, T tokens, M masked positions per sequence, D width of the encoder, E width of the token embeddings,
V padded vocabulary size.
"""

import abc
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks.masked_lm import MaskedLMTask
from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.errors import UserError
from amos_fairseq.functional.output_layer import Sampler, cross_entropy, output_layer, runs_in_triton
from amos_fairseq.models.configuration import (
    EncoderConfig,
    PaddedVocabulary,
    embedding_width,
    has_biases,
    transformer_config,
)
from amos_fairseq.modules.bert_encoder import LearnedPositions, repeated
from amos_fairseq.modules.encoder import (
    TransformerConfig,
    TransformerEncoder,
    initialize,
    mark_lr_scale,
    mark_undecayed,
)
from amos_fairseq.modules.heads import MlmHead, TokenPrediction
from amos_fairseq.setting_checks import check_ranges

logger = logging.getLogger(__name__)

# Prefixes of the final encoder in a pretraining checkpoint (a discriminator, or the only network of MLM), and here.
ENCODER_IN_PRETRAINING = ("discriminator.", "transformer.")
ENCODER = "encoder."
EMBEDDING = "embed_tokens."
# What the discriminator adds to the generator's embeddings, in a model with disentangled embeddings.
DELTA = "disentangled_embedding.delta.weight"
# Prefix of the heads for texts, which fairseq's own ``sentence_prediction`` asks for.
CLASSIFICATION = "classification_heads."
# BERT's pooler in the checkpoint of an imported model.
POOLER = {"pooler_weight": "weight", "pooler_bias": "bias"}


class PretrainingBatch(NamedTuple):
    """Masked blocks, the input of every pretraining model."""

    tokens: Tensor  # [B,T] int64, the original text
    masked_tokens: Tensor  # [B,T] int64, the input of the generator
    masked_positions: Tensor  # [B,M] int64; padded slots hold 0
    masked_weights: Tensor  # [B,M] float, 1, or 0 for a padded slot
    has_padding: bool = True  # False if no sequence is padded, which saves the padding mask

    @classmethod
    def of(cls, sample: dict[str, Any]) -> "PretrainingBatch":
        """Return the batch of a sample of the task. Its counts are Python ints, so the host does not wait for the device."""
        inputs = sample["net_input"]
        return cls(**inputs, has_padding=sample["ntokens"] < inputs["tokens"].numel())

    @property
    def originals(self) -> Tensor:
        """The tokens at the masked positions: [B,M] int64."""
        return self.tokens.gather(1, self.masked_positions)


@dataclass(frozen=True)
class PretrainingOutput:
    """Input of the criterion, the log and ``amos report``. A field is None if the model has no such part."""

    mlm_nll: Tensor | None = None  # [B,M] float32, -log p(original), nats; AMOS: [K,B,M], of each depth
    mlm_correct: Tensor | None = None  # of the same shape, bool, no token is more probable than the original
    sampled_tokens: Tensor | None = None  # [B,M] int64
    corrupted_tokens: Tensor | None = None  # [B,T] int64, the discriminator's input
    replaced: Tensor | None = None  # [B,T] bool, differs from the original
    rtd_logits: Tensor | None = None  # [B,T] float32, positive for "replaced"; Electric: for "noise"
    rtd_states: Tensor | None = None  # [B,T,D], the input of the detection head
    learns_by_likelihood: bool = True  # False: mlm_nll is for the log alone
    generator_temperature: float | None = None  # of the samples; None: always 1


class GeneratorNetwork(NamedTuple):
    """A network with MLM heads, which another run can use as its frozen generator."""

    embedding: nn.Embedding  # [V,E], of input and output layer
    encoder: TransformerEncoder  # as deep as the last head
    heads: dict[int, MlmHead]  # by the number of layers below, ascending


class DisentangledEmbedding(nn.Module):
    """sg(E) + Delta: the generator trains its embeddings E, the discriminator learns the difference Delta, which starts at 0.

    Detection pulls the embeddings of tokens apart that masked language modeling brings together. With plain sharing both train
    the same table; here each trains its own, and what the generator learns still reaches the discriminator.

    Args:
        shared: E, which the model owns.
    """

    def __init__(self, shared: nn.Embedding):
        super().__init__()
        # In a tuple it is no submodule: it keeps its one name in the state of the model.
        self._shared = (shared,)
        self.delta = nn.Embedding(shared.num_embeddings, shared.embedding_dim, shared.padding_idx)

    @property
    def weight(self) -> Tensor:
        """The whole table: [V,E]."""
        return self._shared[0].weight.detach() + self.delta.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [...,E]."""
        return self._shared[0](tokens).detach() + self.delta(tokens)


class PretrainedEncoder:
    """The encoder that fine-tuning takes from a pretraining model: its sizes, and its weights in a checkpoint."""

    def __init__(self, cfg: EncoderConfig) -> None:
        self.cfg = cfg

    def config(self) -> TransformerConfig:
        return transformer_config(self.cfg)

    def take(self, state_dict: dict[str, Tensor]) -> None:
        """Rename the encoder of a pretraining checkpoint, in place, and remove generator and heads."""
        if not any(key.startswith(ENCODER_IN_PRETRAINING) for key in state_dict):
            return  # already fine-tuned
        if DELTA in state_dict:
            table = f"{EMBEDDING}weight"
            state_dict[table] = state_dict[table] + state_dict.pop(DELTA)
        dropped = set()
        for key in list(state_dict):
            if key.startswith(ENCODER_IN_PRETRAINING):
                state_dict[ENCODER + key.partition(".")[2]] = state_dict.pop(key)
            elif not key.startswith(EMBEDDING) and key not in POOLER:
                dropped.add(key.partition(".")[0])
                del state_dict[key]
        logger.info(f"fine-tuning uses the encoder of a pretraining checkpoint; not used: {', '.join(sorted(dropped))}")


# Which class has the heads of a checkpoint, by the prefix of their weights; the tasks with labels add theirs.
CLASS_OF_HEADS: dict[str, type[BaseFairseqModel]] = {}


def reads_heads(prefix: str) -> Callable[[type[BaseFairseqModel]], type[BaseFairseqModel]]:
    """Register a class as that of all checkpoints with weights of this prefix."""

    def register(model_class: type[BaseFairseqModel]) -> type[BaseFairseqModel]:
        CLASS_OF_HEADS[prefix] = model_class
        return model_class

    return register


def is_fine_tuned(state_dict: dict[str, Tensor]) -> bool:
    return any(key.startswith(ENCODER) for key in state_dict)


def class_of_checkpoint(state_dict: dict[str, Tensor]) -> type[BaseFairseqModel]:
    present = [prefix for prefix in CLASS_OF_HEADS if any(key.startswith(prefix) for key in state_dict)]
    return CLASS_OF_HEADS[max(present, key=len)] if present else CLASS_OF_HEADS[CLASSIFICATION]


def same_shape(key: str, *sides: dict[str, Tensor]) -> bool:
    """Return whether all sides hold a tensor of this name and of one shape."""
    return all(key in side for side in sides) and len({side[key].shape for side in sides}) == 1


def describe_mismatch(key: str, checkpoint: dict[str, Tensor], here: dict[str, Tensor]) -> str:
    """Return a text that names the shape of a tensor on both sides."""
    there, wanted = (tuple(side[key].shape) if key in side else "absent" for side in (checkpoint, here))
    return f"{key} is {there} in the checkpoint, {wanted} here"


class PretrainingModel(BaseFairseqModel, abc.ABC):
    """A model that is pretrained on masked blocks. After pretraining, users need ``encoder`` and ``encoder_embedding``.

    A subclass adds its modules and then calls ``initialize``.
    """

    # What fine-tuning takes from a checkpoint.
    pretrained_encoder: type[PretrainedEncoder] = PretrainedEncoder
    # Whether set_token_counts(), which such a model has, must be called before the first update.
    awaits_token_counts: bool = False
    # What is built for fairseq's task masked_lm; None if it cannot train this objective.
    for_masked_lm: "type[PretrainingModel] | None" = None
    # Whether weights of a model with fewer learned positions may be loaded.
    may_be_longer: bool = False

    def __init__(self, cfg: EncoderConfig, vocabulary: PaddedVocabulary):
        super().__init__()
        # register_model() sets __dataclass.
        check_ranges(cfg, getattr(type(self), "__dataclass", EncoderConfig))
        if cfg.freeze_encoder:
            raise ValueError("--freeze-encoder True is a setting of fine-tuning: leave it out")
        self.cfg = cfg
        self.vocabulary = vocabulary
        self.embed_tokens = vocabulary.embedding(embedding_width(cfg))
        is_disentangled = getattr(cfg, "disentangled_embeddings", False)
        self.disentangled_embedding = DisentangledEmbedding(self.embed_tokens) if is_disentangled else None
        # The mask is looked up by token id, the indices select columns of logits.
        self.register_buffer("never_sampled_mask", vocabulary.never_sampled_mask(), persistent=False)
        self.register_buffer("never_sampled_indices", vocabulary.never_sampled_indices(), persistent=False)
        # Of an imported BERT: not trained, and saved with the weights for fine-tuning and export.
        for name in POOLER:
            self.register_buffer(name, None)

    @classmethod
    def build_model(cls, cfg: EncoderConfig, task: Any) -> BaseFairseqModel:
        """Build this model for a task that masks blocks, which has a ``masked_share``; for any other task its encoder in the
        ``model_class`` of the task, by default that with heads for texts.
        """
        vocabulary = PaddedVocabulary.of(task.source_dictionary)
        try:
            if isinstance(task, MaskedLMTask):
                if cls.for_masked_lm is None:
                    raise UserError("--task masked_lm trains --arch mlm_*: give one, or --task text_pretraining")
                return cls.for_masked_lm(cfg, vocabulary)
            if not hasattr(task, "masked_share"):
                model_class = getattr(task, "model_class", None) or CLASS_OF_HEADS[CLASSIFICATION]
                return model_class(cfg, vocabulary, cls.pretrained_encoder)
            model = cls(cfg, vocabulary)
            if getattr(cfg, "generator_checkpoint", ""):
                model.load_generator = functools.partial(task.load_generator, cfg)
                if task.masked_share is not None:
                    model.read_generator()
        except ValueError as error:
            raise UserError(f"the model cannot be built: {error}") from error
        return model

    def make_mlm_head(self, width: int) -> MlmHead:
        """Return an MLM head for states of this width; its output layer is tied to the token embeddings."""
        cfg = self.cfg
        return MlmHead(width, embedding_width(cfg), self.vocabulary.padded_size, cfg.layer_norm_eps, has_biases(cfg))

    def make_token_prediction(self, copies: bool = False) -> TokenPrediction:
        """Return a head with which the main network predicts originals; its output layer is tied to the token embeddings."""
        width = self.cfg.encoder_embed_dim
        copy_layer = nn.Linear(width, 1) if copies else None
        return TokenPrediction(self.make_mlm_head(width), copy_layer, str(self.cfg.kernels))

    def initialize(self) -> None:
        """Set the initial values of all parameters, and mark those without weight decay."""
        initialize(self, self.cfg.init_std, self.cfg.linear_init_std)
        if self.disentangled_embedding is not None:
            nn.init.zeros_(self.disentangled_embedding.delta.weight)
        mark_undecayed(self, also=("relative_position",))
        if self.cfg.encoder_lr_scale != 1:
            encoder = parameters_of([self.encoder, self.embed_tokens, self.disentangled_embedding])
            mark_lr_scale(encoder, self.cfg.encoder_lr_scale)
        lr_scale = getattr(self.cfg, "discriminator_lr_scale", 1.0)
        if lr_scale != 1:
            if self.cfg.encoder_lr_scale != 1:
                raise ValueError(
                    "--encoder-lr-scale and --discriminator-lr-scale (which the mini sizes set) are for the "
                    "same layers: set one of them to 1"
                )
            mark_lr_scale(self.discriminator_parameters(), lr_scale)

    def discriminator_parameters(self) -> list[nn.Parameter]:
        """Return what the discriminator alone uses above its embeddings: layers, relative positions and detection head.

        Not its other heads, nor the projection of its embeddings.
        """
        modules = [*self.discriminator.parts_above_embeddings, self.detection_head]
        # A second branch of TEAMS, beside or on top of the layers.
        modules += [getattr(self, name, None) for name in ("rtd_layer", "rtd_ffn", "mws_ffn")]
        generators = [getattr(self, name, None) for name in ("generator", "generators")]
        shared = {id(parameter) for parameter in parameters_of(generators)}
        return [parameter for parameter in parameters_of(modules) if id(parameter) not in shared]

    @property
    @abc.abstractmethod
    def encoder(self) -> TransformerEncoder:
        """The encoder that is fine-tuned, exported and loaded."""

    @property
    def encoder_embedding(self) -> nn.Embedding | DisentangledEmbedding:
        """The token embeddings of ``encoder``, with its table as ``weight`` [V,E]."""
        return self.embed_tokens if self.disentangled_embedding is None else self.disentangled_embedding

    @property
    @abc.abstractmethod
    def depth_names(self) -> list[str]:
        """Suffixes of the generator's log keys: the number of layers below each MLM head."""

    def generator_networks(self) -> list[GeneratorNetwork]:
        """Return the networks that predict masked tokens; none if the model has no MLM head on an encoder of its own."""
        return []

    @property
    def is_fast(self) -> bool:
        """Whether the output layer runs in chunks that are sampled at once, or as the reference implementation."""
        return self.cfg.kernels != "reference"

    @property
    def with_triton(self) -> bool:
        """Whether these chunks run in Triton on the model's current device."""
        return runs_in_triton(str(self.cfg.kernels), self.generator_embedding.weight.device)

    @property
    def generator_embedding(self) -> nn.Embedding:
        """The token embeddings that the generator uses, tied to its output layer."""
        return self.embed_tokens

    def mlm_loss(self, hidden: Tensor, bias: Tensor, originals: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the MLM loss of each position: softmax over the vocabulary of e(x) . hidden + bias (TEAMS Eq. 2).

        ``hidden`` [...,E] is the output of an MLM head, ``bias`` [V] -> -log p(original) [...] float32 in nats, and whether
        no token is more probable than the original [...] bool.
        """
        return cross_entropy(hidden, self.generator_embedding.weight, bias, originals, str(self.cfg.kernels))

    def mlm_loss_and_sample(
        self, hidden: Tensor, bias: Tensor, originals: Tensor, sampler: Sampler
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Compute ``mlm_loss`` in chunks, and what ``sampler`` samples from the same logits: tensors [...] or [...,S]."""
        embedding, positions = self.generator_embedding.weight, hidden.flatten(0, -2)
        nll, correct, sampled = output_layer(
            positions[None],
            embedding,
            bias[None],
            originals.flatten(),
            self.never_sampled_indices,
            sampler,
            self.with_triton,
        )
        shape = originals.shape
        return nll.view(shape), correct.view(shape), tuple(part.unflatten(0, shape) for part in sampled)

    def logits(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Compute all logits of the tied output layer: [...,E] -> [...,V] float32."""
        return linear(hidden, self.generator_embedding.weight, bias).float()

    def sampling_logits(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """Compute ``logits`` with -inf at special tokens and padding, which are never sampled."""
        return self.logits(hidden, bias).masked_fill(self.never_sampled_mask, float("-inf"))

    def extract_features(self, tokens: Tensor) -> Tensor:
        """Compute the hidden states of the encoder's last layer: [B,T] int64 -> [B,T,D]."""
        return self.encoder(self.encoder_embedding(tokens), tokens.eq(self.vocabulary.pad))[-1]

    @abc.abstractmethod
    def forward(self, batch: PretrainingBatch) -> PretrainingOutput:
        """Compute what the criterion of the objective needs; each model's ``forward`` reads as its algorithm."""

    def padding_mask(self, batch: PretrainingBatch) -> Tensor | None:
        """Return True at padding, [B,T] bool; None without any."""
        return batch.tokens.eq(self.vocabulary.pad) if batch.has_padding else None

    @abc.abstractmethod
    def predict_logits(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        """Compute all logits of each of the generator's K depths, to inspect a model rather than to train it: [K,B,M,V]
        float32 before special tokens are excluded, and mixture weights [B,M,K].
        """

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Prepare weights to be loaded: those of a model with plainly shared embeddings have a difference of 0."""
        super().upgrade_state_dict_named(state_dict, name)
        if self.disentangled_embedding is not None:
            state_dict.setdefault(DELTA, torch.zeros_like(self.disentangled_embedding.delta.weight))
        self.make_room(state_dict)
        if self.may_be_longer:
            self.repeat_positions(state_dict)

    def repeat_positions(self, state_dict: dict[str, Tensor]) -> None:
        """Extend the learned positions of a shorter model by copies (Longformer, Beltagy et al. 2020, section 5)."""
        for name, here in self.state_dict().items():
            saved = state_dict.get(name)
            if saved is None or not name.endswith("embed_positions.weight") or not 0 < len(saved) < len(here):
                continue
            state_dict[name] = repeated(saved, len(here))
            logger.info(f"{name}: positions {len(saved) + 1} to {len(here)} start as copies of the first {len(saved)}")

    def learned_positions(self) -> list[LearnedPositions]:
        return [module for module in self.modules() if isinstance(module, LearnedPositions)]

    def make_room(self, state_dict: dict[str, Tensor]) -> None:
        """Add the pooler of an imported model that is in ``state_dict``, for its values to be loaded."""
        width = self.cfg.encoder_embed_dim
        for name, shape in (("pooler_weight", (width, width)), ("pooler_bias", (width,))):
            if name in state_dict and state_dict[name].shape == shape:
                setattr(self, name, torch.zeros_like(state_dict[name], device=self.embed_tokens.weight.device))

    def train(self, mode: bool = True) -> "PretrainingModel":
        """Change the mode of all modules, unless the model has it already.

        fairseq does it twice an update, and a walk over all modules takes the host a millisecond. So ``train()`` does not reach
        a module that was put into evaluation mode by itself: ``eval()`` of the whole model comes first.
        """
        return self if self.training == mode else super().train(mode)

    def set_num_updates(self, num_updates: int) -> None:
        """Do nothing: a model whose modules depend on the number overrides it. fairseq would ask every module."""

    def max_positions(self) -> int:
        return self.cfg.max_positions


class SingleMlmModel(PretrainingModel):
    """A model in which one network with one MLM head predicts the masked tokens."""

    mlm_head: MlmHead

    @property
    @abc.abstractmethod
    def mlm_encoder(self) -> TransformerEncoder | None:
        """The network below the MLM head: the generator, or the encoder itself; None without a network of its own."""

    @property
    def generator_head(self) -> MlmHead:
        """The MLM head on ``mlm_encoder``."""
        return self.mlm_head

    def generator_networks(self) -> list[GeneratorNetwork]:
        if (encoder := self.mlm_encoder) is None:
            return []
        return [GeneratorNetwork(self.generator_embedding, encoder, {len(encoder.layers): self.generator_head})]

    @property
    def depth_names(self) -> list[str]:
        return [str(len(self.mlm_encoder.layers))]

    def encode_masked(self, batch: PretrainingBatch) -> Tensor:
        """Compute the last states of ``mlm_encoder`` at the masked positions: [B,M,D] with its own width D."""
        embeddings = self.generator_embedding(batch.masked_tokens)
        return self.mlm_encoder(embeddings, self.padding_mask(batch), last_positions=batch.masked_positions)[-1]

    def generate(self, batch: PretrainingBatch) -> Tensor:
        """Compute the output of the MLM head at the masked positions: [B,M,E]."""
        return self.generator_head(self.encode_masked(batch))

    @torch.no_grad()
    def predict_logits(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        return as_single_depth(self.logits(self.generate(batch), self.generator_head.bias))


def parameters_of(modules: Iterable[nn.Module | None]) -> Iterator[nn.Parameter]:
    return (parameter for module in modules if module is not None for parameter in module.parameters())


def as_single_depth(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits [B,M,V] of a single depth as [1,B,M,V], and its mixture weights [B,M,1], which are all 1."""
    return logits[None], logits.new_ones(*logits.shape[:-1], 1)
