"""What the models of all objectives share: how they are built, and the encoder that stays when pretraining is over."""

import abc
from typing import Any

from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.embedding_rows import EmbeddingRows
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.modules.encoder import TransformerEncoder


class PretrainingModel(BaseFairseqModel, abc.ABC):
    """A model that learns from masked blocks; its ``encoder`` reads ``embed_tokens`` and is what a user keeps."""

    cfg: EncoderConfig
    rows: EmbeddingRows
    embed_tokens: nn.Embedding

    @classmethod
    def build_model(cls, cfg: EncoderConfig, task: Any) -> BaseFairseqModel:
        """The model itself for a task that pretrains, the encoder with room for a head for every other task.

        Raises:
            UserError: the settings describe no model.
        """
        rows = EmbeddingRows.of(task.source_dictionary)
        try:
            # Only a task that masks blocks knows which share of a block it masks.
            return cls(cfg, rows) if hasattr(task, "masked_share") else FineTunedModel(cfg, rows)
        except ValueError as error:
            raise UserError(f"the model cannot be built: {error}") from error

    @property
    @abc.abstractmethod
    def encoder(self) -> TransformerEncoder:
        """The encoder to keep."""

    def extract_features(self, tokens: Tensor) -> Tensor:
        """Hidden states of the last layer of the encoder: [B,T] int64 -> [B,T,D]."""
        return self.encoder(self.embed_tokens(tokens), tokens.eq(self.rows.pad))[-1]

    def max_positions(self) -> int:
        return self.cfg.max_positions
