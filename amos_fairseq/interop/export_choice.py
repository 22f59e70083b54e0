"""Which part of a checkpoint ``amos export`` takes."""

from typing import Optional, Sequence

from amos_fairseq.errors import UserError
from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.interop.export_networks import discriminator_part, generator_part, mlm_part
from amos_fairseq.interop.export_parts import Part, encoder_part, fine_tuned_part
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.models.mlm import MlmModel

# What --part names.
PARTS = ("encoder", "generator", "discriminator", "mlm")


def choose_part(
    pretrained: Pretrained,
    name: Optional[str] = None,
    depth: Optional[str] = None,
    labels: Optional[Sequence[str]] = None,
) -> Part:
    """The part that ``name`` says; without it a fine-tuned checkpoint's head, MLM's network with its head, or the encoder of
    any other pretraining.

    Args:
        pretrained: a checkpoint of ours.
        name: one of ``PARTS``.
        depth: of the generator, as the log keys name it; the deepest without it.
        labels: names of the classes of a fine-tuned head, in their order.

    Raises:
        UserError: the checkpoint has no such part, or no class of Hugging Face's computes it.
    """
    model = pretrained.model
    if depth is not None and name != "generator":
        raise UserError(f"--depth {depth} chooses a depth of the generator: give --part generator with it")
    has_classes = isinstance(model, FineTunedModel) and len(model.classification_heads) and name is None
    if labels is not None and not has_classes:
        raise UserError("--labels names the classes of a fine-tuned classification head, which is not exported here")
    if isinstance(model, FineTunedModel):
        return fine_tuned_part(pretrained, model, name, labels)
    check_has_part(pretrained, name)
    if name == "mlm" or (name is None and isinstance(model, MlmModel)):
        return mlm_part(pretrained, model)
    if name == "generator":
        return generator_part(pretrained, depth)
    if name == "discriminator":
        return discriminator_part(pretrained)
    return encoder_part(model)


def check_has_part(pretrained: Pretrained, name: Optional[str]) -> None:
    """:class:`UserError` where the objective of a pretrained model has no such part."""
    is_mlm = isinstance(pretrained.model, MlmModel)
    if is_mlm and name in ("generator", "discriminator"):
        raise UserError(f"{pretrained.file} is a masked language model and has no {name}: give --part mlm or encoder")
    if name == "mlm" and not is_mlm:
        raise UserError(f"{pretrained.file} is no mlm: its masked language model is --part generator")
