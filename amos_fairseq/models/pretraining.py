"""What the models of all objectives share: how they are built, their vocabulary, and the encoder that stays when
pretraining is over.

Shapes: B sequences, T tokens, M masked positions a sequence, D width of the encoder, E of the token embeddings, V rows of
the vocabulary.
"""

import abc
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn
from torch.nn.functional import linear

from amos_fairseq.errors import UserError
from amos_fairseq.functional.cross_entropy import linear_cross_entropy
from amos_fairseq.functional.output_layer import Sampler, chunked_cross_entropy, output_layer, runs_in_triton
from amos_fairseq.models.configuration import EncoderConfig, check_encoder, embedding_width
from amos_fairseq.models.embedding_rows import EmbeddingRows
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.modules.heads import MlmHead
from amos_fairseq.modules.initialization import initialize, mark_undecayed


class PretrainingModel(BaseFairseqModel, abc.ABC):
    """A model that learns from masked blocks; its ``encoder`` reads ``embed_tokens`` and is what a user keeps.

    A subclass adds its parts and calls :meth:`initialize` when all are there.

    Raises:
        ValueError: the settings describe no encoder.
    """

    # What other tasks get of it.
    fine_tuned_model: type[FineTunedModel] = FineTunedModel

    def __init__(self, cfg: EncoderConfig, rows: EmbeddingRows):
        super().__init__()
        check_encoder(cfg)
        self.cfg = cfg
        self.rows = rows
        self.embed_tokens = nn.Embedding(rows.num_rows, embedding_width(cfg), padding_idx=rows.pad)
        self.register_buffer("never_sampled_mask", rows.never_sampled_mask(), persistent=False)
        self.register_buffer("never_sampled_indices", rows.never_sampled_indices(), persistent=False)

    @classmethod
    def build_model(cls, cfg: EncoderConfig, task: Any) -> BaseFairseqModel:
        """The model itself for a task that pretrains, the encoder with room for a head for every other task.

        Raises:
            UserError: the settings describe no model.
        """
        rows = EmbeddingRows.of(task.source_dictionary)
        try:
            # Only a task that masks blocks knows which share of a block it masks.
            return cls(cfg, rows) if hasattr(task, "masked_share") else cls.fine_tuned_model(cfg, rows)
        except ValueError as error:
            raise UserError(f"the model cannot be built: {error}") from error

    def initialize(self) -> None:
        """Initial values of all parts, and the marks of what is not decayed."""
        initialize(self, self.cfg.init_std, self.cfg.linear_init_std)
        mark_undecayed(self, also=("relative_position",))

    @property
    @abc.abstractmethod
    def encoder(self) -> TransformerEncoder:
        """The encoder to keep."""

    @property
    @abc.abstractmethod
    def depth_names(self) -> list[str]:
        """Suffixes of the log keys of what guesses masked tokens: its number of layers, one for each MLM head."""

    @property
    def is_fast(self) -> bool:
        """Whether the output layer runs in chunks that are sampled from at once, or as its definition reads."""
        return str(self.cfg.kernels) != "reference"

    @property
    def with_triton(self) -> bool:
        """Whether these chunks run in Triton, on the device where the model is now."""
        return runs_in_triton(str(self.cfg.kernels), self.generator_embedding.weight.device)

    @property
    def generator_embedding(self) -> nn.Embedding:
        """What guesses masked tokens reads these token embeddings, and its output layer is tied to them."""
        return self.embed_tokens

    def mlm_loss(self, hidden: Tensor, bias: Tensor, originals: Tensor) -> tuple[Tensor, Tensor]:
        """How well ``hidden`` [...,E], the output of an MLM head, tells the ``originals`` [...] int64.

        Returns:
            -log p(original) [...] float32 in nats, and whether it is the best guess [...] bool.
        """
        embedding = self.generator_embedding.weight
        if not self.is_fast:
            return linear_cross_entropy(hidden, embedding, bias, originals)
        return chunked_cross_entropy(hidden, embedding, bias, originals, self.with_triton)

    def mlm_loss_and_sample(
        self, hidden: Tensor, bias: Tensor, originals: Tensor, sampler: Sampler
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """As :meth:`mlm_loss`, the fast way, and what ``sampler`` draws from the same logits: tensors [...] or [...,S]."""
        embedding, positions = self.generator_embedding.weight, hidden.flatten(0, -2)
        nll, correct, drawn = output_layer(
            positions[None],
            embedding,
            bias[None],
            originals.flatten(),
            self.never_sampled_indices,
            sampler,
            self.with_triton,
        )
        shape = originals.shape
        return nll.view(shape), correct.view(shape), tuple(part.unflatten(0, shape) for part in drawn)

    def logits(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """The output layer, tied to the token embeddings: [...,E] -> [...,V] float32."""
        return linear(hidden, self.generator_embedding.weight, bias).float()

    def sampling_logits(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """As :meth:`logits`, with -inf where no generator may propose: special tokens and padding rows."""
        return self.logits(hidden, bias).masked_fill(self.never_sampled_mask, float("-inf"))

    def extract_features(self, tokens: Tensor) -> Tensor:
        """Hidden states of the last layer of the encoder: [B,T] int64 -> [B,T,D]."""
        return self.encoder(self.embed_tokens(tokens), tokens.eq(self.rows.pad))[-1]

    def max_positions(self) -> int:
        return self.cfg.max_positions


class SingleGuesserModel(PretrainingModel):
    """A model in which one network with one MLM head guesses the masked tokens."""

    mlm_head: MlmHead

    @property
    @abc.abstractmethod
    def guesser(self) -> TransformerEncoder:
        """The network that reads masked text: a generator, or the encoder itself."""

    @property
    def depth_names(self) -> list[str]:
        return [str(len(self.guesser.layers))]

    def read_masked(self, masked_tokens: Tensor, masked_positions: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Last states of the guesser at the masked positions: [B,M,D] of its own width."""
        embeddings = self.generator_embedding(masked_tokens)
        return self.guesser(embeddings, padding_mask, last_positions=masked_positions)[-1]

    def generate(self, masked_tokens: Tensor, masked_positions: Tensor, padding_mask: Tensor | None) -> Tensor:
        """The guesser after its MLM head, at the masked positions: [B,M,E]."""
        return self.mlm_head(self.read_masked(masked_tokens, masked_positions, padding_mask))

    @torch.no_grad()
    def predict_logits(
        self, tokens: Tensor, masked_tokens: Tensor, masked_positions: Tensor, masked_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What :meth:`AmosModel.predict_logits` returns, for one depth: logits [1,B,M,V] and weights [B,M,1]."""
        hidden = self.generate(masked_tokens, masked_positions, tokens.eq(self.rows.pad))
        return as_single_depth(self.logits(hidden, self.mlm_head.bias))


def as_single_depth(logits: Tensor) -> tuple[Tensor, Tensor]:
    """What one depth proposes, [B,M,V], as the proposal of several: [1,B,M,V], and its weights, all 1: [B,M,1]."""
    return logits[None], logits.new_ones(*logits.shape[:-1], 1)
