"""ELECTRA: a small generator and a discriminator of replaced tokens (Clark, thesis 2021, sections 5.1 and 5.3.1).

The thesis's variants are settings of the same model: what is shared (5.3.1), generators that read nothing (5.3.2), a
frozen one (5.3.3), one that learns by reward (5.3.4), other objectives of the main network (5.4.3), a temperature and
forbidden originals (5.5).

Shapes: B sequences, T tokens, M masked positions a sequence, D width of the encoder, V rows of the vocabulary.
"""

from typing import NamedTuple

from fairseq.models import register_model
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.functional.positions import gather_positions, replace_positions
from amos_fairseq.models.configuration import embedding_width, encoder_shape, register_sizes
from amos_fairseq.models.electra_config import ElectraConfig, check_settings
from amos_fairseq.models.electra_generator import GeneratorModel
from amos_fairseq.models.embedding_rows import EmbeddingRows
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.modules.heads import DenseDetectionHead
from amos_fairseq.modules.token_prediction import TokenPrediction, TokenPredictions


class ElectraOutput(NamedTuple):
    """Everything that the criterion and the log read; None where a variant has no such part."""

    mlm_nll: Tensor | None  # [B,M] float32, -log p(original), nats
    mlm_correct: Tensor | None  # [B,M] bool, the generator's best guess is the original
    sampled_tokens: Tensor  # [B,M] int64
    corrupted_tokens: Tensor  # [B,T] int64, what the discriminator reads
    replaced: Tensor  # [B,T] bool, differs from the original
    rtd_logits: Tensor | None  # [B,T] float32, positive for "replaced"
    predictions: TokenPredictions | None = None  # of a main network that tells the originals instead of detecting
    learns_by_likelihood: bool = True  # False: mlm_nll is for the log alone
    sampled_log_probs: Tensor | None = None  # [B,M] float32, log q(sampled) of a generator that learns by reward
    baseline_logits: Tensor | None = None  # [B,M] float32, with it


@register_model("electra", dataclass=ElectraConfig)
class ElectraModel(GeneratorModel):
    """A generator that is narrower than the discriminator; both read the same embeddings (section 5.3.1).

    Token and position embeddings, token types and their LayerNorm are shared; the generator projects them to its width, and
    its output layer is tied to the token embeddings. With ``--share-weights none`` it has all of them for itself, with
    ``all`` it is the discriminator. ``mlm_head`` is the generator's.

    Raises:
        ValueError: the settings describe no model, or exclude one another.
    """

    def __init__(self, cfg: ElectraConfig, rows: EmbeddingRows):
        super().__init__(cfg, rows)
        check_settings(cfg)
        self.discriminator = TransformerEncoder(encoder_shape(cfg))
        self.add_generator()
        self.add_main_head()
        self.initialize()
        # What has to be loaded or counted before an update makes sense.
        self.missing = ""
        if cfg.frozen_generator:
            self.freeze_generator()
            self.missing = (
                "--frozen-generator has no trained generator: give an mlm checkpoint as --finetune-from-model"
            )
        elif str(cfg.generator) == "unigram":
            self.missing = "--generator unigram needs --task text_pretraining, which counts the tokens of its text"

    def add_main_head(self) -> None:
        cfg, width, objective = self.cfg, self.cfg.encoder_embed_dim, str(self.cfg.main_objective)
        if objective == "detection":
            self.detection_head = DenseDetectionHead(width)
        else:
            self.token_prediction = TokenPrediction(
                width,
                embedding_width(cfg),
                self.rows.num_rows,
                cfg.layer_norm_eps,
                copies=objective == "all_tokens_mlm",
                kernels=str(cfg.kernels),
            )

    @property
    def awaits_token_counts(self) -> bool:
        """Whether :meth:`set_token_counts` has to be called before the first update."""
        return str(self.cfg.generator) == "unigram" and bool(self.missing)

    def set_token_counts(self, counts: Tensor) -> None:
        """How often each token stands in the training text: [tokens] int64, in the order of the dictionary."""
        self.token_noise.set_counts(counts)
        self.missing = ""

    @property
    def encoder(self) -> TransformerEncoder:
        return self.discriminator

    def forward(
        self,
        tokens: Tensor,
        masked_tokens: Tensor,
        masked_positions: Tensor,
        masked_weights: Tensor,
        has_padding: bool = True,
    ) -> ElectraOutput:
        """Mask, guess, sample, corrupt, detect; the arguments are those of :meth:`AmosModel.forward`."""
        padding_mask = tokens.eq(self.rows.pad) if has_padding else None
        originals = tokens.gather(1, masked_positions)
        features = None
        if self.generator is not None:
            features = self.read_masked(masked_tokens, masked_positions, padding_mask)
        guesses = self.guess_and_sample(features, originals)
        corrupted = replace_positions(tokens, masked_positions, guesses.sampled, masked_weights)
        states = self.discriminator(self.embed_tokens(corrupted), padding_mask)[-1]
        detects = str(self.cfg.main_objective) == "detection"
        return ElectraOutput(
            mlm_nll=guesses.nll,
            mlm_correct=guesses.correct,
            sampled_tokens=guesses.sampled,
            corrupted_tokens=corrupted,
            replaced=corrupted.ne(tokens),
            rtd_logits=self.detection_head(states) if detects else None,
            predictions=None if detects else self.predict(states, corrupted, tokens, masked_positions, masked_weights),
            learns_by_likelihood=self.learns_by_likelihood,
            sampled_log_probs=guesses.sampled_log_probs,
            baseline_logits=guesses.baseline_logits,
        )

    def predict(
        self, states: Tensor, corrupted: Tensor, tokens: Tensor, masked_positions: Tensor, masked_weights: Tensor
    ) -> TokenPredictions:
        """Originals of the tokens at masked positions, or of all that are neither special nor padding (section 5.4.3)."""
        if str(self.cfg.main_objective) == "all_tokens_mlm":
            weights = ~self.never_sampled_mask[tokens]
        else:
            states, weights = gather_positions(states, masked_positions), masked_weights
            tokens, corrupted = tokens.gather(1, masked_positions), corrupted.gather(1, masked_positions)
        return self.token_prediction(states, self.embed_tokens.weight, corrupted, tokens, weights)

    def check_ready(self) -> None:
        """Called between the loading of a checkpoint and the first update.

        Raises:
            UserError: the generator's weights or counts were never loaded.
        """
        if self.missing:
            raise UserError(self.missing)

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Called before weights are loaded; a frozen generator also takes those of an ``mlm`` model.

        Raises:
            UserError: that model has other sizes.
        """
        super().upgrade_state_dict_named(state_dict, name)
        if self.cfg.frozen_generator and any(key.startswith("transformer.") for key in state_dict):
            self.begin_second_stage(state_dict)
        self.missing = ""


register_sizes(
    "electra",
    tiny={"generator_size": 0.5, "linear_init_std": 0.1},
    small={"embedding_dim": 128, "generator_size": 0.25},
    base={"generator_size": 1 / 3},
    large={"generator_size": 0.25},
)
