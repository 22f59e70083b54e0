"""What fine-tuning takes from a pretraining model, who builds the model of a task, and what that says of its heads.

Pretraining knows no task with labels: the classes of models with heads register themselves here.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from amos_fairseq.models.configuration import EncoderConfig, transformer_config
from amos_fairseq.modules.encoder import TransformerConfig

logger = logging.getLogger(__name__)

# Prefixes of the final encoder in a pretraining checkpoint (a discriminator, or the only network of MLM), and here.
ENCODER_IN_PRETRAINING = ("discriminator.", "transformer.")
ENCODER = "encoder."
EMBEDDING = "embed_tokens."
# What the discriminator adds to the generator's embeddings, in a model with disentangled embeddings.
DELTA = "disentangled_embedding.delta.weight"
# Prefix of the heads for texts, which fairseq's own ``sentence_prediction`` asks for.
CLASSIFICATION = "classification_heads."
# BERT's pooler in the checkpoint of an imported model.
POOLER = {"pooler_weight": "weight", "pooler_bias": "bias"}


class PretrainedEncoder:
    """The encoder that fine-tuning takes from a pretraining model: its sizes, and its weights in a checkpoint."""

    def __init__(self, cfg: EncoderConfig) -> None:
        self.cfg = cfg

    def config(self) -> TransformerConfig:
        return transformer_config(self.cfg)

    def take(self, state_dict: dict[str, Tensor]) -> None:
        """Rename the encoder of a pretraining checkpoint, in place, and remove generator and heads."""
        if not any(key.startswith(ENCODER_IN_PRETRAINING) for key in state_dict):
            return  # already fine-tuned
        if DELTA in state_dict:
            table = f"{EMBEDDING}weight"
            state_dict[table] = state_dict[table] + state_dict.pop(DELTA)
        dropped = set()
        for key in list(state_dict):
            if key.startswith(ENCODER_IN_PRETRAINING):
                state_dict[ENCODER + key.partition(".")[2]] = state_dict.pop(key)
            elif not key.startswith(EMBEDDING) and key not in POOLER:
                dropped.add(key.partition(".")[0])
                del state_dict[key]
        logger.info(f"fine-tuning uses the encoder of a pretraining checkpoint; not used: {', '.join(sorted(dropped))}")


@dataclass(frozen=True)
class ExportedHead:
    """A head that a class of Hugging Face computes.

    Attributes:
        kind: sequence_classification, token_classification or question_answering: a label of
            :class:`amos_fairseq.hugging_face.weights.Head`, which has the names of its weights.
        module: whose weights these are.
        outputs: from the last states [B,T,D] and a mask of padding [B,T] to what the class returns.
        description: for messages and the model card.
        settings: for the configuration of the class, besides the names of labels.
    """

    kind: str
    module: nn.Module
    outputs: Callable[[Tensor, Tensor], Tensor]
    description: str
    settings: dict[str, Any] = field(default_factory=dict)


# Which class has the heads of a checkpoint, by the prefix of their weights; the tasks add theirs.
CLASS_OF_HEADS: dict[str, type[BaseFairseqModel]] = {}


def reads_heads(prefix: str) -> Callable[[type[BaseFairseqModel]], type[BaseFairseqModel]]:
    """Register a class as that of all checkpoints with weights of this prefix."""

    def register(model_class: type[BaseFairseqModel]) -> type[BaseFairseqModel]:
        CLASS_OF_HEADS[prefix] = model_class
        return model_class

    return register


def is_fine_tuned(state_dict: dict[str, Tensor]) -> bool:
    return any(key.startswith(ENCODER) for key in state_dict)


def class_of_checkpoint(state_dict: dict[str, Tensor]) -> type[BaseFairseqModel]:
    present = [prefix for prefix in CLASS_OF_HEADS if any(key.startswith(prefix) for key in state_dict)]
    return CLASS_OF_HEADS[max(present, key=len)] if present else CLASS_OF_HEADS[CLASSIFICATION]


def same_shape(key: str, *sides: dict[str, Tensor]) -> bool:
    """Return whether all sides hold a tensor of this name and of one shape."""
    return all(key in side for side in sides) and len({side[key].shape for side in sides}) == 1


def describe_mismatch(key: str, checkpoint: dict[str, Tensor], here: dict[str, Tensor]) -> str:
    """Return a text that names the shape of a tensor on both sides."""
    there, wanted = (tuple(side[key].shape) if key in side else "absent" for side in (checkpoint, here))
    return f"{key} is {there} in the checkpoint, {wanted} here"
