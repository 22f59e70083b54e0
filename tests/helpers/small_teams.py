"""A TEAMS model small enough for naive loops."""

import torch
from small_models import SETTINGS, small_task

from amos_fairseq.criterions.teams import TeamsCriterion
from amos_fairseq.models.teams import TeamsConfig, TeamsModel

# Four layers: half of a generator half as deep is one layer.
TEAMS = {name: value for name, value in SETTINGS.items() if name not in ("generator_depths", "max_update")}
TEAMS |= {"encoder_layers": 4, "negative_samples": 3}
ONLY_RTD = {"mws_loss_weight": 0.0, "representation": "rtd"}
ONLY_MWS = {"rtd_loss_weight": 0.0}


def small_teams(seed: int = 0, task=None, **settings):
    """In training mode, no dropout unless asked for; LayerNorms and biases are random as well."""
    torch.manual_seed(seed)
    model = TeamsModel.build_model(TeamsConfig(**(TEAMS | settings)), task or small_task())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


def teams_criterion(model: TeamsModel, mlm_loss_weight: float = 1.0) -> TeamsCriterion:
    """With the weights that the model has, as the recipes' interpolation gives them."""
    return TeamsCriterion(small_task(), mlm_loss_weight, model.cfg.rtd_loss_weight, model.cfg.mws_loss_weight)
