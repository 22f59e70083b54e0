"""The training step around :class:`HuggingFaceObjective`, as PyTorch's own tools give it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from amos_fairseq.bench.fairseq_step import moments_of, tensors_of
from amos_fairseq.bench.settings import Setup
from amos_fairseq.optim.grouped_adam import first, parse_betas

INPUTS = ("tokens", "masked_tokens", "masked_positions")


class HuggingFaceStep:
    """float32 weights, autocast to 16 bit where asked, fused AdamW with the recipe's numbers, clipping."""

    def __init__(self, setup: Setup, module: nn.Module, name: str, description: str):
        self.name, self.description = name, description
        self.module = module.to(setup.device).train()
        self.device, self.dtype = setup.device, setup.dtype
        self.clip_norm = setup.cfg.optimization.clip_norm
        self.optimizer = fused_adamw(module, setup.cfg)
        self.scaler = torch.amp.GradScaler(setup.device.type, enabled=setup.precision == "fp16")

    def step(self, batch: dict[str, Any]) -> None:
        """Forward, backward, clipping and optimizer; see :class:`Contestant`."""
        inputs = {name: batch["net_input"][name].to(self.device, non_blocking=True) for name in INPUTS}
        self.optimizer.zero_grad(set_to_none=True)
        with self.number_format():
            loss = self.module(**inputs)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        if self.clip_norm > 0:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        loss.item()  # the loss is logged, as our side logs its own

    def number_format(self) -> contextlib.AbstractContextManager:
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def state(self) -> Iterator[Tensor]:
        """Everything that stays between two steps."""
        yield from tensors_of(self.module)
        yield from moments_of(self.optimizer)


def fused_adamw(module: nn.Module, cfg: DictConfig) -> torch.optim.AdamW:
    """Weight matrices decayed, vectors not, as in the library's examples."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": cfg.optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=first(cfg.optimization.lr),
        betas=parse_betas(cfg.optimizer.adam_betas),
        eps=cfg.optimizer.adam_eps,
        fused=True,
    )
