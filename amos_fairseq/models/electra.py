"""ELECTRA: a small generator and a discriminator of replaced tokens (Clark, thesis 2021, sections 5.1 and 5.3.1).

The variants of the thesis are settings of the same model: weight sharing (5.3.1), a generator without context (5.3.2), a
frozen generator (5.3.3), a generator trained by reward (5.3.4), other objectives of the main network (5.4.3), a sampling
temperature, and replacement tokens that differ from the original (5.5).

Shapes: B sequences, T tokens, M masked positions per sequence, D width of a network, E width of the token embeddings,
V padded vocabulary size.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.functional.positions import gather_positions, replace_positions
from amos_fairseq.functional.sampling import ReplacementSampler, forbid_tokens, gumbel_max, gumbel_noise
from amos_fairseq.models.configuration import (
    MINI,
    MODERN_MINI,
    DetectorWithMlmConfig,
    PaddedVocabulary,
    embedding_width,
    generator_config,
    make_detection_head,
    register_sizes,
    transformer_config,
)
from amos_fairseq.models.fine_tuning import describe_mismatch, same_shape
from amos_fairseq.models.pretraining import PretrainingBatch, PretrainingOutput, SingleMlmModel, as_single_depth
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.modules.heads import CLASSIFICATION_HEADS, DenseDetectionHead, TokenPredictions
from amos_fairseq.setting_checks import setting

EQUAL_SIZES = "give --generator-size 1 and leave --generator-layers out"


@dataclass
class ElectraConfig(DetectorWithMlmConfig):
    """ELECTRA-base (thesis Table 5.1); every variant is a setting of the same model."""

    pooler_activation_fn: ChoiceEnum(list(CLASSIFICATION_HEADS)) = setting(
        "gelu", "activation of a classification head's dense layer; linear: a head without dense layer"
    )
    generator: ChoiceEnum(["masked_lm", "unigram", "uniform"]) = setting(
        "masked_lm",
        "distribution of the replacement tokens: a masked language model, the token frequencies of the training "
        "text, or the uniform distribution",
    )
    generator_size: float = setting(
        1 / 3, "width, FFN width and attention heads of the generator, as a fraction of the encoder's", "above 0"
    )
    generator_layers: int = setting(0, "layers of the generator; 0: as many as the encoder", "0 or more")
    generator_temperature: float = setting(
        1.0, "sample with the generator's probabilities to the power 1 / temperature", "above 0"
    )
    disallow_true_token: bool = setting(False, "never sample the original token as a replacement (section 5.5)")
    share_weights: ChoiceEnum(["none", "embeddings", "all"]) = setting(
        "embeddings", "weights that generator and discriminator share (section 5.3.1)"
    )
    adversarial: bool = setting(False, "train the generator by REINFORCE to mislead the discriminator (section 5.3.4)")
    frozen_generator: bool = setting(
        False,
        "second stage of two: the generator keeps the weights of an mlm checkpoint, given as "
        "--finetune-from-model (section 5.3.3)",
    )
    second_stage_start: ChoiceEnum(["generator", "random"]) = setting(
        "generator",
        "with --frozen-generator, the first weights of the discriminator: those of the mlm checkpoint, or random "
        "ones (section 5.3.3)",
    )
    main_objective: ChoiceEnum(["detection", "replace_mlm", "all_tokens_mlm"]) = setting(
        "detection",
        "objective of the main network: detect replaced tokens, or predict the originals at masked positions or "
        "of all tokens (section 5.4.3)",
    )


@dataclass(frozen=True)
class ElectraOutput(PretrainingOutput):
    """What the variants add."""

    predictions: TokenPredictions | None = None  # of a main network that predicts the originals
    learns_by_likelihood: bool = True  # False: mlm_nll is for the log alone
    sampled_log_probs: Tensor | None = None  # [B,M] float32, log q(sampled) of a generator that learns by reward
    baseline_logits: Tensor | None = None  # [B,M] float32, for the same generator


class GeneratorOutput(NamedTuple):
    """Predictions and samples of the generator; a field is None if the generator has no context or no reward."""

    nll: Tensor | None  # [B,M] float32, -log p(original), nats
    correct: Tensor | None  # [B,M] bool, the most probable token is the original
    sampled: Tensor  # [B,M] int64
    sampled_log_probs: Tensor | None = None  # [B,M] float32, log q(sampled) of a generator that learns by reward
    baseline_logits: Tensor | None = None  # [B,M] float32, for the same generator


class TokenNoise(nn.Module):
    """A generator without input: one distribution over the vocabulary for every position (thesis section 5.3.2).

    It holds a count for each token of the vocabulary: 1, until :meth:`set_counts` sets the frequencies of a corpus. The
    counts are saved with the model, so a checkpoint samples without its corpus. They are integers, which no cast to half
    precision rounds.
    """

    def __init__(self, vocabulary_size: int):
        super().__init__()
        self.register_buffer("counts", torch.ones(vocabulary_size, dtype=torch.int64))

    def set_counts(self, counts: Tensor) -> None:
        """Set ``counts`` [tokens] int64 of the dictionary, which has at most V tokens; the counts of padding become 0."""
        self.counts.zero_()
        self.counts[: len(counts)] = counts

    def forward(self, positions: Tensor) -> Tensor:
        """Return logits for each of ``positions`` [...]: [...,V] float32, an expanded view of one row."""
        return self.counts.float().log().expand(*positions.shape, -1)


@register_model("electra", dataclass=ElectraConfig)
class ElectraModel(SingleMlmModel):
    """A generator that is narrower than the discriminator, and shares its embeddings (section 5.3.1).

    Token and position embeddings, token types and their LayerNorm are shared; the generator projects them to its width,
    and its output layer is tied to the token embeddings. With ``--share-weights none`` the generator has its own copies,
    with ``all`` it is the discriminator. ``mlm_head`` belongs to the generator. A generator without context has no
    network: ``generator`` is None, and ``token_noise`` gives its distribution.
    """

    def __init__(self, cfg: ElectraConfig, vocabulary: PaddedVocabulary):
        super().__init__(cfg, vocabulary)
        check_settings(cfg)
        self.discriminator = transformer_config(cfg).build()
        self._add_generator()
        self._add_main_head()
        self.initialize()
        # False until trained weights are loaded, or tokens are counted.
        self.is_ready = not cfg.frozen_generator and cfg.generator != "unigram"
        if cfg.frozen_generator:
            self.freeze_generator()

    def _add_generator(self) -> None:
        cfg, vocabulary = self.cfg, self.vocabulary
        self.generator: TransformerEncoder | None = None
        self.generator_embed_tokens: nn.Embedding | None = None
        self.token_noise: TokenNoise | None = None
        if cfg.generator != "masked_lm":
            self.token_noise = TokenNoise(vocabulary.padded_size)
            return
        config = generator_config(cfg, cfg.generator_layers)
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
        return self.generator

    @property
    def generator_embedding(self) -> nn.Embedding:
        return self.embed_tokens if self.generator_embed_tokens is None else self.generator_embed_tokens

    @property
    def depth_names(self) -> list[str]:
        return [str(self.cfg.generator)] if self.generator is None else super().depth_names

    @property
    def learns_by_likelihood(self) -> bool:
        """Whether the generator is trained as a masked language model."""
        return self.generator is not None and not (self.cfg.adversarial or self.cfg.frozen_generator)

    def forward(self, batch: PretrainingBatch) -> ElectraOutput:
        """Predict the masked tokens, sample, corrupt, detect."""
        features = None if self.generator is None else self.encode_masked(batch)
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
        hidden = self.mlm_head(features)
        if self.is_fast and not self.cfg.adversarial:
            return self.predict_and_sample_in_chunks(hidden, originals)
        logits = self.noise_logits(hidden, originals)
        with self.mlm_gradient():
            nll, correct = self.mlm_loss(hidden, self.mlm_head.bias, originals)
        sampled = self.sample(logits)
        if not self.cfg.adversarial:
            return GeneratorOutput(nll, correct, sampled)
        return GeneratorOutput(nll, correct, sampled, *self.estimate_reward(features, logits, sampled))

    def predict_and_sample_in_chunks(self, hidden: Tensor, originals: Tensor) -> GeneratorOutput:
        forbidden = originals.flatten() if self.cfg.disallow_true_token else None
        sampler = ReplacementSampler(self.cfg.generator_temperature, forbidden)
        with self.mlm_gradient():
            nll, correct, (sampled,) = self.mlm_loss_and_sample(hidden, self.mlm_head.bias, originals, sampler)
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
                logits = self.sampling_logits(hidden, self.mlm_head.bias)
            if self.cfg.generator_temperature != 1:
                logits = logits / self.cfg.generator_temperature
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
        if self.generator is None:  # the same logits at every position
            return as_single_depth(self.token_noise(batch.masked_positions))
        return super().predict_logits(batch)

    @property
    def awaits_token_counts(self) -> bool:
        return self.cfg.generator == "unigram" and not self.is_ready

    def set_token_counts(self, counts: Tensor) -> None:
        self.token_noise.set_counts(counts)
        self.is_ready = True

    def check_ready(self) -> None:
        if self.is_ready:
            return
        if self.cfg.frozen_generator:
            raise UserError(
                "--frozen-generator has no trained generator: give an mlm checkpoint as --finetune-from-model"
            )
        raise UserError("--generator unigram needs --task text_pretraining, which counts the tokens of its text")

    def freeze_generator(self) -> None:
        """Exclude the generator from training; :meth:`train` disables its dropout, so q is one fixed distribution."""
        for part in (self.generator, self.generator_embed_tokens, self.mlm_head):
            part.requires_grad_(False)

    def train(self, mode: bool = True) -> "ElectraModel":
        super().train(mode)
        if self.cfg.frozen_generator:
            self.generator.eval()
        return self

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Prepare weights to be loaded; a model with a frozen generator also accepts those of an ``mlm`` model."""
        super().upgrade_state_dict_named(state_dict, name)
        if self.cfg.frozen_generator and any(key.startswith("transformer.") for key in state_dict):
            self.begin_second_stage(state_dict)
        self.is_ready = True

    def begin_second_stage(self, state_dict: dict[str, Tensor]) -> None:
        """Turn the weights of an ``mlm`` model, in place, into those of the generator and the discriminator (5.3.3).

        The ``mlm`` model has no detection head: that keeps the initial values of this model. With ``--second-stage-start
        random`` the discriminator and its token embeddings keep theirs as well, and the generator can have another size.
        """
        for key in list(state_dict):
            module, _, rest = key.partition(".")
            if module == "transformer":
                state_dict[f"generator.{rest}"] = state_dict[f"discriminator.{rest}"] = state_dict.pop(key)
            elif module == "embed_tokens":
                state_dict[f"generator_{key}"] = state_dict[key]
        here = self.state_dict()
        fresh = ("detection_head.",)
        if self.cfg.second_stage_start == "random":
            fresh += ("discriminator.", "embed_tokens.")
        state_dict.update({key: value for key, value in here.items() if key.startswith(fresh)})
        for key in sorted(here.keys() | state_dict.keys()):
            if not same_shape(key, here, state_dict):
                raise UserError(
                    "--frozen-generator: the mlm checkpoint holds another encoder than the flags describe: "
                    f"{describe_mismatch(key, state_dict, here)}; give its vocabulary, sizes and --relative-position-scheme"
                )


def check_settings(cfg: ElectraConfig) -> None:
    """Raise ValueError for a setting that another one excludes or makes meaningless."""
    if cfg.generator != "masked_lm":
        _check_without_network(cfg)
    if cfg.main_objective != "detection":
        _check_without_detection(cfg)
    has_equal_sizes = cfg.generator_size == 1 and cfg.generator_layers in (0, cfg.encoder_layers)
    if cfg.share_weights == "all":
        _check_one_network(cfg, has_equal_sizes)
    if cfg.frozen_generator:
        _check_second_stage(cfg, has_equal_sizes)
    elif cfg.second_stage_start == "random":
        raise ValueError("--second-stage-start random has no meaning without --frozen-generator: leave it out")
    if cfg.disentangled_embeddings and (cfg.share_weights != "embeddings" or cfg.generator != "masked_lm"):
        raise ValueError(
            "--disentangled-embeddings needs a generator that shares its embeddings: give --generator masked_lm "
            "--share-weights embeddings, or leave it out"
        )


def _check_without_network(cfg: ElectraConfig) -> None:
    uses_weights = {
        "--generator-layers": cfg.generator_layers != 0,
        "--share-weights": cfg.share_weights != "embeddings",
        "--adversarial": cfg.adversarial,
        "--frozen-generator": cfg.frozen_generator,
    }
    for flag, is_used in uses_weights.items():
        if is_used:
            raise ValueError(
                f"{flag} has no meaning with --generator {cfg.generator}, which has no weights: leave it out"
            )


def _check_without_detection(cfg: ElectraConfig) -> None:
    if cfg.encoder_mlm_weight:
        raise ValueError(
            f"--encoder-mlm-weight is for detection, and --main-objective {cfg.main_objective} predicts already"
        )
    needs_detection = {
        "--detection-bias-at-prior": cfg.detection_bias_at_prior,
        "--adversarial": cfg.adversarial,
        "--frozen-generator": cfg.frozen_generator,
    }
    for flag, is_used in needs_detection.items():
        if is_used:
            raise ValueError(f"{flag} needs --main-objective detection, not {cfg.main_objective}")


def _check_one_network(cfg: ElectraConfig, has_equal_sizes: bool) -> None:
    if cfg.adversarial:
        raise ValueError(
            "--adversarial with --share-weights all would train the discriminator to fail: share embeddings or none"
        )
    if not has_equal_sizes:
        raise ValueError(f"--share-weights all needs networks of equal size: {EQUAL_SIZES}")
    if cfg.discriminator_lr_scale != 1:
        raise ValueError(
            "--discriminator-lr-scale with --share-weights all has no layers of the discriminator alone: give 1"
        )


def _check_second_stage(cfg: ElectraConfig, has_equal_sizes: bool) -> None:
    if cfg.adversarial:
        raise ValueError("--adversarial trains the generator and --frozen-generator forbids it: give one of them")
    if cfg.second_stage_start == "generator" and not has_equal_sizes:
        raise ValueError(
            f"--frozen-generator needs networks of equal size, since both start from one checkpoint: {EQUAL_SIZES}, or "
            "--second-stage-start random"
        )
    if cfg.share_weights != "none":
        raise ValueError(
            f"--frozen-generator with --share-weights {cfg.share_weights} would train frozen weights: give "
            "--share-weights none"
        )


register_sizes(
    "electra",
    tiny={"generator_size": 0.5, "linear_init_std": 0.1},
    mini={"generator_size": 0.25, "discriminator_lr_scale": 0.2, **MINI},
    modern_mini={"generator_size": 0.25, "discriminator_lr_scale": 0.2, **MODERN_MINI},
    modern_small={"generator_size": 1 / 3},
    modern_base={"generator_size": 1 / 3},
    modern_large={"generator_size": 0.25},
    small={"embedding_dim": 128, "generator_size": 0.25},
    base={"generator_size": 1 / 3},
    large={"generator_size": 0.25},
)
