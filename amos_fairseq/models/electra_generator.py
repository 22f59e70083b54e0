"""Where ELECTRA's replacements come from: a masked language model, trained in one of several ways, or fixed frequencies.

Shapes: B sequences, T tokens, M masked positions a sequence, D width of the generator, E of the token embeddings, V rows of
the vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.functional.samplers import ReplacementSampler
from amos_fairseq.functional.sampling import forbid_tokens, gumbel_max, gumbel_noise
from amos_fairseq.models.configuration import embedding_width
from amos_fairseq.models.electra_config import ElectraConfig, generator_shape
from amos_fairseq.models.fine_tuning import same_shape
from amos_fairseq.models.pretraining import SingleGuesserModel, as_single_depth
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.modules.generators import TokenNoise
from amos_fairseq.modules.heads import MlmHead


class GeneratorGuesses(NamedTuple):
    """What the generator says of the masked tokens, and what it puts there; None where it reads nothing, or has no reward."""

    nll: Tensor | None  # [B,M] float32, -log p(original), nats
    correct: Tensor | None  # [B,M] bool, the best guess is the original
    sampled: Tensor  # [B,M] int64
    sampled_log_probs: Tensor | None = None  # [B,M] float32, log q(sampled) of a generator that learns by reward
    baseline_logits: Tensor | None = None  # [B,M] float32, with it


class GeneratorModel(SingleGuesserModel):
    """The half of ELECTRA that proposes. ``generator`` is None where a ``token_noise`` does it without reading.

    A subclass builds ``discriminator`` first: it is what weights are shared with.
    """

    cfg: ElectraConfig
    discriminator: TransformerEncoder

    def add_generator(self) -> None:
        cfg, rows, share = self.cfg, self.rows, str(self.cfg.share_weights)
        self.generator: TransformerEncoder | None = None
        self.generator_embed_tokens: nn.Embedding | None = None
        self.token_noise: TokenNoise | None = None
        if str(cfg.generator) != "masked_lm":
            self.token_noise = TokenNoise(rows.num_rows)
            return
        shape = generator_shape(cfg, cfg.generator_layers)
        self.generator = self.discriminator if share == "all" else TransformerEncoder(shape)
        if share == "embeddings":
            for shared in ("embed_positions", "embed_token_types", "embedding_norm"):
                setattr(self.generator, shared, getattr(self.discriminator, shared))
        if share == "none":
            self.generator_embed_tokens = nn.Embedding(rows.num_rows, embedding_width(cfg), padding_idx=rows.pad)
        self.mlm_head = MlmHead(shape.width, embedding_width(cfg), rows.num_rows, cfg.layer_norm_eps)
        if cfg.adversarial:
            self.baseline = nn.Linear(shape.width, 1, bias=False)

    @property
    def generator_embedding(self) -> nn.Embedding:
        return self.embed_tokens if self.generator_embed_tokens is None else self.generator_embed_tokens

    @property
    def guesser(self) -> TransformerEncoder | None:
        return self.generator

    @property
    def depth_names(self) -> list[str]:
        return [str(self.cfg.generator)] if self.generator is None else super().depth_names

    @property
    def learns_by_likelihood(self) -> bool:
        """Whether the generator is trained as a masked language model."""
        return self.generator is not None and not (self.cfg.adversarial or self.cfg.frozen_generator)

    def guess_and_sample(self, features: Tensor | None, originals: Tensor) -> GeneratorGuesses:
        """From its last states ``features`` [B,M,D] (None where it reads nothing) and ``originals`` [B,M] int64.

        By reward a generator learns from all probabilities, and one that reads nothing has no output layer: with both the
        logits of all rows are needed, and there is no fast way.
        """
        if features is None:
            return GeneratorGuesses(None, None, self.sample(self.noise_logits(None, originals)))
        hidden = self.mlm_head(features)
        if self.is_fast and not self.cfg.adversarial:
            return self.guess_and_sample_in_chunks(hidden, originals)
        logits = self.noise_logits(hidden, originals)
        guesses = GeneratorGuesses(*self.guess_originals(hidden, originals), self.sample(logits))
        if not self.cfg.adversarial:
            return guesses
        return GeneratorGuesses(*guesses[:3], *self.estimate_reward(features, logits, guesses.sampled))

    def guess_and_sample_in_chunks(self, hidden: Tensor, originals: Tensor) -> GeneratorGuesses:
        forbidden = originals.flatten() if self.cfg.disallow_true_token else None
        sampler = ReplacementSampler(self.cfg.generator_temperature, forbidden)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns_by_likelihood):
            nll, correct, (sampled,) = self.mlm_loss_and_sample(hidden, self.mlm_head.bias, originals, sampler)
        return GeneratorGuesses(nll, correct, sampled)

    def guess_originals(self, hidden: Tensor, originals: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`mlm_loss`; for the log alone, and without a gradient, where the generator does not learn from it."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns_by_likelihood):
            return self.mlm_loss(hidden, self.mlm_head.bias, originals)

    def noise_logits(self, hidden: Tensor | None, originals: Tensor) -> Tensor:
        """log q of the replacements up to a constant: [B,M,V] float32, -inf at what is never sampled.

        A gradient passes only where the generator learns by reward.

        Args:
            hidden: [B,M,E], the generator after its MLM head; None where it reads nothing.
            originals: [B,M] int64.
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
        """Replacements [B,M] int64 that follow softmax(logits); no gradient passes."""
        return gumbel_max(logits, gumbel_noise(logits))

    def estimate_reward(self, features: Tensor, logits: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor]:
        """log q of the ``sampled`` tokens, with the generator's gradient, and the baseline's logits: both [B,M] float32.

        The baseline reads the generator's last states ``features`` [B,M,D] and trains nothing but itself.
        """
        log_probs = logits.log_softmax(-1).gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        return log_probs, self.baseline(features.detach()).squeeze(-1).float()

    @torch.no_grad()
    def predict_logits(
        self, tokens: Tensor, masked_tokens: Tensor, masked_positions: Tensor, masked_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As for every model; a generator that reads nothing proposes the same everywhere."""
        if self.generator is None:
            return as_single_depth(self.token_noise(masked_positions))
        return super().predict_logits(tokens, masked_tokens, masked_positions, masked_weights)

    def freeze_generator(self) -> None:
        """The generator learns no more, and :meth:`train` leaves it without dropout: q is one fixed distribution."""
        for part in (self.generator, self.generator_embed_tokens, self.mlm_head):
            part.requires_grad_(False)

    def train(self, mode: bool = True) -> "GeneratorModel":
        super().train(mode)
        if self.cfg.frozen_generator:
            self.generator.eval()
        return self

    def begin_second_stage(self, state_dict: dict[str, Tensor]) -> None:
        """Make of an ``mlm`` model's weights, in place, those of generator and discriminator alike (section 5.3.3).

        Only the detection head, which that model has not, keeps the initial values that it has here.

        Raises:
            UserError: its sizes are others.
        """
        for key in list(state_dict):
            part, _, rest = key.partition(".")
            if part == "transformer":
                state_dict[f"generator.{rest}"] = state_dict[f"discriminator.{rest}"] = state_dict.pop(key)
            elif part == "embed_tokens":
                state_dict[f"generator_{key}"] = state_dict[key]
        here = self.state_dict()
        state_dict.update({key: value for key, value in here.items() if key.startswith("detection_head.")})
        unfit = [key for key in sorted(here.keys() | state_dict.keys()) if not same_shape(key, here, state_dict)]
        if unfit:
            there, wanted = (
                tuple(side[unfit[0]].shape) if unfit[0] in side else "absent" for side in (state_dict, here)
            )
            raise UserError(
                f"--frozen-generator: the mlm checkpoint holds another encoder than the flags describe: {unfit[0]} is "
                f"{there} in it, {wanted} here; give its vocabulary, sizes and --relative-position-scheme"
            )
