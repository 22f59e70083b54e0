"""BERT's masked language model (thesis section 5.1.1), the baseline of the family; without next-sentence prediction.

Shapes: B sequences, T tokens, M masked positions a sequence, E width of the token embeddings, V rows of the vocabulary.
"""

from typing import NamedTuple

from fairseq.models import register_model
from torch import Tensor

from amos_fairseq.models.configuration import EncoderConfig, embedding_width, encoder_shape, register_sizes
from amos_fairseq.models.embedding_rows import EmbeddingRows
from amos_fairseq.models.pretraining import SingleGuesserModel
from amos_fairseq.modules.encoder import TransformerEncoder
from amos_fairseq.modules.heads import MlmHead


class MlmOutput(NamedTuple):
    """Everything that the criterion and the log read."""

    mlm_nll: Tensor  # [B,M] float32, -log p(original), nats
    mlm_correct: Tensor  # [B,M] bool, the best guess is the original


@register_model("mlm", dataclass=EncoderConfig)
class MlmModel(SingleGuesserModel):
    """One encoder that guesses the masked tokens; its output layer is tied to the token embeddings."""

    def __init__(self, cfg: EncoderConfig, rows: EmbeddingRows):
        super().__init__(cfg, rows)
        self.transformer = TransformerEncoder(encoder_shape(cfg))
        self.mlm_head = MlmHead(cfg.encoder_embed_dim, embedding_width(cfg), rows.num_rows, cfg.layer_norm_eps)
        self.initialize()

    @property
    def encoder(self) -> TransformerEncoder:
        return self.transformer

    @property
    def guesser(self) -> TransformerEncoder:
        return self.transformer

    def forward(
        self,
        tokens: Tensor,
        masked_tokens: Tensor,
        masked_positions: Tensor,
        masked_weights: Tensor,
        has_padding: bool = True,
    ) -> MlmOutput:
        """Mask and guess; the arguments are those of :meth:`AmosModel.forward`."""
        padding_mask = tokens.eq(self.rows.pad) if has_padding else None
        hidden = self.generate(masked_tokens, masked_positions, padding_mask)
        return MlmOutput(*self.mlm_loss(hidden, self.mlm_head.bias, tokens.gather(1, masked_positions)))


# Embedding 128 in small: thesis Table 5.1, and section 5.4.1 for BERT-Small.
register_sizes("mlm", tiny={"linear_init_std": 0.1}, small={"embedding_dim": 128})
