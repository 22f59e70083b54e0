"""Electric: an energy-based cloze model trained by noise-contrastive estimation (Clark, thesis 2021, section 5.1).

Variants: ELECTRA-TT, a plain classifier of the same noise, and TwoTower, the cloze model alone (section 5.4.5); ELECTRA with
the two-tower generator, the control experiment of section 5.4.4.

Shapes: B sequences, T tokens, M sampled positions per sequence, E width of the token embeddings, V padded vocabulary size.
"""

import dataclasses
from dataclasses import dataclass

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.functional.output_layer import sampling_log_probs
from amos_fairseq.functional.positions import gather_positions, mark_positions, replace_positions
from amos_fairseq.functional.replaced_token_detection import energies_of, log_prob_of_original, noise_logits
from amos_fairseq.functional.sampling import ReplacementSampler, gumbel_max, gumbel_noise
from amos_fairseq.models.configuration import (
    DEBERTA_MINI,
    MINI,
    MODERN_MINI,
    EncoderConfig,
    PaddedVocabulary,
    generator_config,
    make_detection_head,
    register_sizes,
    transformer_config,
)
from amos_fairseq.models.pretraining import PretrainingBatch, PretrainingModel, PretrainingOutput, as_single_depth
from amos_fairseq.modules.encoder import TransformerConfig, TransformerEncoder
from amos_fairseq.modules.heads import CLASSIFICATION_HEADS, DenseDetectionHead
from amos_fairseq.setting_checks import setting

NO_ENCODER = (
    "--electric-variant two_tower has no encoder to fine-tune or to load: it scores text; give a model of the variant "
    "electric or electra_tt"
)


@dataclass
class ElectricConfig(EncoderConfig):
    """Electric-base (thesis Table 5.1)."""

    pooler_activation_fn: ChoiceEnum(list(CLASSIFICATION_HEADS)) = setting(
        "gelu", "activation of a classification head's dense layer; linear: a head without dense layer"
    )
    electric_variant: ChoiceEnum(["electric", "electra_tt", "electra_labels", "two_tower"]) = setting(
        "electric",
        "electric: noise-contrastive estimation; electra_tt: a plain classifier of the same noise; "
        "electra_labels: a plain classifier of replaced tokens (ELECTRA's labels); two_tower: the cloze model alone, "
        "which needs --generator-size 1 --generator-loss-tokens all",
    )
    generator_size: float = setting(
        1 / 3, "width, FFN width and attention heads of each tower, as a fraction of the encoder's", "above 0"
    )
    generator_loss_tokens: ChoiceEnum(["sampled", "all"]) = setting(
        "sampled",
        "tokens whose loss trains the two-tower generator: the sampled ones (thesis section 5.1.5), or all (the "
        "authors' code)",
    )
    # The task's own value. A task that does not pretrain has none, and the models of such a task do not use it.
    mask_prob: float = "${oc.select:task.mask_prob,0.15}"


@dataclass(frozen=True)
class ElectricOutput(PretrainingOutput):
    """``mlm_nll`` and ``mlm_correct`` are [B,T] if all tokens train the generator; the cloze model has nothing else."""

    is_scored: Tensor | None = None  # [B,T] bool, not special: included in losses, energies and scores
    # [B,T] bool, the label: was sampled, even if that is the original; with ``electra_labels`` the same as ``replaced``.
    is_noise: Tensor | None = None


class TwoTower(nn.Module):
    """The two-tower cloze model: predict each token from both sides (thesis section 5.1.5, after Baevski et al., 2019).

    One encoder attends to the left, another one to the right. The state of the first at t - 1 and of the second at t + 1 are
    concatenated for token t, so the prediction of a token never depends on the token itself. Learned states represent the
    positions before the first and after the last token. The towers share positions, token types and their LayerNorm.

    Args:
        shape: of one tower; ``attends_to`` is set here.
    """

    def __init__(self, shape: TransformerConfig):
        super().__init__()
        self.past = dataclasses.replace(shape, attends_to="past").build()
        self.future = dataclasses.replace(shape, attends_to="future").build()
        self.future.share_embeddings(self.past)
        self.boundaries = nn.Embedding(2, shape.width)  # before the first token, after the last one

    def share_embeddings(self, other: TransformerEncoder) -> None:
        """Let both towers use the positions, token types and embedding LayerNorm of ``other``."""
        self.past.share_embeddings(other)
        self.future.share_embeddings(other)

    def forward(self, embeddings: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return states [B,T,2G]; entry t depends on all tokens but t.

        Args:
            embeddings: [B,T,E] token embeddings.
            padding_mask: [B,T] bool, True at padding, which follows the text; None if there is none.
        """
        first, last = self.boundaries.weight.expand(len(embeddings), 2, -1).split(1, dim=1)  # each [B,1,G]
        past_states = self.past(embeddings, padding_mask)[-1]  # [B,T,G], entry t depends on tokens up to t
        future_states = self.future(embeddings, padding_mask)[-1]  # entry t depends on tokens from t on
        left = torch.cat([first, past_states[:, :-1]], dim=1)
        right = torch.cat([future_states[:, 1:], last], dim=1)
        if padding_mask is not None:
            is_last = torch.cat([padding_mask[:, 1:], torch.ones_like(padding_mask[:, :1])], dim=1)
            right = torch.where(is_last.unsqueeze(-1), last, right)
        return torch.cat([left, right], dim=-1)


@register_model("electric", dataclass=ElectricConfig)
class ElectricModel(PretrainingModel):
    """A small two-tower generator of noise, and a discriminator whose head computes the energies.

    Token and position embeddings, token types and their LayerNorm are shared by all networks; narrower towers project
    them. Nothing is masked: the input of the towers is the original text, and the output at a token does not depend on
    that token. The MLM head, tied to the token embeddings, replaces the thesis's single matrix W on top of both towers.
    """

    def __init__(self, cfg: ElectricConfig, vocabulary: PaddedVocabulary):
        super().__init__(cfg, vocabulary)
        if cfg.electric_variant == "two_tower" and (cfg.generator_size != 1 or cfg.generator_loss_tokens != "all"):
            needed = "--generator-size 1 --generator-loss-tokens all"
            raise ValueError(f"--electric-variant two_tower has no discriminator and samples no tokens: give {needed}")
        self.variant = str(cfg.electric_variant)
        config = generator_config(cfg)
        self.discriminator = None if self.variant == "two_tower" else transformer_config(cfg).build()
        self.generator = TwoTower(config)
        self.mlm_head = self.make_mlm_head(2 * config.width)
        if self.discriminator is not None:
            self.generator.share_embeddings(self.discriminator)
            self.detection_head = make_detection_head(cfg, DenseDetectionHead)
        self.initialize()

    @property
    def encoder(self) -> TransformerEncoder:
        """The discriminator; raises ``UserError`` for TwoTower, which has no bidirectional encoder."""
        if self.discriminator is None:
            raise UserError(NO_ENCODER)
        return self.discriminator

    @property
    def depth_names(self) -> list[str]:
        return [str(len(self.generator.past.layers))]

    def forward(self, batch: PretrainingBatch) -> ElectricOutput:
        """Predict, sample, corrupt, classify as noise or text (Algorithm 2).

        Noise is sampled at the masked positions; ``masked_tokens`` is not used.
        """
        tokens, positions, weights = batch.tokens, batch.masked_positions, batch.masked_weights
        padding_mask, is_scored = self.padding_mask(batch), self.is_scored(tokens)
        hidden = self.generate(tokens, padding_mask)
        if self.discriminator is None:
            return ElectricOutput(*self.mlm_loss(hidden, self.mlm_head.bias, tokens), is_scored=is_scored)
        nll, correct, sampled = self.predict_and_sample(hidden, tokens, positions)
        noised = replace_positions(tokens, positions, sampled, weights)
        states = self.discriminator(self.embed_tokens(noised), padding_mask)[-1]
        logits = self.detection_head(states)
        if self.variant == "electric":
            logits = noise_logits(logits, self.noise_log_probs(hidden, noised), self.cfg.mask_prob)
        replaced, is_sampled = noised.ne(tokens), mark_positions(positions, weights, tokens.size(1))
        return ElectricOutput(
            mlm_nll=nll,
            mlm_correct=correct,
            is_scored=is_scored,
            sampled_tokens=sampled,
            corrupted_tokens=noised,
            replaced=replaced,
            is_noise=replaced if self.variant == "electra_labels" else is_sampled,
            rtd_logits=logits,
            rtd_states=states,
        )

    def generate(self, tokens: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Compute the output of the MLM head: [B,T] int64 -> [B,T,E], entry t from all tokens but t."""
        return self.mlm_head(self.generator(self.embed_tokens(tokens), padding_mask))

    def is_scored(self, tokens: Tensor) -> Tensor:
        """Return True at tokens that are not special: [B,T] bool."""
        return ~self.never_sampled_mask[tokens]

    def predict_and_sample(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the output of ``mlm_loss`` for all tokens [B,T] or those at ``positions`` [B,M], and sample noise for the
        latter, [B,M] int64; ``hidden`` [B,T,E] is the output of ``generate``.
        """
        bias, at_sampled = self.mlm_head.bias, gather_positions(hidden, positions)
        if self.cfg.generator_loss_tokens == "all":
            return *self.mlm_loss(hidden, bias, tokens), self.sample(at_sampled)
        originals = tokens.gather(1, positions)
        if not self.is_fast:
            return *self.mlm_loss(at_sampled, bias, originals), self.sample(at_sampled)
        nll, correct, (sampled,) = self.mlm_loss_and_sample(at_sampled, bias, originals, ReplacementSampler())
        return nll, correct, sampled

    @torch.no_grad()
    def sample(self, hidden: Tensor) -> Tensor:
        """Sample noise [B,M] from the generator's softmax without special tokens and padding, without a gradient."""
        if self.is_fast:
            any_target = hidden.new_zeros(hidden.shape[:-1], dtype=torch.int64)
            return self.mlm_loss_and_sample(hidden, self.mlm_head.bias, any_target, ReplacementSampler())[-1][0]
        logits = self.sampling_logits(hidden, self.mlm_head.bias)
        return gumbel_max(logits, gumbel_noise(logits))

    @torch.no_grad()
    def noise_log_probs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Compute log q(token | rest) of the distribution that ``sample`` samples from, without a gradient.

        ``hidden`` [B,T,E] is the output of ``generate`` -> [B,T] float32, nats; 0 at special tokens, never sampled.
        """
        log_probs = sampling_log_probs(
            hidden.flatten(0, 1),
            self.embed_tokens.weight,
            self.mlm_head.bias,
            tokens.flatten(),
            self.never_sampled_indices,
            self.with_triton,
        )
        return log_probs.view_as(tokens).masked_fill(~self.is_scored(tokens), 0.0)

    @torch.no_grad()
    def token_log_probs(self, tokens: Tensor) -> Tensor:
        """Compute log p(token | rest) of every token in one pass, the terms of the pseudo-log-likelihood (section 5.4.5).

        Electric: -E, whose exponentials sum to about 1 over the vocabulary after training (section 5.1.3). ELECTRA-TT:
        log q + log(p / (1 - p)) + log((1 - D) / D) with D the probability of "noise" (there, the thesis writes D for the
        probability of "original"). ``electra_labels``: ``log_prob_of_original``, from the probability of "replaced".
        TwoTower: log q.

        Args:
            tokens: [B,T] int64, padded at the end.

        Returns:
            [B,T] float32, nats; 0 at special tokens and padding.
        """
        padding_mask = tokens.eq(self.vocabulary.pad)
        if self.variant != "electric":
            log_q = self.noise_log_probs(self.generate(tokens, padding_mask), tokens)
            if self.discriminator is None:
                return log_q
        logits = self.detection_head(self.extract_features(tokens))
        if self.variant == "electra_labels":
            log_probs = log_prob_of_original(logits, log_q, self.cfg.mask_prob)
        else:
            log_probs = -(energies_of(logits, log_q, self.cfg.mask_prob) if self.variant == "electra_tt" else logits)
        return log_probs.masked_fill(~self.is_scored(tokens), 0.0)

    @torch.no_grad()
    def predict_logits(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        hidden = gather_positions(self.generate(batch.tokens, self.padding_mask(batch)), batch.masked_positions)
        return as_single_depth(self.logits(hidden, self.mlm_head.bias))


register_sizes(
    "electric",
    tiny={"generator_size": 0.5, "linear_init_std": 0.1},
    mini={"generator_size": 0.25, **MINI},
    modern_mini={"generator_size": 0.25, **MODERN_MINI},
    deberta_mini={"generator_size": 0.25, **DEBERTA_MINI},
    deberta_large={"generator_size": 0.25},
    small={"embedding_dim": 128, "generator_size": 0.25},
    large={"generator_size": 0.25},
    modern_large={"generator_size": 0.25},
)
