"""Which way of scoring belongs to the model of a checkpoint."""

from amos_fairseq.checkpoints.read import Pretrained
from amos_fairseq.errors import UserError
from amos_fairseq.models.electra import ElectraModel
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.scoring.cloze import Cloze, MaskedCloze, OnePassCloze
from amos_fairseq.scoring.electra import ElectraCloze


def cloze_of(pretrained: Pretrained, tokens_per_batch: int, electra_formula: str | None = None) -> Cloze:
    """How the model of a checkpoint scores text; ``electra_formula`` as for :class:`ElectraCloze`, exact where it is None.

    Raises:
        UserError: its objective gives no probability of a token, or it was fine-tuned; or a formula is given and it is
            no ELECTRA.
    """
    model = pretrained.model
    if isinstance(model, ElectraModel):
        return ElectraCloze(pretrained, tokens_per_batch, electra_formula or "exact")
    if electra_formula is not None:
        raise UserError(f"--electra-formula has no meaning for {pretrained.file}, which is no ELECTRA: leave it out")
    if isinstance(model, ElectricModel):
        return OnePassCloze(pretrained, tokens_per_batch)
    if isinstance(model, MlmModel):
        return MaskedCloze(pretrained, tokens_per_batch)
    name = type(model).__name__
    raise UserError(
        f"{pretrained.file} holds a model of the class {name}, which gives no probability of a token: amos score reads "
        "checkpoints of pretraining with the objectives mlm, electra and electric"
    )
