"""BERT's masked language model (thesis section 5.1.1), the baseline; without next-sentence prediction.

Shapes: B sequences, T tokens, M masked positions per sequence, E width of the token embeddings, V padded vocabulary size.
"""

from typing import NamedTuple

from fairseq.models import register_model
from torch import Tensor

from amos_fairseq.models.configuration import (
    MINI,
    MODERN_MINI,
    EncoderConfig,
    PaddedVocabulary,
    register_sizes,
    transformer_config,
)
from amos_fairseq.models.pretraining import SingleMlmModel
from amos_fairseq.modules.encoder import TransformerEncoder


class MlmOutput(NamedTuple):
    """Input of the criterion and the log."""

    mlm_nll: Tensor  # [B,M] float32, -log p(original), nats
    mlm_correct: Tensor  # [B,M] bool, the most probable token is the original


@register_model("mlm", dataclass=EncoderConfig)
class MlmModel(SingleMlmModel):
    """One encoder that predicts the masked tokens; its output layer is tied to the token embeddings."""

    def __init__(self, cfg: EncoderConfig, vocabulary: PaddedVocabulary):
        super().__init__(cfg, vocabulary)
        self.transformer = transformer_config(cfg).build()
        self.mlm_head = self.make_mlm_head(cfg.encoder_embed_dim)
        self.initialize()

    @property
    def encoder(self) -> TransformerEncoder:
        return self.transformer

    @property
    def mlm_encoder(self) -> TransformerEncoder:
        return self.transformer

    def forward(
        self,
        tokens: Tensor,
        masked_tokens: Tensor,
        masked_positions: Tensor,
        masked_weights: Tensor,
        has_padding: bool = True,
    ) -> MlmOutput:
        """Predict the masked tokens. The arguments are those of :meth:`AmosModel.forward`."""
        padding_mask = tokens.eq(self.vocabulary.pad) if has_padding else None
        hidden = self.generate(masked_tokens, masked_positions, padding_mask)
        return MlmOutput(*self.mlm_loss(hidden, self.mlm_head.bias, tokens.gather(1, masked_positions)))


# Embedding 128 in small: thesis Table 5.1, and section 5.4.1 for BERT-Small.
register_sizes("mlm", tiny={"linear_init_std": 0.1}, mini=MINI, modern_mini=MODERN_MINI, small={"embedding_dim": 128})
