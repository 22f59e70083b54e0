"""BERT's masked language model (thesis section 5.1.1), the baseline; without next-sentence prediction.

Shapes: B sequences, T tokens, M masked positions per sequence, E width of the token embeddings, V padded vocabulary size.
"""

from typing import Any

from fairseq.models import register_model
from torch import Tensor

from amos_fairseq.models.configuration import (
    DEBERTA_MINI,
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


class StockMaskedLm(MlmModel):
    """The same network and weights for fairseq's own task and criterion ``masked_lm``."""

    def forward(self, src_tokens: Tensor, masked_tokens: Tensor | None = None, **unused: Any) -> tuple[Tensor, None]:
        """Compute the logits at ``masked_tokens`` ([B,T] bool; None: everywhere) of ``src_tokens`` [B,T] int64: [N,V] float32.

        fairseq's criterion also passes ``src_lengths`` and ``src_id``, which RoBERTa does not use either.
        """
        states = self.extract_features(src_tokens)
        states = states.flatten(0, 1) if masked_tokens is None else states[masked_tokens]
        return self.logits(self.mlm_head(states), self.mlm_head.bias), None


MlmModel.for_masked_lm = StockMaskedLm

# Embedding 128 in small: thesis Table 5.1, and section 5.4.1 for BERT-Small.
register_sizes(
    "mlm",
    tiny={"linear_init_std": 0.1},
    mini=MINI,
    modern_mini=MODERN_MINI,
    deberta_mini=DEBERTA_MINI,
    small={"embedding_dim": 128},
)
