"""AdamW that leaves LayerNorm, biases, mixture weights and bias tables undecayed, in one fused step."""

import ast
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, List

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import nn

from amos_fairseq.errors import UserError
from amos_fairseq.modules.initialization import NO_DECAY

logger = logging.getLogger(__name__)


@dataclass
class GroupedAdamConfig(FairseqDataclass):
    """AMOS Table 3; no weight decay is given there (0.01 in TEAMS Table 5 and thesis Table 5.1)."""

    adam_betas: str = field(default="(0.9, 0.98)", metadata={"help": "decay rates of the two moments"})
    adam_eps: float = field(default=1e-6, metadata={"help": "epsilon of Adam"})
    weight_decay: float = field(default=0.0, metadata={"help": "decoupled weight decay"})
    decay_all_parameters: bool = field(
        default=False,
        metadata={"help": "decay LayerNorm weights, biases, mixture weights and bias tables too, as fairseq does"},
    )
    lr: List[float] = II("optimization.lr")


@register_optimizer("grouped_adam", dataclass=GroupedAdamConfig)
class GroupedAdam(FairseqOptimizer):
    """Decoupled weight decay (AdamW) over two parameter groups.

    fairseq's ``adam`` decays every parameter, and outside CUDA it loops over them in Python. NVIDIA's fused Adam is used
    where apex is installed beside a GPU, PyTorch's fused kernels otherwise.
    """

    def __init__(self, cfg: GroupedAdamConfig, params: Iterable[nn.Parameter]):
        super().__init__(cfg)
        groups = parameter_groups(params, cfg.weight_decay, cfg.decay_all_parameters)
        fused_adam = apex_fused_adam()
        if fused_adam is not None:
            logger.info("optimizer: fused Adam of NVIDIA apex")
            self._optimizer = fused_adam(groups, adam_w_mode=True, **self.optimizer_config)
        else:
            self._optimizer = torch.optim.AdamW(groups, fused=True, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The settings that all parameters share; the decay is each group's own."""
        return {"lr": first(self.cfg.lr), "betas": parse_betas(self.cfg.adam_betas), "eps": self.cfg.adam_eps}

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """Moments and counters from a checkpoint; betas, epsilon and weight decay as the flags say now.

        The learning rate is the scheduler's. ``optimizer_overrides`` (``--optimizer-overrides``) come last.

        Raises:
            UserError: the checkpoint groups its parameters otherwise, or the overrides name the weight decay, which
                would reach the parameters without decay too.
        """
        overrides = optimizer_overrides or {}
        if "weight_decay" in overrides:
            raise UserError("--optimizer-overrides cannot set weight_decay: give --weight-decay")
        here, saved = ([len(g["params"]) for g in groups] for groups in (self.param_groups, state_dict["param_groups"]))
        if here != saved:
            raise UserError(
                f"the checkpoint's optimizer has groups of {saved} parameters, this run's of {here}: keep "
                "--decay-all-parameters and the model as they were, or give --reset-optimizer"
            )
        flags = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, settings in zip(self.param_groups, flags, strict=True):
            group.update(settings | overrides)

    @property
    def supports_flat_params(self) -> bool:
        """One flat tensor would lose the groups."""
        return False


def parameter_groups(params: Iterable[nn.Parameter], weight_decay: float, decay_all: bool) -> list[dict[str, Any]]:
    """Parameters marked as not decayed, and the others; the order inside a group is the given one."""
    decayed, undecayed = [], []
    for parameter in params:
        marked = getattr(parameter, "param_group", None) == NO_DECAY
        (undecayed if marked and not decay_all else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def parse_betas(text: str) -> tuple[float, float]:
    """ "(0.9, 0.98)" -> (0.9, 0.98); raises UserError."""
    try:
        first_moment, second_moment = ast.literal_eval(text)
        betas = float(first_moment), float(second_moment)
    except (ValueError, TypeError, SyntaxError):
        betas = (-1.0, -1.0)
    if not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"--adam-betas needs two numbers from 0 to below 1, such as '(0.9, 0.98)'; got {text!r}")
    return betas


def first(lr: List[float] | float) -> float:
    """fairseq's list of learning rates by epoch starts with the one to begin with."""
    return float(lr) if isinstance(lr, (int, float)) else float(lr[0])


def apex_fused_adam() -> type[torch.optim.Optimizer] | None:
    """NVIDIA's FusedAdam if it can run here. Another package on PyPI is called apex as well and has no optimizers."""
    if not torch.cuda.is_available():
        return None
    try:
        from apex.optimizers import FusedAdam
    except ImportError:
        return None
    return FusedAdam
