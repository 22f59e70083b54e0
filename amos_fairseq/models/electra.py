"""ELECTRA: a small generator and a discriminator of replaced tokens (Clark, thesis 2021, sections 5.1 and 5.3.1).

The variants of the thesis are settings of the same model: weight sharing (5.3.1), a generator without context (5.3.2), a
frozen generator (5.3.3; models/frozen_generator.py), a generator trained by reward (5.3.4), other objectives of the main
network (5.4.3), a sampling temperature, and replacement tokens that differ from the original (5.5).

Shapes: B sequences, T tokens, M masked positions per sequence, D width of a network, E width of the token embeddings,
V padded vocabulary size.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from amos_fairseq.functional.positions import gather_positions, replace_positions
from amos_fairseq.functional.sampling import ReplacementSampler, forbid_tokens, gumbel_max, gumbel_noise
from amos_fairseq.models.configuration import (
    DEBERTA,
    DEBERTA_MINI,
    MINI,
    MODERN_MINI,
    PaddedVocabulary,
    embedding_width,
    generator_config,
    make_detection_head,
    register_sizes,
    transformer_config,
)
from amos_fairseq.models.frozen_generator import FROZEN, ReplacementConfig, ReplacementModel, refuse_settings
from amos_fairseq.models.pretraining import (
    GeneratorNetwork,
    PretrainingBatch,
    PretrainingOutput,
    SingleMlmModel,
    as_single_depth,
)
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.modules.heads import CLASSIFICATION_HEADS, DenseDetectionHead, MlmHead, TokenPredictions
from amos_fairseq.setting_checks import setting


@dataclass
class ElectraConfig(ReplacementConfig):
    """ELECTRA-base (thesis Table 5.1); every variant is a setting of the same model."""

    pooler_activation_fn: ChoiceEnum(list(CLASSIFICATION_HEADS)) = setting(
        "gelu", "activation of a classification head's dense layer; linear: a head without dense layer"
    )
    generator: ChoiceEnum(["masked_lm", "unigram", "uniform"]) = setting(
        "masked_lm",
        "distribution of the replacement tokens: a masked language model, the token frequencies of the training "
        "text (of the first run, where weights are loaded), or the uniform distribution",
    )
    generator_size: float = setting(
        1 / 3, "width, FFN width and attention heads of the generator, as a fraction of the encoder's", "above 0"
    )
    generator_layers: int = setting(0, "layers of the generator; 0: as many as the encoder", "0 or more")
    disallow_true_token: bool = setting(False, "never sample the original token as a replacement (section 5.5)")
    share_weights: ChoiceEnum(["none", "embeddings", "all"]) = setting(
        "embeddings", "weights that generator and discriminator share (section 5.3.1)"
    )
    adversarial: bool = setting(False, "train the generator by REINFORCE to mislead the discriminator (section 5.3.4)")
    main_objective: ChoiceEnum(["detection", "replace_mlm", "all_tokens_mlm"]) = setting(
        "detection",
        "objective of the main network: detect replaced tokens, or predict the originals at masked positions or "
        "of all tokens (section 5.4.3)",
    )


@dataclass(frozen=True)
class ElectraOutput(PretrainingOutput):
    """What the variants add."""

    predictions: TokenPredictions | None = None  # of a main network that predicts the originals
    sampled_log_probs: Tensor | None = None  # [B,M] float32, log q(sampled) of a generator that learns by reward
    baseline_logits: Tensor | None = None  # [B,M] float32, for the same generator


class GeneratorOutput(NamedTuple):
    """Predictions and samples of the generator; a field is None if the generator has no context or no reward."""

    nll: Tensor | None  # [B,M] float32, -log p(original), nats
    correct: Tensor | None  # [B,M] bool, no token is more probable than the original
    sampled: Tensor  # [B,M] int64
    sampled_log_probs: Tensor | None = None  # [B,M] float32, log q(sampled) of a generator that learns by reward
    baseline_logits: Tensor | None = None  # [B,M] float32, for the same generator


class TokenNoise(nn.Module):
    """A generator without input: one distribution over the vocabulary for every position (thesis section 5.3.2).

    It holds a count for each token of the vocabulary: 1, until ``set_token_counts`` sets the frequencies of a corpus. The
    counts are saved with the model, so a checkpoint samples without its corpus. They are integers, which no cast to half
    precision rounds.
    """

    def __init__(self, vocabulary_size: int):
        super().__init__()
        self.register_buffer("counts", torch.ones(vocabulary_size, dtype=torch.int64))

    def forward(self, positions: Tensor) -> Tensor:
        """Return logits for each of ``positions`` [...]: [...,V] float32, an expanded view of one row."""
        return self.counts.float().log().expand(*positions.shape, -1)


@register_model("electra", dataclass=ElectraConfig)
class ElectraModel(ReplacementModel, SingleMlmModel):
    """A generator that is narrower than the discriminator, and shares its embeddings (section 5.3.1).

    Token and position embeddings, token types and their LayerNorm are shared; the generator projects them to its width,
    and its output layer is tied to the token embeddings. With ``--share-weights none`` the generator has its own copies,
    with ``all`` it is the discriminator. ``mlm_head`` belongs to the generator. A generator without context has no
    network: ``generator`` is None, and ``token_noise`` gives its distribution. With ``--generator-checkpoint`` both are None.
    """

    def __init__(self, cfg: ElectraConfig, vocabulary: PaddedVocabulary):
        super().__init__(cfg, vocabulary)
        check_settings(cfg)
        self.discriminator = transformer_config(cfg).build()
        self._add_generator()
        self._add_main_head()
        self.initialize()
        self.awaits_token_counts = cfg.generator == "unigram"  # until weights are loaded, or tokens are counted

    def _add_generator(self) -> None:
        cfg, vocabulary = self.cfg, self.vocabulary
        self.generator: TransformerEncoder | None = None
        self.generator_embed_tokens: nn.Embedding | None = None
        self.token_noise: TokenNoise | None = None
        if cfg.generator != "masked_lm":
            self.token_noise = TokenNoise(vocabulary.padded_size)
        if self.token_noise is not None or cfg.generator_checkpoint:
            return
        config = generator_config(cfg, cfg.generator_layers)
        if cfg.encoder == DEBERTA:
            config = dataclasses.replace(config, has_mask_decoder=True)
        self.generator = self.discriminator if cfg.share_weights == "all" else config.build()
        if cfg.share_weights == "embeddings":
            self.generator.share_embeddings(self.discriminator)
        if cfg.share_weights == "none":
            self.generator_embed_tokens = vocabulary.embedding(embedding_width(cfg))
        self.mlm_head = self.make_mlm_head(config.width)
        if cfg.adversarial:
            self.baseline = nn.Linear(config.width, 1, bias=False)

    def _add_main_head(self) -> None:
        cfg = self.cfg
        self.detection_head = self.token_prediction = None
        if cfg.main_objective == "detection":
            self.detection_head = make_detection_head(cfg, DenseDetectionHead)
        if cfg.main_objective != "detection" or cfg.encoder_mlm_weight:
            self.token_prediction = self.make_token_prediction(copies=cfg.main_objective == "all_tokens_mlm")

    @property
    def encoder(self) -> TransformerEncoder:
        return self.discriminator

    @property
    def mlm_encoder(self) -> TransformerEncoder | None:
        return self.generator if self.frozen_generator is None else self.frozen_generator.encoders[0]

    @property
    def generator_embedding(self) -> nn.Embedding:
        return self.generator_embed_tokens or super().generator_embedding

    @property
    def generator_head(self) -> MlmHead:
        return self.mlm_head if self.frozen_generator is None else self.frozen_generator.heads[0][0]

    @property
    def depth_names(self) -> list[str]:
        return super().depth_names if self.token_noise is None else [str(self.cfg.generator)]

    @property
    def learns_by_likelihood(self) -> bool:
        """Whether the generator is trained as a masked language model."""
        return self.generator is not None and not self.cfg.adversarial

    def choose_networks(self, networks: list[GeneratorNetwork]) -> list[GeneratorNetwork]:
        if len({id(network.embedding) for network in networks}) > 1:
            raise ValueError("electra has one generator: give one file as --generator-checkpoint, or train amos")
        *_, (depth, head) = networks[-1].heads.items()
        return [networks[-1]._replace(heads={depth: head})]

    def forward(self, batch: PretrainingBatch) -> ElectraOutput:
        features = None if self.token_noise is not None else self.encode_masked(batch)
        generated = self.predict_and_sample(features, batch.originals)
        corrupted = replace_positions(batch.tokens, batch.masked_positions, generated.sampled, batch.masked_weights)
        states = self.discriminator(self.encoder_embedding(corrupted), self.padding_mask(batch))[-1]
        return ElectraOutput(
            mlm_nll=generated.nll,
            mlm_correct=generated.correct,
            sampled_tokens=generated.sampled,
            corrupted_tokens=corrupted,
            replaced=corrupted.ne(batch.tokens),
            rtd_logits=None if self.detection_head is None else self.detection_head(states),
            predictions=None if self.token_prediction is None else self.predict(states, corrupted, batch),
            learns_by_likelihood=self.learns_by_likelihood,
            sampled_log_probs=generated.sampled_log_probs,
            baseline_logits=generated.baseline_logits,
            generator_temperature=self.logged_temperature,
            rtd_states=None if self.detection_head is None else states,
        )

    def predict_and_sample(self, features: Tensor | None, originals: Tensor) -> GeneratorOutput:
        """Compute the generator's loss and sample the replacement tokens.

        A generator trained by reward needs a gradient through all probabilities, and one without context has no output
        layer. Both compute all logits; only the other generators have a fast path. ``features`` [B,M,D] are the generator's
        last states, None without context.
        """
        if features is None:
            return GeneratorOutput(None, None, self.sample(self.noise_logits(None, originals)))
        hidden = self.generator_head(features)
        if self.is_fast and not self.cfg.adversarial:
            return self.predict_and_sample_in_chunks(hidden, originals)
        logits = self.noise_logits(hidden, originals)
        with self.mlm_gradient():
            nll, correct = self.mlm_loss(hidden, self.generator_head.bias, originals)
        sampled = self.sample(logits)
        if not self.cfg.adversarial:
            return GeneratorOutput(nll, correct, sampled)
        return GeneratorOutput(nll, correct, sampled, *self.estimate_reward(features, logits, sampled))

    def predict_and_sample_in_chunks(self, hidden: Tensor, originals: Tensor) -> GeneratorOutput:
        forbidden = originals.flatten() if self.cfg.disallow_true_token else None
        sampler = ReplacementSampler(self.temperature, forbidden)
        with self.mlm_gradient():
            nll, correct, (sampled,) = self.mlm_loss_and_sample(hidden, self.generator_head.bias, originals, sampler)
        return GeneratorOutput(nll, correct, sampled)

    def mlm_gradient(self) -> torch.set_grad_enabled:
        """Return a context in which the MLM loss has a gradient only if the generator is trained by it."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.learns_by_likelihood)

    def noise_logits(self, hidden: Tensor | None, originals: Tensor) -> Tensor:
        """Compute log q of the replacement tokens up to a constant, with -inf at tokens that are never sampled.

        ``hidden`` [B,M,E] is the output of the MLM head, None without context -> [B,M,V] float32. Only a generator that learns
        by reward receives a gradient.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.cfg.adversarial):
            if hidden is None:
                logits = self.token_noise(originals).masked_fill(self.never_sampled_mask, float("-inf"))
            else:
                logits = self.sampling_logits(hidden, self.generator_head.bias)
            if self.temperature != 1:
                logits = logits / self.temperature
            return forbid_tokens(logits, originals) if self.cfg.disallow_true_token else logits

    @torch.no_grad()
    def sample(self, logits: Tensor) -> Tensor:
        """Sample replacement tokens [B,M] int64 from softmax(logits), without a gradient."""
        return gumbel_max(logits, gumbel_noise(logits))

    def estimate_reward(self, features: Tensor, logits: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log q of the ``sampled`` tokens and the logits of the baseline w . sg(h), both [B,M] float32 (5.3.4).

        log q has the generator's gradient. The input of the baseline, the generator's last states ``features`` [B,M,D],
        is detached, so its loss trains w alone.
        """
        log_probs = logits.log_softmax(-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        return log_probs, self.baseline(features.detach()).squeeze(-1).float()

    def predict(self, states: Tensor, corrupted: Tensor, batch: PretrainingBatch) -> TokenPredictions:
        """Predict the originals at masked positions, or of all tokens that are not special (section 5.4.3)."""
        embedding = self.encoder_embedding.weight
        if self.cfg.main_objective == "all_tokens_mlm":
            weights = ~self.never_sampled_mask[batch.tokens]
            return self.token_prediction(states, embedding, corrupted, batch.tokens, weights)
        states = gather_positions(states, batch.masked_positions)
        corrupted = corrupted.gather(1, batch.masked_positions)
        return self.token_prediction(states, embedding, corrupted, batch.originals, batch.masked_weights)

    @torch.no_grad()
    def predict_logits(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        if self.token_noise is not None:  # the same logits at every position
            return as_single_depth(self.token_noise(batch.masked_positions))
        return super().predict_logits(batch)

    def set_token_counts(self, counts: Tensor) -> None:
        """Set how often each token occurs in the training text: [tokens] int64, in the order of the dictionary, which has at
        most V tokens; the counts of padding become 0."""
        self.token_noise.counts.zero_()
        self.token_noise.counts[: len(counts)] = counts
        self.awaits_token_counts = False

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        super().upgrade_state_dict_named(state_dict, name)
        self.awaits_token_counts = False


def check_settings(cfg: ElectraConfig) -> None:
    """Raise ValueError for a setting that another one excludes or makes meaningless."""
    generator_settings = ("generator_layers", "share_weights", "adversarial")
    if cfg.generator != "masked_lm":
        reason = f"--generator {cfg.generator}, which has no weights"
        refuse_settings(cfg, (*generator_settings, "generator_checkpoint"), reason)
    if cfg.generator_checkpoint:
        refuse_settings(cfg, (*generator_settings, "disentangled_embeddings"), FROZEN)
    if cfg.main_objective != "detection":
        refuse_settings(cfg, ("adversarial", "encoder_mlm_weight"), f"--main-objective {cfg.main_objective}")
    is_one, layers = cfg.share_weights == "all", (0, cfg.encoder_layers)
    has_own = cfg.share_weights != "embeddings" or cfg.generator != "masked_lm"
    is_other_size = cfg.generator_size != 1 or cfg.generator_layers not in layers
    refused = [
        (is_one and cfg.adversarial, "--adversarial with --share-weights all trains the discriminator to fail"),
        (
            is_one and is_other_size,
            "--share-weights all needs equal networks: give --generator-size 1, no --generator-layers",
        ),
        (
            is_one and cfg.discriminator_lr_scale != 1,
            "--discriminator-lr-scale has no meaning with --share-weights all",
        ),
        (
            cfg.disentangled_embeddings and has_own,
            "--disentangled-embeddings needs a generator that shares its embeddings: give --generator masked_lm "
            "--share-weights embeddings, or leave it out",
        ),
    ]
    for is_refused, message in refused:
        if is_refused:
            raise ValueError(message)


register_sizes(
    "electra",
    tiny={"generator_size": 0.5, "linear_init_std": 0.1},
    mini={"generator_size": 0.25, "discriminator_lr_scale": 0.2, **MINI},
    modern_mini={"generator_size": 0.25, **MODERN_MINI},
    small={"embedding_dim": 128, "generator_size": 0.25},
    large={"generator_size": 0.25},
    modern_large={"generator_size": 0.25},
    # DeBERTaV3: a generator of the same width and half of the layers, disentangled embeddings.
    deberta={"generator_size": 1.0, "disentangled_embeddings": True},
    deberta_mini={"generator_layers": 3, **DEBERTA_MINI},
    deberta_small={"generator_layers": 3},
    deberta_base={"generator_layers": 6},
    deberta_large={"generator_layers": 12},
)
