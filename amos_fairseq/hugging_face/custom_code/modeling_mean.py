"""Classes of transformers whose classification head reads the mean of the last states instead of the state of the first token.

Loading them needs ``trust_remote_code=True``. The type of each configuration is one that transformers does not have: without
this code it refuses to load a folder, where it would otherwise give the head the wrong state.
"""

from typing import Any

from torch import nn
from transformers import (
    BertForSequenceClassification,
    DebertaV2ForSequenceClassification,
    ElectraForSequenceClassification,
    MPNetForSequenceClassification,
)


def mean_as_first_state(encoder: nn.Module, _: Any, inputs: dict[str, Any], output: Any) -> Any:
    """Return an encoder's output with the mean of its states over all tokens that are not padding, special ones included, as
    the only state: [B,T,D] -> [B,1,D]. BERT's pooler is applied to it again."""
    states, mask = output[0], inputs.get("attention_mask")
    is_token = (states.new_ones(states.shape[:2]) if mask is None else mask).bool()[..., None]
    mean = states.masked_fill(~is_token, 0).sum(1, keepdim=True) / is_token.sum(1, keepdim=True)
    if isinstance(output, tuple):  # MPNet with return_dict=False
        return (mean, *output[1:])
    output.last_hidden_state = mean
    if getattr(encoder, "pooler", None) is not None:
        output.pooler_output = encoder.pooler(mean)
    return output


class ReadsMean:
    def __init__(self, config: Any):
        super().__init__(config)
        self.base_model.register_forward_hook(mean_as_first_state, with_kwargs=True)


def reading_mean(base: type, module: str) -> tuple[type, type]:
    """Return a configuration with a type of its own, and the class with it that reads the mean, for ``module``."""
    of_base, where = base.config_class, {"__module__": module}
    settings = {"model_type": f"mean_{of_base.model_type}", **where}
    config = type(f"Mean{of_base.__name__}", (of_base,), settings)
    return config, type(f"Mean{base.__name__}", (ReadsMean, base), {"config_class": config, **where})


MeanBertConfig, MeanBertForSequenceClassification = reading_mean(BertForSequenceClassification, __name__)
MeanDebertaV2Config, MeanDebertaV2ForSequenceClassification = reading_mean(DebertaV2ForSequenceClassification, __name__)
MeanElectraConfig, MeanElectraForSequenceClassification = reading_mean(ElectraForSequenceClassification, __name__)
MeanMPNetConfig, MeanMPNetForSequenceClassification = reading_mean(MPNetForSequenceClassification, __name__)
