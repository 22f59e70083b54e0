"""What a fine-tuned model says of its heads: how a class of Hugging Face computes them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


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
