"""Fused AdamW without weight decay for LayerNorm, biases, mixture weights and bias tables, and with layer-wise rates."""

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, List  # noqa: UP035 (fairseq reads the types of config classes, in typing's spelling)

import numpy as np
import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor, nn

from amos_fairseq.errors import UserError
from amos_fairseq.modules.encoder import ParameterGroup, parameter_group
from amos_fairseq.setting_checks import check_ranges, setting

# Settings of a group that are not restored from a checkpoint.
SET_BY_FLAGS = ("betas", "eps", "weight_decay", "lr_scale")


@dataclass
class GroupedAdamConfig(FairseqDataclass):
    """AMOS Table 3, which gives no weight decay (0.01 in TEAMS Table 5 and thesis Table 5.1)."""

    adam_betas: str = setting("(0.9, 0.98)", "decay rates of the two moments")
    adam_eps: float = setting(1e-6, "epsilon of Adam", "above 0")
    weight_decay: float = setting(0.0, "decoupled weight decay", "0 or more")
    bias_correction: bool = field(
        default=True,
        metadata={
            "argparse_alias": "--no-bias-correction",
            "help": "as a flag, leave out Adam's bias correction, as the released code of ELECTRA does",
        },
    )
    decay_all_parameters: bool = setting(
        False, "decay LayerNorm weights, biases, mixture weights and bias tables too, as fairseq does"
    )
    layer_wise_lr_decay: float = setting(
        1.0,
        "fine-tuning: a layer's learning rate is that of the layer above it times this factor, "
        "the top layer's that of the heads times it (1: one rate; thesis Table 5.2: 0.8, large models 0.9)",
        "above 0 and at most 1",
    )
    lr: List[float] = II("optimization.lr")  # noqa: UP006


@register_optimizer("grouped_adam", dataclass=GroupedAdamConfig)
class GroupedAdam(FairseqOptimizer):
    """Decoupled weight decay (AdamW) over groups of parameters, each with its own decay and share of the learning rate.

    With ``--layer-wise-lr-decay X`` layer i of n has the rate lr * X^(n + 1 - i), everything below the layers
    lr * X^(n + 1), the heads lr (thesis section 3.3; ``amos_fairseq.modules.encoder.mark_layer_depths``).
    ELECTRA's released code has one step more between heads and top layer: its X^2 is X here, and so on for lower layers.

    Without ``bias_correction`` a parameter w changes by -lr (m / (sqrt(v) + eps) + decay w), as in the optimizer of BERT's and
    ELECTRA's released code; with betas 0.9 and 0.999 the first term is 6.5 times as large at t = 10, 3.2 times at t = 100.
    """

    def __init__(self, cfg: GroupedAdamConfig, params: Iterable[nn.Parameter]):
        super().__init__(cfg)
        check_ranges(cfg, GroupedAdamConfig)
        groups = parameter_groups(params, cfg.weight_decay, cfg.decay_all_parameters, cfg.layer_wise_lr_decay)
        self._num_steps = 0
        # For each group: means, squares and counters of all parameters, once each of them has had a gradient.
        self._states: list[list[list[Tensor]]] | None = None
        self._optimizer = torch.optim.AdamW(groups, fused=True, **self.optimizer_config)
        # fairseq's 16-bit wrappers then pass scale and clipping to step(), which saves a pass over the gradients.
        self._optimizer.supports_step_with_scale = True
        self.set_lr(cfg.lr[0])

    def get_lr(self) -> float:
        """Return the schedule's learning rate, which is that of the heads."""
        group = self.param_groups[0]
        if group["lr"] == rounded(self._lr, group):
            return self._lr
        return group["lr"] / group["lr_scale"]  # PyTorch's schedulers write it there

    def set_lr(self, lr: float) -> None:
        """Set every group's share of the schedule's learning rate, on a GPU rounded to float32: so an update that is captured
        as a CUDA graph (``amos_fairseq.run.graphs``) has the same bits as another one."""
        self._lr = lr
        for group in self.param_groups:
            group["lr"] = rounded(lr, group)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Scale the gradients down to ``max_norm`` (0: do not) and return their norm before, a scalar on the device."""
        parameters = [parameter for parameter in self.params if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def step(
        self, closure: Callable[[], Tensor] | None = None, scale: Tensor | float = 1.0, groups: Any = None
    ) -> None:
        """Update the parameters with their gradients divided by ``scale``; the fused kernel divides. fairseq's trainer gives
        neither ``closure`` nor ``groups``."""
        divisor = None
        if torch.is_tensor(scale) or scale != 1.0:
            device = self.param_groups[0]["params"][0].device
            # Filled on the device: copying a host value would make the host wait.
            divisor = scale.to(device).float() if torch.is_tensor(scale) else torch.full((), scale, device=device)
        self._num_steps += 1
        is_corrected = self.cfg.bias_correction
        with nullcontext() if is_corrected else without_bias_correction(self.param_groups, self._num_steps):
            if self._states is None or not self._step_again(divisor):
                self._step_of_adamw(divisor)

    def _step_of_adamw(self, divisor: Tensor | None) -> None:
        """Make a step that creates the moments, or in which a parameter has no gradient."""
        if divisor is not None:
            self.optimizer.grad_scale = divisor
        try:
            self.optimizer.step()
        finally:
            if divisor is not None:
                del self.optimizer.grad_scale
        state, groups = self.optimizer.state, [group["params"] for group in self.param_groups]
        if self._states is None and all(parameter in state for group in groups for parameter in group):
            names = ("exp_avg", "exp_avg_sq", "step")
            self._states = [[[state[parameter][name] for parameter in group] for name in names] for group in groups]

    def _step_again(self, divisor: Tensor | None) -> bool:
        """Call AdamW's kernel, without its walk over the state of every parameter, which takes the host two milliseconds.
        Return False, and do nothing, if a parameter has no gradient."""
        gradients = [[parameter.grad for parameter in group["params"]] for group in self.param_groups]
        if any(gradient is None for of_group in gradients for gradient in of_group):
            return False
        for group, of_group, (means, squares, steps) in zip(self.param_groups, gradients, self._states, strict=True):
            torch._foreach_add_(steps, 1)
            beta1, beta2 = group["betas"]
            torch._fused_adamw_(
                group["params"],
                of_group,
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
            )
        return True

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """The settings that all groups share; weight decay and the share of the learning rate differ by group."""
        return {"lr": self.cfg.lr[0], "betas": parse_betas(self.cfg.adam_betas), "eps": self.cfg.adam_eps}

    def load_state_dict(self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None) -> None:
        """Load moments, counters and rate from a checkpoint; betas, epsilon and both decays come from the current flags. A
        scheduler that computes its own rate overwrites the saved one. ``optimizer_overrides`` (``--optimizer-overrides``) are
        applied last."""
        overrides = dict(optimizer_overrides or {})
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != saved_sizes:
            raise UserError(
                f"the checkpoint's optimizer has groups of {saved_sizes} parameters, this run's of {sizes}: keep "
                "--decay-all-parameters, --freeze-encoder, the model, and whether there is a --layer-wise-lr-decay and a "
                "--discriminator-lr-scale or --encoder-lr-scale as they were, or give --reset-optimizer"
            )
        flags = [{name: group[name] for name in SET_BY_FLAGS} for group in self.param_groups]
        super().load_state_dict(state_dict)
        self._states = None
        # A parameter that had no gradient in some updates has counted fewer.
        counts = [int(state["step"]) for state in self.optimizer.state.values() if "step" in state]
        self._num_steps = max(counts, default=0)
        first_group = self.param_groups[0]
        lr = overrides.pop("lr", first_group["lr"] / first_group.get("lr_scale", 1.0))  # fairseq's own adam has none
        for group, settings in zip(self.param_groups, flags, strict=True):
            group.update(settings | overrides)
        self.set_lr(lr)


def rounded(lr: float, group: dict[str, Any]) -> float:
    """Return a group's share of ``lr``, on a GPU as float32."""
    rate = lr * group["lr_scale"]
    return float(np.float32(rate)) if group["params"][0].is_cuda else rate


def parameter_groups(
    params: Iterable[nn.Parameter], weight_decay: float, decay_all: bool, layer_wise_lr_decay: float = 1.0
) -> list[dict[str, Any]]:
    """Group parameters by their marks, from the heads down, at each depth (with layer-wise decay) the decayed ones first. A
    group keeps the order of ``params``. ``lr_scale`` is a group's share of the learning rate."""
    by_mark: dict[ParameterGroup, list[nn.Parameter]] = {}
    for parameter in params:
        mark = parameter_group(parameter)
        if layer_wise_lr_decay == 1:
            mark = mark._replace(depth=0)
        elif mark.depth is None:
            raise UserError(
                f"--layer-wise-lr-decay {layer_wise_lr_decay:g} needs a fine-tuning task, such as sentence_prediction "
                "or squad, and a model of this package: only they mark the depth of parameters; otherwise leave it at 1"
            )
        by_mark.setdefault(mark._replace(is_decayed=mark.is_decayed or decay_all), []).append(parameter)
    return [
        {
            "params": by_mark[mark],
            "weight_decay": weight_decay if mark.is_decayed else 0.0,
            "lr_scale": mark.lr_scale * layer_wise_lr_decay**mark.depth,
        }
        for mark in sorted(by_mark, key=lambda mark: (mark.depth, -mark.lr_scale, not mark.is_decayed))
    ]


@contextmanager
def without_bias_correction(groups: list[dict[str, Any]], step: int) -> Iterator[None]:
    """Change the groups' settings for step t = ``step`` of AdamW, from 1 on, so that it has no bias correction.

    With c1 = 1 - beta1^t and c2 = 1 - beta2^t, AdamW's step is -lr (m / c1) / (sqrt(v / c2) + eps) - lr decay w. If lr is
    multiplied by r = c1 / sqrt(c2), eps by 1 / sqrt(c2) and decay by 1 / r, it is -lr m / (sqrt(v) + eps) - lr decay w.
    Parameters that had no gradient in an earlier step are corrected by a lower t.
    """
    changed = ("lr", "eps", "weight_decay")
    before = [{name: group[name] for name in changed} for group in groups]
    for group in groups:
        first_correction, second_correction = (1 - beta**step for beta in group["betas"])
        ratio = first_correction / math.sqrt(second_correction)
        group["lr"] *= ratio
        group["eps"] /= math.sqrt(second_correction)
        group["weight_decay"] /= ratio
    try:
        yield
    finally:
        for group, settings in zip(groups, before, strict=True):
            group.update(settings)


def parse_betas(text: str) -> tuple[float, float]:
    """Parse "(0.9, 0.98)" to (0.9, 0.98); raise UserError."""
    try:
        first_moment, second_moment = ast.literal_eval(text)
        betas = float(first_moment), float(second_moment)
    except (ValueError, TypeError, SyntaxError):
        betas = (-1.0, -1.0)
    if not all(0 <= beta < 1 for beta in betas):
        raise UserError(f"--adam-betas needs two numbers from 0 to below 1, such as '(0.9, 0.98)'; got {text!r}")
    return betas
