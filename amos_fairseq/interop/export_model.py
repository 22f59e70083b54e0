"""A part of a checkpoint as a model of Hugging Face's, and which classes can hold it."""

from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.interop.export_parts import Part
from amos_fairseq.interop.export_tokenizer import FolderTokenizer
from amos_fairseq.interop.hugging_face import to_hugging_face
from amos_fairseq.interop.hugging_face_config import CUSTOM, family_of, hugging_face_config
from amos_fairseq.interop.hugging_face_rows import ABSENT, to_hugging_face_rows
from amos_fairseq.interop.hugging_face_tables import (
    DETECTION,
    ENCODER,
    ENERGY,
    FAMILIES,
    MASKED_LM,
    PRETRAINING,
    QUESTION_ANSWERING,
    SEQUENCE_CLASSIFICATION,
)
from amos_fairseq.interop.imported_checkpoint import NEVER_PREDICTED
from amos_fairseq.interop.piece_spelling import BOS, EOS, PAD

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput

# The first class that reads a folder, for users and for --check.
AUTO_CLASSES = {
    ENCODER: "AutoModel",
    MASKED_LM: "AutoModelForMaskedLM",
    DETECTION: "AutoModelForTokenClassification",
    PRETRAINING: "AutoModelForPreTraining",
    ENERGY: "AutoModelForPreTraining",
    SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
}


def choose_family(part: Part, wanted: Optional[str]) -> str:
    """mpnet, electra, bert, roberta or ``CUSTOM``.

    Raises:
        UserError: no class of the family computes this part.
    """
    families = possible_families(part)
    if wanted is None:
        return families[0]
    if wanted not in families:
        raise UserError(
            f"--as {wanted}: {part.description} of this checkpoint can be exported as {' or '.join(families)}"
            " (positions, width of the embeddings and activation of the head decide)"
        )
    return wanted


def possible_families(part: Part) -> list[str]:
    """The best one first."""
    first = family_of(part.shape, part.activation)
    if part.shape.position_scheme != "none":
        return [first]
    if part.kind in (PRETRAINING, ENERGY):
        return ["electra"]
    projected = part.shape.embedding_width not in (0, part.shape.width)
    if part.kind == SEQUENCE_CLASSIFICATION:
        families = ["electra"] if part.activation == "gelu" else [] if projected else ["bert", "roberta"]
    else:
        families = ["electra"] if projected else ["bert", "electra", "roberta"]
    if not families:
        raise UserError(
            "Hugging Face's ELECTRA has gelu in its classification head, this one tanh, and no other class has embeddings "
            "narrower than the encoder: export the encoder alone, with --part encoder"
        )
    return sorted(families, key=lambda family: family != first)


def build_config(part: Part, family: str, tokenizer: FolderTokenizer) -> "PretrainedConfig":
    ids = {f"{role}_token_id": tokenizer.id_of(symbol) for role, symbol in (("bos", BOS), ("pad", PAD), ("eos", EOS))}
    others = {**part.settings, **ids, "architectures": [class_name(part, family)]}
    if family == CUSTOM:
        from amos_fairseq.interop.export_code import custom_config

        return custom_config(part, tokenizer.num_rows, **others)
    return hugging_face_config(family, part.shape, tokenizer.num_rows, **others)


def class_name(part: Part, family: str) -> str:
    if family == CUSTOM:
        return FAMILIES["mpnet"].classes[part.kind].replace("MPNet", "Amos")
    return FAMILIES[family].classes[part.kind]


@torch.no_grad()
def build_model(part: Part, family: str, tokenizer: FolderTokenizer) -> "PreTrainedModel":
    """In eval mode, float32, with the vocabulary in the order of ``tokenizer``.

    A bare encoder gets the pooling layer that AutoModel builds, as the identity: ``pooler_output`` is then tanh of the
    first state, and not something random.
    """
    table = "mpnet" if family == CUSTOM else family
    weights = {
        **part.weights,
        "embed_tokens.weight": to_hugging_face_rows(
            part.weights["embed_tokens.weight"], tokenizer.ids, tokenizer.num_rows
        ),
    }
    if part.kind == MASKED_LM:
        weights["mlm_head.bias"] = _bias_of_tokens(part.weights["mlm_head.bias"], tokenizer)
    state = to_hugging_face(table, part.kind, weights)
    model = _class(part, family)(build_config(part, family, tokenizer))
    if part.kind == ENCODER and getattr(model, "pooler", None) is not None:
        width = part.shape.width
        state |= {"pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
    model.load_state_dict(state, strict=True)
    return model.eval()


def _bias_of_tokens(bias: Tensor, tokenizer: FolderTokenizer) -> Tensor:
    """Ids that no token has, in the gaps of a foreign vocabulary, are never the best guess."""
    biases = to_hugging_face_rows(bias, tokenizer.ids, tokenizer.num_rows)
    unused = torch.ones(tokenizer.num_rows, dtype=torch.bool)
    unused[tokenizer.ids[tokenizer.ids != ABSENT]] = False
    return biases.masked_fill(unused, NEVER_PREDICTED)


def _class(part: Part, family: str) -> type:
    if family == CUSTOM:
        from amos_fairseq.interop.remote_code import modeling_amos

        return getattr(modeling_amos, class_name(part, family))
    import transformers

    return getattr(transformers, class_name(part, family))


def comparable(part: Part, output: "ModelOutput", ids: Tensor) -> Tensor:
    """What ``part.outputs`` returns, out of the exported model's output; ``ids`` are those of our rows."""
    if part.kind == ENCODER:
        return output.last_hidden_state
    if part.kind == MASKED_LM:
        return output.logits[..., ids[ids != ABSENT]]
    if part.kind == DETECTION:
        return output.logits[..., 1] - output.logits[..., 0]
    if part.kind == QUESTION_ANSWERING:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits
