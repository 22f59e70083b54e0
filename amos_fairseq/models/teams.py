"""TEAMS: ELECTRA augmented with multi-word selection (Shen et al., 2021), section 3.

Shapes: B sequences, T tokens, M masked positions a sequence, K negatives a masked position, D width of the encoder, E of the
token embeddings, V rows of the vocabulary.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor

from amos_fairseq.functional.positions import gather_positions, replace_positions
from amos_fairseq.functional.samplers import ReplacementAndNegativeSampler, ReplacementSampler
from amos_fairseq.functional.sampling import forbid_tokens, gumbel_max, gumbel_noise, gumbel_top_k
from amos_fairseq.models.configuration import EncoderConfig, embedding_width, encoder_shape, register_sizes
from amos_fairseq.models.embedding_rows import EmbeddingRows
from amos_fairseq.models.pretraining import SingleGuesserModel
from amos_fairseq.models.teams_fine_tuning import FineTunedTeams
from amos_fairseq.models.teams_layout import check_settings, generator_layers, kept_shape, num_shared_layers, tasks
from amos_fairseq.modules.encoder import TransformerEncoder, TransformerLayer, share_bottom, with_last_layer
from amos_fairseq.modules.heads import DetectionHead, EmbeddingHead, FeedForwardHead, MlmHead


@dataclass
class TeamsConfig(EncoderConfig):
    """TEAMS-base (section 4.1, Table 5); the ablations of Tables 2 to 4 and Figures 4 and 5 are settings of the same model."""

    generator_layers: int = field(
        default=0,
        metadata={"help": "layers of the generator, as wide as the encoder's; 0: half as many as the encoder's"},
    )
    share_layers: ChoiceEnum(["none", "half", "all"]) = field(
        default="half",
        metadata={"help": "how many of the generator's layers are the encoder's own, from the bottom (Table 4)"},
    )
    negative_samples: int = field(
        default=5, metadata={"help": "K, other words among which the original is to be selected (TEAMS section 4.1)"}
    )
    negative_sampling: ChoiceEnum(["sampled", "hardest"]) = field(
        default="sampled",
        metadata={"help": "drawn from the generator's softmax without replacement, or its K most likely (Figure 5)"},
    )
    task_heads: ChoiceEnum(["attention", "extra_layer", "ffn"]) = field(
        default="attention",
        metadata={
            "help": "a branch per task: the last layer and another one beside it; two on top of all layers; or a "
            "feed-forward network per token on top of all layers (Table 3)"
        },
    )
    rtd_loss_weight: float = field(
        default=5.0,
        metadata={"help": "lambda_1, weight of replaced token detection; 0 leaves its branch out (Table 2)"},
    )
    mws_loss_weight: float = field(
        default=2.0, metadata={"help": "lambda_2, weight of multi-word selection; 0 leaves its branch out (Table 2)"}
    )
    representation: ChoiceEnum(["mws", "rtd"]) = field(
        default="mws", metadata={"help": "whose branch is kept: fine-tuned, exported and loaded (Table 3)"}
    )


class TeamsOutput(NamedTuple):
    """Everything that the criterion, the log and ``amos inspect`` read; None belongs to a branch that is left out."""

    mlm_nll: Tensor  # [B,M] float32, -log p(original), nats
    mlm_correct: Tensor  # [B,M] bool, the generator's best guess is the original
    sampled_tokens: Tensor  # [B,M] int64
    corrupted_tokens: Tensor  # [B,T] int64, what the discriminator reads
    replaced: Tensor  # [B,T] bool, differs from the original
    rtd_logits: Tensor | None  # [B,T] float32, positive for "replaced"
    candidates: Tensor | None  # [B,M,1+K] int64, the original first
    mws_logits: Tensor | None  # [B,M,1+K] float32, of each candidate


@register_model("teams", dataclass=TeamsConfig)
class TeamsModel(SingleGuesserModel):
    """A generator half as deep as the discriminator, which shares its bottom layers, and a discriminator with two tasks.

    The discriminator's last layer is that of multi-word selection; replaced tokens are detected on another layer beside it
    (section 3.2). All that lies below the first layer is shared (token and position embeddings, token types, their LayerNorm
    and projection), as is the table of relative positions.
    """

    fine_tuned_model = FineTunedTeams

    def __init__(self, cfg: TeamsConfig, rows: EmbeddingRows):
        super().__init__(cfg, rows)
        check_settings(cfg, num_words=rows.num_tokens - len(rows.special))
        self.tasks = tasks(cfg)
        shape, width, embedded = kept_shape(cfg), cfg.encoder_embed_dim, embedding_width(cfg)
        self.discriminator = TransformerEncoder(shape)
        self.generator = TransformerEncoder(encoder_shape(cfg, generator_layers(cfg)))
        share_bottom(self.generator, self.discriminator, num_shared_layers(cfg))
        self.mlm_head = MlmHead(width, embedded, rows.num_rows, cfg.layer_norm_eps)
        if "mws" in self.tasks:
            self.mws_head = EmbeddingHead(width, embedded, cfg.layer_norm_eps)
        if "rtd" in self.tasks:
            self.detection_head = DetectionHead(width)
        if len(self.tasks) == 2 and str(cfg.task_heads) == "ffn":
            self.mws_ffn, self.rtd_ffn = FeedForwardHead(shape), FeedForwardHead(shape)
        elif len(self.tasks) == 2:
            self.rtd_layer = TransformerLayer(shape)
        self.initialize()

    @property
    def encoder(self) -> TransformerEncoder:
        """The branch that ``--representation`` names, its last layer included."""
        if str(self.cfg.representation) == "rtd" and len(self.tasks) == 2:
            return with_last_layer(self.discriminator, self.rtd_layer)
        return self.discriminator

    @property
    def guesser(self) -> TransformerEncoder:
        return self.generator

    def forward(
        self,
        tokens: Tensor,
        masked_tokens: Tensor,
        masked_positions: Tensor,
        masked_weights: Tensor,
        has_padding: bool = True,
    ) -> TeamsOutput:
        """Mask, guess, sample, corrupt, draw candidates, detect and select; arguments as for :meth:`AmosModel.forward`."""
        padding_mask = tokens.eq(self.rows.pad) if has_padding else None
        originals = tokens.gather(1, masked_positions)
        hidden = self.generate(masked_tokens, masked_positions, padding_mask)
        nll, correct, sampled, candidates = self.guess_and_sample(hidden, originals)
        corrupted = replace_positions(tokens, masked_positions, sampled, masked_weights)
        mws_states, rtd_states = self.discriminate(corrupted, padding_mask, masked_positions)
        return TeamsOutput(
            mlm_nll=nll,
            mlm_correct=correct,
            sampled_tokens=sampled,
            corrupted_tokens=corrupted,
            replaced=corrupted.ne(tokens),
            rtd_logits=self.detection_head(rtd_states) if "rtd" in self.tasks else None,
            candidates=candidates,
            mws_logits=self.select(mws_states, candidates) if "mws" in self.tasks else None,
        )

    def guess_and_sample(self, hidden: Tensor, originals: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """-log p(original) and whether it is the best guess, [B,M] each, then what :meth:`sample` returns."""
        if not self.is_fast:
            return *self.mlm_loss(hidden, self.mlm_head.bias, originals), *self.sample(hidden, originals)
        sampler = ReplacementSampler()
        if "mws" in self.tasks:
            is_hardest = str(self.cfg.negative_sampling) == "hardest"
            sampler = ReplacementAndNegativeSampler(originals.flatten(), self.cfg.negative_samples, is_hardest)
        nll, correct, (sampled, *negatives) = self.mlm_loss_and_sample(hidden, self.mlm_head.bias, originals, sampler)
        candidates = torch.cat([originals.unsqueeze(-1), *negatives], dim=-1) if negatives else None
        return nll, correct, sampled, candidates

    @torch.no_grad()
    def sample(self, hidden: Tensor, originals: Tensor) -> tuple[Tensor, Tensor | None]:
        """From the generator's softmax without special tokens and padding rows: replacements and candidates.

        The two are drawn independently (in Figure 1 the replacement is no candidate); no gradient passes.

        Args:
            hidden: [B,M,E], what :meth:`generate` returns.
            originals: [B,M] int64.

        Returns:
            Replacements [B,M] int64, and, unless that task is left out, candidates [B,M,1+K] int64: the original, then K
            other words.
        """
        logits = self.sampling_logits(hidden, self.mlm_head.bias)
        sampled = gumbel_max(logits, gumbel_noise(logits))
        if "mws" not in self.tasks:
            return sampled, None
        others = forbid_tokens(logits, originals)
        if str(self.cfg.negative_sampling) == "hardest":
            negatives = others.topk(self.cfg.negative_samples).indices
        else:
            negatives = gumbel_top_k(others, gumbel_noise(others), self.cfg.negative_samples)
        return sampled, torch.cat([originals.unsqueeze(-1), negatives], dim=-1)

    def discriminate(
        self, corrupted: Tensor, padding_mask: Tensor | None, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B,T] -> states of multi-word selection and of detection, each [B,T,D]; the same for a single task.

        ``selected`` [B,M] int64 are all positions that selection reads: its states are [B,M,D] then.
        """
        embeddings = self.embed_tokens(corrupted)
        has_feed_forward_heads = str(self.cfg.task_heads) == "ffn"
        selection_alone = None if has_feed_forward_heads or "mws" not in self.tasks else selected
        states = self.discriminator(embeddings, padding_mask, last_positions=selection_alone)
        if len(self.tasks) == 1:
            return states[-1], states[-1]
        if has_feed_forward_heads:
            selecting = self.mws_ffn(states[-1])
            return (
                selecting if selected is None else gather_positions(selecting, selected),
                self.rtd_ffn(states[-1]),
            )
        bias = self.discriminator.attention_bias(embeddings, padding_mask)
        return states[-1], self.discriminator.run_layer(self.rtd_layer, states[-2], bias)

    def select(self, states: Tensor, candidates: Tensor) -> Tensor:
        """e(x') . h_MWS(x^R)_i of every candidate x' (Eq. 7): [B,M,D], [B,M,1+K] -> [B,M,1+K] float32."""
        hidden = self.mws_head(states)  # [B,M,E]
        return torch.einsum("bme,bmke->bmk", hidden, self.embed_tokens(candidates)).float()


# Embedding 128 in small: section 4.1 and Table 5. tiny: the generator has AMOS-tiny's two layers, half of one is none.
register_sizes("teams", tiny={"generator_layers": 2, "linear_init_std": 0.1}, small={"embedding_dim": 128})
