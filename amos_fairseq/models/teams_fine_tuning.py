"""The branch of a TEAMS model that is kept."""

from typing import TYPE_CHECKING

from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.models.fine_tuning import FineTunedModel
from amos_fairseq.models.teams_layout import kept_shape
from amos_fairseq.modules.encoder import EncoderShape

if TYPE_CHECKING:
    from amos_fairseq.models.teams import TeamsConfig

# What stands in a checkpoint only where the task was trained.
HEAD_OF_TASK = {"mws": "mws_head.", "rtd": "detection_head."}
LAYERS, RTD_LAYER = "discriminator.layers.", "rtd_layer."


class FineTunedTeams(FineTunedModel):
    """As its base; out of a pretraining checkpoint it loads the branch that ``--representation`` names (Table 3)."""

    @staticmethod
    def kept_shape(cfg: "TeamsConfig") -> EncoderShape:
        return kept_shape(cfg)

    def take_encoder(self, state_dict: dict[str, Tensor]) -> None:
        choose_branch(state_dict, str(self.cfg.representation))
        super().take_encoder(state_dict)


def choose_branch(state_dict: dict[str, Tensor], representation: str) -> None:
    """Make the branch ``representation``, "mws" or "rtd", the discriminator of a pretraining checkpoint, in place.

    Raises:
        UserError: the checkpoint has no such branch.
    """
    layers = {int(key.removeprefix(LAYERS).partition(".")[0]) for key in state_dict if key.startswith(LAYERS)}
    if not layers:  # fine-tuned already
        return
    present = [task for task, head in HEAD_OF_TASK.items() if any(key.startswith(head) for key in state_dict)]
    if representation not in present:
        raise UserError(
            f"the checkpoint holds no branch {representation}: it was trained without that task; give --representation "
            f"{present[0] if present else 'of a TEAMS checkpoint'}"
        )
    if representation == "mws" or present == ["rtd"]:
        return
    of_rtd = [key for key in state_dict if key.startswith(RTD_LAYER)]
    if not of_rtd:
        raise UserError(
            "both tasks of the checkpoint stand on one encoder (--task-heads ffn): leave --representation out"
        )
    for key in of_rtd:
        state_dict[f"{LAYERS}{max(layers)}.{key.removeprefix(RTD_LAYER)}"] = state_dict.pop(key)
