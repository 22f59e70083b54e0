"""ELECTRA: a small generator and a discriminator of replaced tokens (Clark, thesis 2021, sections 5.1 and 5.3.1).

Shapes: B sequences, T tokens, M masked positions a sequence, D width of the encoder, E of the token embeddings, V rows of
the vocabulary.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model
from torch import Tensor

from amos_fairseq.functional.positions import gather_positions, replace_positions
from amos_fairseq.functional.sampling import gumbel_max, gumbel_noise
from amos_fairseq.models.configuration import (
    EncoderConfig,
    embedding_width,
    encoder_shape,
    register_sizes,
)
from amos_fairseq.models.embedding_rows import EmbeddingRows
from amos_fairseq.models.pretraining import PretrainingModel
from amos_fairseq.modules.encoder import EncoderShape, TransformerEncoder
from amos_fairseq.modules.heads import POOLER_ACTIVATIONS, DenseDetectionHead, MlmHead


@dataclass
class ElectraConfig(EncoderConfig):
    """ELECTRA-base (thesis Table 5.1)."""

    pooler_activation_fn: ChoiceEnum(list(POOLER_ACTIVATIONS)) = field(
        default="gelu", metadata={"help": "activation of a classification head"}
    )
    generator_size: float = field(
        default=1 / 3,
        metadata={"help": "width, FFN width and attention heads of the generator, as a part of the encoder's"},
    )


class ElectraOutput(NamedTuple):
    """Everything that the criterion and the log read."""

    mlm_nll: Tensor  # [B,M] float32, -log p(original), nats
    mlm_correct: Tensor  # [B,M] bool, the generator's best guess is the original
    sampled_tokens: Tensor  # [B,M] int64
    corrupted_tokens: Tensor  # [B,T] int64, what the discriminator reads
    replaced: Tensor  # [B,T] bool, differs from the original
    rtd_logits: Tensor  # [B,T] float32, positive for "replaced"


@register_model("electra", dataclass=ElectraConfig)
class ElectraModel(PretrainingModel):
    """A generator that is narrower than the discriminator; both read the same embeddings (section 5.3.1).

    Token and position embeddings, token types and their LayerNorm are shared; the generator projects them to its width, and
    its output layer is tied to the token embeddings.
    """

    def __init__(self, cfg: ElectraConfig, rows: EmbeddingRows):
        super().__init__(cfg, rows)
        shape = generator_shape(cfg)
        self.discriminator = TransformerEncoder(encoder_shape(cfg))
        self.generator = TransformerEncoder(shape)
        for shared in ("embed_positions", "embed_token_types", "embedding_norm"):
            setattr(self.generator, shared, getattr(self.discriminator, shared))
        self.mlm_head = MlmHead(shape.width, embedding_width(cfg), rows.num_rows, cfg.layer_norm_eps)
        self.detection_head = DenseDetectionHead(cfg.encoder_embed_dim)
        self.initialize()

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
        hidden = self.generate(masked_tokens, masked_positions, padding_mask)
        nll, correct = self.guess(hidden, self.mlm_head.bias, tokens.gather(1, masked_positions))
        sampled = self.sample(hidden)
        corrupted = replace_positions(tokens, masked_positions, sampled, masked_weights)
        states = self.discriminator(self.embed_tokens(corrupted), padding_mask)[-1]
        return ElectraOutput(
            mlm_nll=nll,
            mlm_correct=correct,
            sampled_tokens=sampled,
            corrupted_tokens=corrupted,
            replaced=corrupted.ne(tokens),
            rtd_logits=self.detection_head(states),
        )

    def generate(self, masked_tokens: Tensor, masked_positions: Tensor, padding_mask: Tensor | None) -> Tensor:
        """The generator after its MLM head, at the masked positions: [B,M,E]."""
        states = self.generator(self.embed_tokens(masked_tokens), padding_mask)[-1]
        return self.mlm_head(gather_positions(states, masked_positions))

    @torch.no_grad()
    def propose(
        self, tokens: Tensor, masked_tokens: Tensor, masked_positions: Tensor, masked_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What :meth:`AmosModel.propose` returns, for the one depth that there is: logits [1,B,M,V] and weights [B,M,1]."""
        hidden = self.generate(masked_tokens, masked_positions, tokens.eq(self.rows.pad))
        logits = self.logits(hidden, self.mlm_head.bias)
        return logits[None], logits.new_ones(*masked_positions.shape, 1)

    @property
    def depth_names(self) -> list[str]:
        return [str(len(self.generator.layers))]

    @torch.no_grad()
    def sample(self, hidden: Tensor) -> Tensor:
        """Replacements [B,M] from the generator's softmax without special tokens and padding rows; no gradient passes."""
        logits = self.sampling_logits(hidden, self.mlm_head.bias)
        return gumbel_max(logits, gumbel_noise(logits))


def generator_shape(cfg: ElectraConfig) -> EncoderShape:
    """The encoder's shape with ``generator_size`` of its width, FFN width and heads.

    Raises:
        ValueError: the part is not above 0, or leaves no whole number of heads.
    """
    shape, width = encoder_shape(cfg), embedding_width(cfg)
    sizes = {name: getattr(shape, name) * cfg.generator_size for name in ("width", "ffn_width", "num_heads")}
    whole = {name: round(size) for name, size in sizes.items()}
    if any(size < 1 or abs(size - whole[name]) > 1e-6 * size for name, size in sizes.items()):
        raise ValueError(
            f"--generator-size {cfg.generator_size:g} leaves no whole width, FFN width or number of attention heads: "
            f"it must divide {shape.width}, {shape.ffn_width} and {shape.num_heads}"
        )
    return dataclasses.replace(shape, **whole, embedding_width=width)


register_sizes(
    "electra",
    tiny={"generator_size": 0.5, "linear_init_std": 0.1},
    small={"embedding_dim": 128, "generator_size": 0.25},
    base={"generator_size": 1 / 3},
    large={"generator_size": 0.25},
)
