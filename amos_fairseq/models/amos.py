"""AMOS: an adversarial mixture of training signal generators (Meng et al., ICLR 2022), section 3.3.

Shapes: B sequences, T tokens, M masked positions per sequence, K depths, D width of the encoder, E width of the token
embeddings (D unless --embedding-dim says otherwise), V padded vocabulary size.
"""

from dataclasses import dataclass

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor, nn

from amos_fairseq.functional.positions import add_at_positions, gather_positions, replace_positions
from amos_fairseq.models.configuration import (
    DEBERTA_MINI,
    MINI,
    MODERN_MINI,
    PaddedVocabulary,
    make_detection_head,
    register_sizes,
    transformer_config,
)
from amos_fairseq.models.frozen_generator import FROZEN, ReplacementConfig, ReplacementModel, refuse_settings
from amos_fairseq.models.pretraining import GeneratorNetwork, PretrainingBatch, PretrainingOutput
from amos_fairseq.modules.encoder import TransformerEncoder, mark_undecayed
from amos_fairseq.modules.heads import DetectionHead, MlmHead, TokenPredictions
from amos_fairseq.modules.mixture import (
    STRATEGIES,
    Adversary,
    MixturePrediction,
    MixtureWeights,
    OutputLayerWeights,
    parse_weights,
    predict_chunked,
    predict_reference,
)
from amos_fairseq.setting_checks import setting


@dataclass
class AmosConfig(ReplacementConfig):
    """AMOS-base (section 4 and Appendix B); the ablations of "Figure 3", Tables 6 and 7 are settings of the same model."""

    relative_position_scheme: ChoiceEnum(["none", "t5", "amos"]) = setting(
        "t5", "relative positions: none, t5, or the scheme of the released AMOS checkpoint"
    )
    generator_depths: str = setting("4,6,8", "layers of the generator that carry an MLM head, ascending")
    mixture: ChoiceEnum(list(STRATEGIES)) = setting(
        "learned", "how the depths are weighted: adversarially learned, or one of the ablations"
    )
    fixed_mixture_weights: str = setting("", "one weight per depth, for --mixture fixed")
    gumbel_temperature: float = setting(0.3, "temperature tau of Gumbel-Softmax", "above 0")
    # At V = 32,768 and temperature 0.3 the 128 largest hold all but 2e-5: functional/mixture.py.
    gumbel_entries: int = setting(
        128,
        "maximum number of Gumbel-Softmax entries, the largest ones, that carry its gradient; "
        "0 (and --kernels reference): all, exactly",
        "0 or more",
    )
    no_stop_gradient: bool = setting(False, "let deeper MLM losses train the shallower blocks too (ablation)")
    adversarial_mlm_multiplier: float = setting(
        0.0, "also train the MLM embeddings h to mislead, times this factor (ablation)", "0 or more"
    )
    separate_generators: bool = setting(False, "one generator per depth instead of one with several heads (ablation)")


@dataclass(frozen=True)
class AmosOutput(PretrainingOutput):
    """The same for every implementation of the forward pass; ``mlm_nll`` and ``mlm_correct`` are those of each depth."""

    mixture_weights: Tensor | None = None  # [B,M,K] float32, gamma
    # [some positions] float32, the mass of Gumbel-Softmax outside the entries that carry its gradient; None: there is none.
    truncated_mass: Tensor | None = None
    predictions: TokenPredictions | None = None  # of the discriminator, with --encoder-mlm-weight


@register_model("amos", dataclass=AmosConfig)
class AmosModel(ReplacementModel):
    """One generator with K MLM heads, a learned mixture of their outputs, and the discriminator, the final encoder.

    Token embeddings are shared by generator, output layer and discriminator; positions, LayerNorms and bias tables are
    each encoder's own. The generator has no dropout.
    """

    def __init__(self, cfg: AmosConfig, vocabulary: PaddedVocabulary):
        super().__init__(cfg, vocabulary)
        if cfg.fixed_mixture_weights and cfg.mixture != "fixed":
            raise ValueError(f"--fixed-mixture-weights needs --mixture fixed, not {cfg.mixture}")
        self.depths = parse_depths(cfg.generator_depths, cfg.separate_generators)
        generator_layers = self.depths if cfg.separate_generators else [max(self.depths)]
        if cfg.generator_checkpoint:
            training_settings = ("separate_generators", "no_stop_gradient", "adversarial_mlm_multiplier")
            refuse_settings(cfg, (*training_settings, "disentangled_embeddings"), FROZEN)
            self.depths = generator_layers = []
        self.generators = nn.ModuleList(
            transformer_config(cfg, num_layers, with_dropout=False).build() for num_layers in generator_layers
        )
        self.mlm_heads = nn.ModuleList(self.make_mlm_head(cfg.encoder_embed_dim) for _ in generator_layers)
        # With a frozen generator it is made when its depths are known; until then v of a loaded checkpoint is kept.
        self.mixture: MixtureWeights | None = None
        self.saved_mixture: dict[str, Tensor] = {}
        if not cfg.generator_checkpoint:
            self.mixture = self.make_mixture(len(self.depths), cfg.encoder_embed_dim)
        self.discriminator = transformer_config(cfg).build()
        self.detection_head = make_detection_head(cfg, DetectionHead)
        self.token_prediction = self.make_token_prediction() if cfg.encoder_mlm_weight else None
        self.initialize()

    def make_mixture(self, num_depths: int, width: int) -> MixtureWeights:
        cfg = self.cfg
        weights = parse_weights(cfg.fixed_mixture_weights)
        return MixtureWeights(str(cfg.mixture), num_depths, width, weights, cfg.max_update)

    def read_generator(self) -> None:
        """Read the frozen generator, and make the mixture of its depths, which is learned as that of trained ones."""
        super().read_generator()
        frozen = self.frozen_generator
        self.mixture = self.make_mixture(len(frozen.all_heads), sum(frozen.widths)).to(self.embed_tokens.weight)
        mark_undecayed(self.mixture)
        self.mixture.num_updates = self.num_updates
        if self.saved_mixture:
            self.mixture.load_state_dict(self.saved_mixture)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        if self.mixture is None and "mixture.v" in state_dict:
            self.saved_mixture = {"v": state_dict.pop("mixture.v")}
        super().upgrade_state_dict_named(state_dict, name)

    @property
    def encoder(self) -> TransformerEncoder:
        return self.discriminator

    def forward(self, batch: PretrainingBatch) -> AmosOutput:
        """Predict the masked tokens, sample from the mixture of the depths, corrupt, detect."""
        positions, weights = batch.masked_positions, batch.masked_weights
        features, hidden = self.generate(batch)
        gamma = self.mixture(features)
        # The mixture's logits are linear in gamma: divided by the temperature, they have its distribution and gradient.
        scaled = gamma if self.temperature == 1 else gamma / self.temperature
        prediction = self.predict_and_sample(hidden, scaled, batch.originals)
        corrupted = replace_positions(batch.tokens, positions, prediction.sampled, weights)
        embeddings = self.encoder_embedding(corrupted)
        if prediction.adversarial_term is not None:
            embeddings = add_at_positions(embeddings, positions, prediction.adversarial_term, weights)
        states = self.discriminator(embeddings, self.padding_mask(batch))[-1]
        return AmosOutput(
            mlm_nll=prediction.nll,
            mlm_correct=prediction.correct,
            mixture_weights=gamma,
            sampled_tokens=prediction.sampled,
            corrupted_tokens=corrupted,
            replaced=corrupted.ne(batch.tokens),
            rtd_logits=self.detection_head(states),
            rtd_states=states,
            truncated_mass=prediction.truncated_mass,
            predictions=self.predict(states, corrupted, batch),
            learns_by_likelihood=self.frozen_generator is None,
            generator_temperature=self.logged_temperature,
        )

    def predict(self, states: Tensor, corrupted: Tensor, batch: PretrainingBatch) -> TokenPredictions | None:
        """Predict the originals at masked positions from the discriminator's states; None without a head for it."""
        if self.token_prediction is None:
            return None
        inputs = corrupted.gather(1, batch.masked_positions)
        states = gather_positions(states, batch.masked_positions)
        embedding = self.encoder_embedding.weight
        return self.token_prediction(states, embedding, inputs, batch.originals, batch.masked_weights)

    def generate(self, batch: PretrainingBatch) -> tuple[list[Tensor], list[Tensor]]:
        """Compute the features f^(d) and the MLM head's outputs h^(d) of each depth at the masked positions.

        K tensors [B,M,D] and K of [B,M,E]. The input of the layer above a depth is detached, so each block is trained by its
        own head alone (section 3.3).
        """
        if self.frozen_generator is not None:
            return self.frozen_generator(batch, self.padding_mask(batch))
        embeddings, padding_mask = self.embed_tokens(batch.masked_tokens), self.padding_mask(batch)
        positions = batch.masked_positions
        if self.cfg.separate_generators:
            features = [
                generator(embeddings, padding_mask, last_positions=positions)[-1] for generator in self.generators
            ]
        else:
            stops = () if self.cfg.no_stop_gradient else self.depths[:-1]
            layers = self.generators[0](embeddings, padding_mask, stops, last_positions=positions)
            between = [layers.at(depth - 1, positions) for depth in self.depths[:-1]]
            features = [*between, layers[-1]]
        return features, [head(f) for head, f in zip(self.head_of_depth, features, strict=True)]

    @property
    def head_of_depth(self) -> list[MlmHead]:
        """The MLM head of each depth: one for all, or, with separate or frozen generators, one for each."""
        if self.frozen_generator is not None:
            return self.frozen_generator.all_heads
        return list(self.mlm_heads) * (len(self.depths) // len(self.mlm_heads))

    def generator_networks(self) -> list[GeneratorNetwork]:
        heads = list(zip(self.depths, self.head_of_depth, strict=True)) if self.depths else []
        parts = [[each] for each in heads] if self.cfg.separate_generators else [heads]
        return [
            GeneratorNetwork(self.embed_tokens, encoder, dict(part))
            for encoder, part in zip(self.generators, parts, strict=False)
        ]

    def predict_and_sample(self, hidden: list[Tensor], gamma: Tensor, originals: Tensor) -> MixturePrediction:
        """Compute the MLM loss of each depth (Eq. 2) and sample from the mixture (Eq. 3), with the reversed gradient if used.

        ``hidden``: h^(d), K tensors [B,M,E]; ``gamma`` [B,M,K] float32.
        """
        # A shared bias is added once, whatever the sum of the weights, which the temperature divides.
        heads = self.mlm_heads if self.mlm_heads and self.temperature == 1 else self.head_of_depth
        weights = OutputLayerWeights(
            self.generator_embedding.weight,
            torch.stack([head.bias for head in heads]),
            self.never_sampled_indices,
            self.encoder_embedding.weight.detach(),
            self.with_triton,
        )
        predict = predict_chunked if self.is_fast else predict_reference
        return predict(hidden, gamma, originals, weights, self.adversary if torch.is_grad_enabled() else None)

    @property
    def adversary(self) -> Adversary | None:
        """None if neither the mixture nor an MLM head learns from the discriminator."""
        cfg = self.cfg
        if not (self.mixture.learned or cfg.adversarial_mlm_multiplier):
            return None
        return Adversary(cfg.gumbel_temperature, cfg.adversarial_mlm_multiplier, cfg.gumbel_entries)

    @torch.no_grad()
    def predict_logits(self, batch: PretrainingBatch) -> tuple[Tensor, Tensor]:
        features, hidden = self.generate(batch)
        logits = [self.logits(h, head.bias) for h, head in zip(hidden, self.head_of_depth, strict=True)]
        return torch.stack(logits), self.mixture(features)

    @property
    def depth_names(self) -> list[str]:
        """Suffixes of the log keys: the depth, followed by a counter if separate generators have equal depths."""
        depths = [self.depths] if self.frozen_generator is None else self.frozen_generator.depths
        names = [str(depth) for network_depths in depths for depth in network_depths]
        if len(set(names)) == len(names):
            return names
        return [f"{name}_{number}" for number, name in enumerate(names, start=1)]

    def set_num_updates(self, num_updates: int) -> None:
        super().set_num_updates(num_updates)
        if self.mixture is not None:
            self.mixture.num_updates = num_updates


def parse_depths(text: str, separate: bool) -> list[int]:
    """Parse "4,6,8" to [4, 6, 8]; raise ValueError. Only separate generators may have equal depths."""
    try:
        depths = [int(depth) for depth in text.split(",")]
    except ValueError:
        depths = []
    ascending = depths == sorted(depths if separate else set(depths))
    if not depths or depths[0] < 1 or not ascending:
        raise ValueError(f"--generator-depths needs ascending layer numbers from 1 on, such as 4,6,8; got {text!r}")
    return depths


register_sizes(
    "amos",
    tiny={"generator_depths": "1,2", "linear_init_std": 0.1},
    mini={"generator_depths": "2,4", "discriminator_lr_scale": 0.05, **MINI},
    modern_mini={"generator_depths": "2,4", **MODERN_MINI},
    deberta_mini={"generator_depths": "2,4", **DEBERTA_MINI},
    deberta_small={"generator_depths": "2,4"},
)
