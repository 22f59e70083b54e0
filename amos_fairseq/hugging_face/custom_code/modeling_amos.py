"""AMOS encoders with the relative positions of the authors' released checkpoint, as Hugging Face models.

They are MPNet except for one function: the row of the bias table for the distance between two tokens. Loading them needs
``trust_remote_code=True``.
"""

import torch
from torch import Tensor
from transformers import (
    MPNetConfig,
    MPNetForMaskedLM,
    MPNetForQuestionAnswering,
    MPNetForSequenceClassification,
    MPNetForTokenClassification,
    MPNetModel,
)
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from amos_fairseq.functional.relative_position import amos_bucket
from amos_fairseq.hugging_face.custom_code.modeling_mean import reading_mean


class AmosConfig(MPNetConfig):
    """MPNet's configuration, and the distance from which on all relative positions share a row."""

    model_type = "amos"

    def __init__(self, relative_attention_max_distance: int = 128, **settings):
        super().__init__(**settings)
        self.relative_attention_max_distance = relative_attention_max_distance


class AmosEncoder(MPNetEncoder):
    """MPNet's layers with the bias table of the released checkpoint."""

    def compute_position_bias(self, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 0) -> Tensor:
        """[B,T,D] -> [B,H,T,T]; positions count from the first token, and the number of buckets is the table's."""
        positions = torch.arange(x.size(1), device=x.device)
        distance = positions[None, :] - positions[:, None]
        table = self.relative_attention_bias
        rows = amos_bucket(distance, table.num_embeddings, self.config.relative_attention_max_distance)
        return table(rows).permute(2, 0, 1).unsqueeze(0).expand(x.size(0), -1, -1, -1)


class AmosModel(MPNetModel):
    config_class = AmosConfig

    def __init__(self, config: AmosConfig, add_pooling_layer: bool = True):
        super().__init__(config, add_pooling_layer)
        self.encoder = AmosEncoder(config)
        self.post_init()


class _WithHead:
    config_class = AmosConfig

    def __init__(self, config: AmosConfig):
        super().__init__(config)
        self.mpnet = AmosModel(config, add_pooling_layer=False)
        self.post_init()


class AmosForMaskedLM(_WithHead, MPNetForMaskedLM):
    pass


class AmosForTokenClassification(_WithHead, MPNetForTokenClassification):
    pass


class AmosForSequenceClassification(_WithHead, MPNetForSequenceClassification):
    pass


class AmosForQuestionAnswering(_WithHead, MPNetForQuestionAnswering):
    pass


MeanAmosConfig, MeanAmosForSequenceClassification = reading_mean(AmosForSequenceClassification, __name__)
