"""Electric: an energy-based cloze model that learns by noise-contrastive estimation (Clark, thesis 2021, section 5.1).

Beside it ELECTRA-TT, a plain classifier of the same noise, and TwoTower, the cloze model alone (section 5.4.5).

Shapes: B sequences, T tokens, M sampled positions a sequence, E width of the token embeddings, G width of a tower, V rows of
the vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import BaseFairseqModel, register_model
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.functional.nce import energies_of, noise_logits
from amos_fairseq.functional.output_layer import sampling_log_probs
from amos_fairseq.functional.positions import gather_positions, replace_positions
from amos_fairseq.functional.samplers import ReplacementSampler
from amos_fairseq.functional.sampling import gumbel_max, gumbel_noise
from amos_fairseq.models.configuration import EncoderConfig, embedding_width, encoder_shape, register_sizes
from amos_fairseq.models.electra_config import generator_shape
from amos_fairseq.models.embedding_rows import EmbeddingRows
from amos_fairseq.models.pretraining import PretrainingModel, as_single_depth
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.modules.generators import TwoTower
from amos_fairseq.modules.heads import POOLER_ACTIVATIONS, DenseDetectionHead, MlmHead

NO_ENCODER = (
    "--electric-variant two_tower has no encoder to fine-tune or to load: it scores text; give a model of the variant "
    "electric or electra_tt"
)


@dataclass
class ElectricConfig(EncoderConfig):
    """Electric-base (thesis Table 5.1)."""

    pooler_activation_fn: ChoiceEnum(list(POOLER_ACTIVATIONS)) = field(
        default="gelu", metadata={"help": "activation of a classification head"}
    )
    electric_variant: ChoiceEnum(["electric", "electra_tt", "two_tower"]) = field(
        default="electric",
        metadata={
            "help": "electric: noise-contrastive estimation; electra_tt: a plain classifier of the same noise; two_tower: "
            "the cloze model alone, which needs --generator-size 1 --generator-loss-tokens all"
        },
    )
    generator_size: float = field(
        default=1 / 3,
        metadata={"help": "width, FFN width and attention heads of each tower, as a part of the encoder's"},
    )
    generator_loss_tokens: ChoiceEnum(["sampled", "all"]) = field(
        default="sampled", metadata={"help": "tokens from which the two-tower generator learns"}
    )
    # The task's own; a task that does not pretrain has none, and nothing that it builds reads the number.
    mask_prob: float = "${oc.select:task.mask_prob,0.15}"


class ElectricOutput(NamedTuple):
    """Everything that the criterion and the log read; the last five are None in the cloze model alone."""

    mlm_nll: Tensor  # [B,M], or [B,T] where all tokens train the generator; float32, -log q(original), nats
    mlm_correct: Tensor  # of the same shape, bool, the best guess is the original
    is_scored: Tensor  # [B,T] bool, not special: what losses, energies and scores are about
    sampled_tokens: Tensor | None = None  # [B,M] int64
    corrupted_tokens: Tensor | None = None  # [B,T] int64, what the discriminator reads
    replaced: Tensor | None = None  # [B,T] bool, differs from the original
    is_noise: Tensor | None = None  # [B,T] bool, was sampled, even where that is the original: the label
    rtd_logits: Tensor | None = None  # [B,T] float32, positive for "noise"


@register_model("electric", dataclass=ElectricConfig)
class ElectricModel(PretrainingModel):
    """A small two-tower generator of noise, and the discriminator whose head gives the energies.

    Token and position embeddings, token types and their LayerNorm are shared by all; towers narrower than them project
    them. Nothing is masked: the towers read the original text, and none of their outputs has seen its own token. Where the
    thesis has one matrix W on both towers stands the MLM head of all models here, tied to the token embeddings.
    """

    def __init__(self, cfg: ElectricConfig, rows: EmbeddingRows):
        super().__init__(cfg, rows)
        check_variant(cfg)
        self.variant = str(cfg.electric_variant)
        shape = generator_shape(cfg)
        self.discriminator = None if self.variant == "two_tower" else TransformerEncoder(encoder_shape(cfg))
        self.generator = TwoTower(shape)
        self.mlm_head = MlmHead(2 * shape.width, embedding_width(cfg), rows.num_rows, cfg.layer_norm_eps)
        if self.discriminator is not None:
            self.generator.share_embeddings(self.discriminator)
            self.detection_head = DenseDetectionHead(cfg.encoder_embed_dim)
        self.initialize()

    @classmethod
    def build_model(cls, cfg: ElectricConfig, task: Any) -> BaseFairseqModel:
        """As for all models; :class:`UserError` where a task asks TwoTower for an encoder."""
        model = super().build_model(cfg, task)
        if str(cfg.electric_variant) == "two_tower" and not isinstance(model, cls):
            raise UserError(NO_ENCODER)
        return model

    @property
    def encoder(self) -> TransformerEncoder:
        """The discriminator; :class:`UserError` for TwoTower, which has no encoder that reads both sides."""
        if self.discriminator is None:
            raise UserError(NO_ENCODER)
        return self.discriminator

    @property
    def depth_names(self) -> list[str]:
        return [str(self.generator.num_layers)]

    def forward(
        self,
        tokens: Tensor,
        masked_tokens: Tensor,
        masked_positions: Tensor,
        masked_weights: Tensor,
        has_padding: bool = True,
    ) -> ElectricOutput:
        """Guess, sample, corrupt, tell noise from text (Algorithm 2); the arguments are those of :meth:`AmosModel.forward`.

        The masked positions are those that are sampled; ``masked_tokens`` is not read.
        """
        padding_mask = tokens.eq(self.rows.pad) if has_padding else None
        is_scored = self.is_scored(tokens)
        hidden = self.read(tokens, padding_mask)
        if self.discriminator is None:
            return ElectricOutput(*self.mlm_loss(hidden, self.mlm_head.bias, tokens), is_scored)
        nll, correct, sampled = self.guess_and_sample(hidden, tokens, masked_positions)
        noised = replace_positions(tokens, masked_positions, sampled, masked_weights)
        logits = self.detection_head(self.discriminator(self.embed_tokens(noised), padding_mask)[-1])
        if self.variant == "electric":
            logits = noise_logits(logits, self.noise_log_probs(hidden, noised), self.cfg.mask_prob)
        nothing = torch.zeros_like(tokens)
        return ElectricOutput(
            mlm_nll=nll,
            mlm_correct=correct,
            is_scored=is_scored,
            sampled_tokens=sampled,
            corrupted_tokens=noised,
            replaced=noised.ne(tokens),
            is_noise=replace_positions(nothing, masked_positions, torch.ones_like(sampled), masked_weights).bool(),
            rtd_logits=logits,
        )

    def read(self, tokens: Tensor, padding_mask: Tensor | None) -> Tensor:
        """The generator after its head: [B,T] int64 -> [B,T,E], entry t from all tokens but t."""
        return self.mlm_head(self.generator(self.embed_tokens(tokens), padding_mask))

    def is_scored(self, tokens: Tensor) -> Tensor:
        """True at the tokens that are no special ones: [B,T] bool."""
        return ~self.never_sampled_mask[tokens]

    def guess_and_sample(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-log q(original) and whether it is the best guess, of all tokens [B,T] or those at ``positions`` [B,M], and noise
        for these, [B,M]; ``hidden`` [B,T,E] as from :meth:`read`."""
        bias, at_sampled = self.mlm_head.bias, gather_positions(hidden, positions)
        if str(self.cfg.generator_loss_tokens) == "all":
            return *self.mlm_loss(hidden, bias, tokens), self.sample(at_sampled)
        originals = tokens.gather(1, positions)
        if not self.is_fast:
            return *self.mlm_loss(at_sampled, bias, originals), self.sample(at_sampled)
        nll, correct, (sampled,) = self.mlm_loss_and_sample(at_sampled, bias, originals, ReplacementSampler())
        return nll, correct, sampled

    @torch.no_grad()
    def sample(self, hidden: Tensor) -> Tensor:
        """Noise tokens [B,M] from the generator's softmax without special tokens and padding rows; no gradient passes."""
        if self.is_fast:
            no_matter = hidden.new_zeros(hidden.shape[:-1], dtype=torch.int64)
            return self.mlm_loss_and_sample(hidden, self.mlm_head.bias, no_matter, ReplacementSampler())[-1][0]
        logits = self.sampling_logits(hidden, self.mlm_head.bias)
        return gumbel_max(logits, gumbel_noise(logits))

    @torch.no_grad()
    def noise_log_probs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """log q(token | rest) of the distribution that :meth:`sample` draws from, without a gradient.

        Args:
            hidden: [B,T,E] as from :meth:`read`.
            tokens: [B,T] int64.

        Returns:
            [B,T] float32, nats; 0 at special tokens, which are never sampled.
        """
        log_probs = sampling_log_probs(
            hidden.flatten(0, 1), self.embed_tokens.weight, self.mlm_head.bias, tokens.flatten(), self.never_sampled_indices,
            self.with_triton,
        )  # fmt: skip
        return log_probs.view_as(tokens).masked_fill(~self.is_scored(tokens), 0.0)

    @torch.no_grad()
    def token_log_probs(self, tokens: Tensor) -> Tensor:
        """log p(token | rest) of every token in one pass, the summands of the pseudo-log-likelihood (section 5.4.5).

        Electric: -E, whose exponentials sum to about 1 over the vocabulary after training (section 5.1.3). ELECTRA-TT:
        log q + log(p / (1 - p)) + log((1 - D) / D) with D the probability of "noise" (the thesis writes D for that of
        "original" there). TwoTower: log q.

        Args:
            tokens: [B,T] int64, padded behind the text.

        Returns:
            [B,T] float32, nats; 0 at special tokens and padding.
        """
        padding_mask = tokens.eq(self.rows.pad)
        if self.variant != "electric":
            log_q = self.noise_log_probs(self.read(tokens, padding_mask), tokens)
            if self.discriminator is None:
                return log_q
        energies = self.detection_head(self.extract_features(tokens))
        if self.variant == "electra_tt":
            energies = energies_of(energies, log_q, self.cfg.mask_prob)
        return (-energies).masked_fill(~self.is_scored(tokens), 0.0)

    @torch.no_grad()
    def predict_logits(
        self, tokens: Tensor, masked_tokens: Tensor, masked_positions: Tensor, masked_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What :meth:`AmosModel.predict_logits` returns, for one depth: logits [1,B,M,V] and weights [B,M,1]."""
        hidden = gather_positions(self.read(tokens, tokens.eq(self.rows.pad)), masked_positions)
        return as_single_depth(self.logits(hidden, self.mlm_head.bias))


def check_variant(cfg: ElectricConfig) -> None:
    """Raise ValueError where TwoTower, which samples nothing, is given settings of a sampler."""
    if str(cfg.electric_variant) != "two_tower":
        return
    if cfg.generator_size != 1 or str(cfg.generator_loss_tokens) != "all":
        raise ValueError(
            "--electric-variant two_tower has no discriminator and samples no tokens: give --generator-size 1 "
            "--generator-loss-tokens all"
        )


register_sizes(
    "electric",
    tiny={"generator_size": 0.5, "linear_init_std": 0.1},
    small={"embedding_dim": 128, "generator_size": 0.25},
    base={"generator_size": 1 / 3},
    large={"generator_size": 0.25},
)
