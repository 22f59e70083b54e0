"""BERT's masked language model (thesis section 5.1.1), the baseline; without next-sentence prediction.

Shapes: B sequences, T tokens, M masked positions per sequence, E width of the token embeddings, V padded vocabulary size.
"""

from fairseq.models import register_model

from amos_fairseq.models.configuration import (
    MINI,
    MODERN_MINI,
    EncoderConfig,
    PaddedVocabulary,
    register_sizes,
    transformer_config,
)
from amos_fairseq.models.pretraining import PretrainingBatch, PretrainingOutput, SingleMlmModel
from amos_fairseq.modules.encoder import TransformerEncoder


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

    def forward(self, batch: PretrainingBatch) -> PretrainingOutput:
        return PretrainingOutput(*self.mlm_loss(self.generate(batch), self.mlm_head.bias, batch.originals))


# Embedding 128 in small: thesis Table 5.1, and section 5.4.1 for BERT-Small.
register_sizes("mlm", tiny={"linear_init_std": 0.1}, mini=MINI, modern_mini=MODERN_MINI, small={"embedding_dim": 128})
