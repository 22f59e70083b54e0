"""In the place of NVIDIA's apex, which needs a GPU: FusedAdam with its arguments, states and arithmetic, on any device.

It counts updates in ``step`` of the parameter group, and keeps float32 ``exp_avg`` and ``exp_avg_sq`` for each parameter that
has had a gradient.
"""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW, or Adam with L2 regularization if ``adam_w_mode`` is False."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        **others,
    ):
        assert others in ({}, {"set_grad_none": True})  # amsgrad, capturable and master_weights are not imitated
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        if any(argument is not None for argument in (closure, grads, output_params, scale, grad_norms, grad_scaler)):
            raise RuntimeError("call step() with no arguments")
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            corrections = [1 - beta ** group["step"] if group["bias_correction"] else 1.0 for beta in group["betas"]]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, *corrections)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], correction_1: float, correction_2: float) -> None:
        state = self.state[parameter]
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(parameter).float()
            state["exp_avg_sq"] = torch.zeros_like(parameter).float()
        gradient, decay = parameter.grad.float(), group["weight_decay"] * parameter.float()
        if not self.adam_w_mode:
            gradient, decay = gradient + decay, 0.0
        beta_1, beta_2 = group["betas"]
        state["exp_avg"].mul_(beta_1).add_(gradient, alpha=1 - beta_1)
        state["exp_avg_sq"].mul_(beta_2).add_(gradient * gradient, alpha=1 - beta_2)
        denominator = (state["exp_avg_sq"].sqrt() / math.sqrt(correction_2)) + group["eps"]
        parameter.sub_(group["lr"] * (state["exp_avg"] / correction_1 / denominator + decay))


FusedAdam.__module__ = "apex.optimizers.fused_adam"


def install(monkeypatch, is_built: bool = True) -> None:
    """Let ``import apex`` find these classes on a machine with a GPU; if not ``is_built``, apex lacks its CUDA extensions."""
    contents = {
        "apex": {},
        "apex.optimizers": {"FusedAdam": FusedAdam},
        "apex.multi_tensor_apply": {"multi_tensor_applier": SimpleNamespace(available=is_built)},
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
